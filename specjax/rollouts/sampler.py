"""A sampler of a policy whose weights change between calls.

The weights are arguments of the compiled program, so a call with new weights compiles and copies nothing. The text is
exactly that of the policy whose weights are passed, whatever the drafter has learned from older ones. A drafter that
learns from text keeps what it learned: the samples of a prompt resemble each other, and those of the next epoch too.
`auto` also copies from the earlier samples of a prompt, which a `RolloutStore` keeps, and from those of the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from specjax import api
from specjax.drafters.combined.auto import copies_rollouts, replace_head, with_rollouts
from specjax.drafters.making import make_drafter
from specjax.engine.results import DecodeResult
from specjax.engine.run import canonical
from specjax.errors import UsageError
from specjax.rollouts.store import RolloutStore
from specjax.types import Array, Drafter, PyTree, Target

Form = Literal["processed", "tempered", "raw"]


class SamplingCost(NamedTuple):
    """The cost of a call."""

    tokens: int  # new tokens of all rows
    passes: int  # passes of the target, summed over the rows
    acceptance: tuple[float, ...]  # share of the drafted tokens that were accepted, by depth

    @property
    def tokens_per_pass(self) -> float:
        """Return the mean number of tokens that a pass adds to a row."""
        return self.tokens / max(self.passes, 1)


class Samples(NamedTuple):
    """Samples of a call, with one for each prompt in their order."""

    tokens: list[np.ndarray]  # int32[n], with the eos
    logprobs: list[np.ndarray] | None  # float32[n]
    report: SamplingCost


class RolloutSampler:
    """Draws samples of a policy with drafts.

    Guarantee: that of `specjax.decode`. Sampled texts have exactly the distribution of the policy.
    """

    def __init__(
        self,
        drafter: Drafter | str = "auto",
        *,
        max_prompt_length: int,
        logprobs: Form | None = "tempered",
        store: RolloutStore | None = None,
    ):
        """Build a sampler.

        Args:
          drafter: a drafter, or the name of one that needs only the target. `auto` copies from the text and from tokens
            that followed before. Drafters without weights never become stale.
          max_prompt_length: tokens of the longest prompt. All calls with the same number of prompts share a program.
          logprobs: the form of the log-probabilities (`specjax.decode`); None: none. Trainers compute "tempered" ones.
          store: samples of earlier calls, which `auto` copies from. Default: a new one. Other drafters do not use it.
        """
        self.max_prompt_length, self.logprobs = max_prompt_length, logprobs
        self.store = RolloutStore() if store is None else store
        self._choice, self._calls = drafter, itertools.count()
        self._drafter: Drafter | None = None  # with what it learned; None before the first call

    def sample(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        key: Array | int,
        max_new_tokens: int,
        **settings: Any,
    ) -> Samples:
        """Draw one sample per prompt. Equal prompts in succession are read once.

        Args:
          target: the policy with its present weights.
          prompts: token ids. A group of samples is a prompt that is repeated.
          key: the key of this sampler. Each call and each row has a key of its own.
          settings: temperature, top_k, top_p, min_p and eos of `specjax.decode`.

        Raises: UsageError for a prompt that is empty or too long, or a setting outside its range.
        """
        self._check(prompts)
        if self._drafter is None:
            drafter = make_drafter(self._choice, target) if isinstance(self._choice, str) else self._choice
            self._drafter = canonical(target, drafter) if drafter.hooks.export else drafter
        rows = [tuple(map(int, prompt)) for prompt in prompts]
        distinct, samples = grouped(rows)
        uses_store = copies_rollouts(self._drafter)
        if uses_store:
            self._drafter = with_rollouts(self._drafter, self.store.pack(distinct))
        key = jax.random.fold_in(jax.random.key(key) if isinstance(key, int) else key, next(self._calls))
        result = api.decode(
            target, self._drafter, self._packed(distinct), key=key, max_new_tokens=max_new_tokens,
            samples_per_prompt=samples, logprobs=self.logprobs or False, **settings,
        )  # fmt: skip
        if result.drafter is not None:
            self._drafter = result.drafter
        drawn = samples_of(result)
        if uses_store:
            self.store.add(rows, drawn.tokens)
        return drawn

    def refresh(self, params: PyTree) -> None:
        """Replace the parameters of the drafter, such as a draft head that was trained on own samples.

        In `auto` they replace those of its head. The statistics and texts of earlier calls stay.

        Raises: UsageError before the first call.
        """
        if self._drafter is None:
            raise UsageError("the sampler has no drafter before its first call; pass one to RolloutSampler")
        self._drafter = replace_head(self._drafter, params)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or not 1 <= min(lengths) <= max(lengths) <= self.max_prompt_length:
            raise UsageError(
                f"prompts must have 1 to max_prompt_length ({self.max_prompt_length}) tokens, not "
                f"{'none' if not lengths else f'{min(lengths)} to {max(lengths)}'}"
            )

    def _packed(self, prompts: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(prompts), self.max_prompt_length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def grouped(prompts: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """Return the distinct prompts and the samples of each, or all prompts and 1 if the groups differ in size."""
    groups = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(prompts)]
    sizes = {size for _, size in groups}
    return ([prompt for prompt, _ in groups], sizes.pop()) if len(sizes) == 1 else (prompts, 1)


def samples_of(result: DecodeResult) -> Samples:
    """Return the texts and the cost of a result, on the host."""
    tokens, counts, logprobs = jax.device_get((result.tokens, result.lengths, result.logprobs))
    stats = jax.device_get(result.stats)
    cut = lambda rows: [row[:count] for row, count in zip(rows, counts, strict=True)]
    drafted = stats.drafted_by_depth.sum(0)
    share = stats.accepted_by_depth.sum(0) / np.maximum(drafted, 1)
    report = SamplingCost(int(counts.sum()), int(stats.target_passes.sum()), tuple(share[drafted > 0].tolist()))
    return Samples(cut(tokens), None if logprobs is None else cut(logprobs), report)


def padded_left(prompts: Sequence[Sequence[int]], width: int, padding: int) -> np.ndarray:
    """Return prompts int32[B, width] with padding before them."""
    tokens = np.full((len(prompts), width), padding, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return tokens
