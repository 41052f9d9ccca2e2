"""A sampler of a policy whose weights change between calls.

The weights are arguments of the compiled program, so a call with new weights compiles and copies nothing. The text is
exactly that of the policy whose weights are passed, whatever the drafter has learned from older ones. A drafter that
learns from text keeps what it learned: the samples of a prompt resemble each other, and those of the next epoch too.
`auto` also copies from the earlier samples of a prompt, which a `RolloutStore` keeps, and from those of the same call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import api
from specjax.catalog.defaults import defaults
from specjax.costs.curves import Curve, measured
from specjax.drafters.combined.auto import copies_rollouts, make_auto, replace_head, with_rollouts
from specjax.drafters.default import load_default_head
from specjax.drafters.making import make_drafter
from specjax.engine.prepare import check_samples
from specjax.engine.results import DecodeResult
from specjax.engine.run import canonical
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.rollouts.scoring import Form, score
from specjax.rollouts.store import RolloutStore
from specjax.types import Array, Drafter, PyTree, Sampling, Target

WARPS = ("temperature", "top_k", "top_p", "min_p")
"""Settings that change the distribution of a draw."""
OTHERS = ("eos", "processors", "capacity", "debug")
WIDTHS, MEASURED_TOKENS, REPEATS, STEP = (1, 2, 4, 8, 16), 64, 5, 0.05
"""Widths whose costs are measured, the maximum number of tokens of all rows, and the passes of each width.

Costs are rounded up to multiples of STEP."""


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
    hit_eos: np.ndarray  # bool[B], False for texts that were cut at max_new_tokens

    def padded(self, size: int, padding: int = 0) -> PaddedSamples:
        """Return the samples as arrays of `size` tokens. Raises: UsageError for a longer sample."""
        longest = max(map(len, self.tokens), default=0)
        if longest > size:
            raise UsageError(f"size must be at least the length of the longest sample, {longest}, not {size}")
        mask = np.arange(size) < np.array([len(row) for row in self.tokens])[:, None]
        tokens, logprobs = np.full(mask.shape, padding, np.int32), np.zeros(mask.shape, np.float32)
        tokens[mask] = np.concatenate(self.tokens)
        if self.logprobs is not None:
            logprobs[mask] = np.concatenate(self.logprobs)
        return PaddedSamples(tokens, mask, None if self.logprobs is None else logprobs)


class PaddedSamples(NamedTuple):
    """Samples as arrays, padded on the right."""

    tokens: np.ndarray  # int32[B, T]
    mask: np.ndarray  # bool[B, T], True for tokens of the samples
    logprobs: np.ndarray | None  # float32[B, T], 0 after the samples


class RolloutSampler:
    """Draws samples of a policy with drafts.

    Guarantee: with the same key, the text is that of plain sampling, token by token, for any drafter (coupled sampling
    of `specjax.decode`). So it has exactly the distribution of the policy.
    """

    def __init__(
        self,
        drafter: Drafter | DraftHead | str | None = None,
        *,
        max_prompt_length: int,
        logprobs: Form | None = "tempered",
        rescore: bool = False,
        store: RolloutStore | None = None,
        measure_costs: bool | None = None,
    ):
        """Build a sampler.

        Args:
          drafter: a drafter, a draft head for `auto`, or the name of a method that needs only the target. `auto` copies
            from the text and from tokens that followed before. Drafters without weights never become stale. None is
            `auto` with the draft head that specjax has for the target, if any; for targets that accept only chains it
            is "prompt_lookup".
          max_prompt_length: tokens of the longest prompt. All calls with the same number of prompts share a program.
          logprobs: the form of the log-probabilities (`specjax.decode`); None: none. Trainers compute "tempered" ones.
          rescore: compute the log-probabilities with `specjax.rollouts.score` after the texts are finished, at the cost
            of reading each text once. Then they do not depend on the drafts, to the bit. Otherwise they are those of
            the passes that drew the tokens, which round differently at each width.
          store: samples of earlier calls, which `auto` copies from. Default: a new one. Other drafters do not use it.
          measure_costs: measure the cost of wider passes before the first call with a number of rows, in which `auto`
            then decides by it. Each width is compiled. None: on CPUs, where the estimate depends most on the machine.
        """
        self.max_prompt_length, self.logprobs, self.rescore = max_prompt_length, logprobs, rescore
        self.store = RolloutStore() if store is None else store
        self.measure_costs = jax.default_backend() == "cpu" if measure_costs is None else measure_costs
        self._choice, self._calls = drafter, itertools.count()
        self._drafter: Drafter | None = None  # with what it learned; None before the first call
        self._costs: dict[int, Curve] = {}  # by number of rows

    def sample(
        self,
        target: Target,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        key: Array | int,
        max_new_tokens: int,
        samples_per_prompt: int = 1,
        **settings: Any,
    ) -> Samples:
        """Draw samples of each prompt. Equal prompts in succession are read once.

        Args:
          target: the policy with its present weights.
          prompts: token ids. A group of samples is a prompt that is repeated, or has several `samples_per_prompt`.
          key: the key of this sampler. Each call and each row has a key of its own. Another sampler with an equal key
            draws the same again, for example after a restart.
          samples_per_prompt: number n of samples of each prompt, in succession. Prompts and settings are repeated.
          settings: temperature, top_k, top_p, min_p and eos of `specjax.decode`, and its processors, capacity and
            debug. The first four have one value, or one per prompt. The default temperature is 1.

        Raises: UsageError for a prompt that is empty or too long, or a setting that is unknown or outside its range.
        """
        check_settings(settings, len(prompts))
        check_prompts(prompts, self.max_prompt_length)
        count = check_samples(samples_per_prompt)
        prompts = [prompt for prompt in prompts for _ in range(count)]
        settings |= {name: np.repeat(values, count) for name, values in per_row_settings(settings).items()}
        settings = {"temperature": 1.0} | settings
        rows = [tuple(map(int, prompt)) for prompt in prompts]
        distinct, samples, per_prompt = group_rows(rows, settings)
        drafter = self._drafter_for(target, len(rows), max_new_tokens)
        uses_store = copies_rollouts(drafter)
        if uses_store:
            drafter = with_rollouts(drafter, self.store.pack(distinct))
        key = jax.random.fold_in(jax.random.key(key) if isinstance(key, int) else key, next(self._calls))
        result = api.decode(
            target, drafter, self._packed(distinct), key=key, max_new_tokens=max_new_tokens, sampling="coupled",
            samples_per_prompt=samples, logprobs=not self.rescore and (self.logprobs or False), **per_prompt,
        )  # fmt: skip
        self._drafter = drafter if result.drafter is None else result.drafter
        drawn = samples_of(result)
        if uses_store:
            self.store.add(rows, drawn.tokens)
        if not self.rescore or self.logprobs is None:
            return drawn
        warps = {name: settings[name] for name in WARPS if name in settings}
        length = self.max_prompt_length + max_new_tokens
        return drawn._replace(logprobs=score(target, rows, drawn.tokens, form=self.logprobs, length=length, **warps))

    def refresh(self, params: PyTree) -> None:
        """Replace the parameters of the drafter, such as a draft head that was trained on own samples.

        In `auto` they replace those of its head. The statistics and texts of earlier calls stay.

        Raises: UsageError before the first call.
        """
        if self._drafter is None:
            raise UsageError("the sampler has no drafter before its first call; pass one to RolloutSampler")
        self._drafter = replace_head(self._drafter, params)

    def _drafter_for(self, target: Target, batch: int, max_new_tokens: int) -> Drafter:
        """Return the drafter with what it learned, and with the costs of passes over `batch` rows."""
        learned, choice = self._drafter, self._choice
        default = defaults(target, None, jax.default_backend()) if choice is None else None
        if default is not None and default.drafter != "auto":  # a target that accepts only chains
            choice = default.drafter
        is_auto = choice is None or choice == "auto" or isinstance(choice, DraftHead)
        if learned is not None and not (is_auto and self.measure_costs):
            return learned
        if isinstance(choice, Drafter):
            drafter = choice
        elif not is_auto:
            drafter = make_drafter(str(choice), target)
        else:
            head = choice if isinstance(choice, DraftHead) else None
            if default is not None and default.head is not None:
                head = load_default_head(default.head, target)
            costs = self._measured(target, batch, max_new_tokens) if self.measure_costs else None
            drafter = make_auto(target, head, costs=costs)
        if learned is not None:
            return drafter.replace(params=learned.params)
        return canonical(target, drafter) if drafter.hooks.export else drafter

    def _measured(self, target: Target, batch: int, max_new_tokens: int) -> Curve:
        """Return the costs of passes over `batch` rows, measured once, and rounded up so that programs are alike."""
        if batch not in self._costs:
            limit = target.model.max_positions
            widths = [width for width in WIDTHS if width <= 2 or (width < limit and batch * width <= MEASURED_TOKENS)]
            context = max(min(self.max_prompt_length + max_new_tokens // 2, limit - widths[-1]), 1)
            curve = measured(target, widths, batch, context, REPEATS, Sampling(jnp.float32(1)))
            costs = (1.0, *(max(math.ceil(cost / STEP) * STEP, 1.0) for cost in curve.costs[1:]))
            self._costs[batch] = Curve(curve.widths, costs)
        return self._costs[batch]

    def _packed(self, prompts: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(prompts), self.max_prompt_length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def check_prompts(prompts: Sequence[Sequence[int] | np.ndarray], longest: int) -> None:
    """Raise UsageError unless there are prompts, each with 1 to `longest` tokens."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not 1 <= min(lengths) <= max(lengths) <= longest:
        raise UsageError(
            f"prompts must have 1 to max_prompt_length ({longest}) tokens, not "
            f"{'none' if not lengths else f'{min(lengths)} to {max(lengths)}'}"
        )


def check_settings(settings: dict[str, Any], count: int) -> None:
    """Raise UsageError for a setting that a sampler does not have, or with neither one value nor one per prompt."""
    unknown = sorted(settings.keys() - {*WARPS, *OTHERS})
    if unknown:
        raise UsageError(
            f"sample has no setting {unknown[0]}; choose from {', '.join((*WARPS, *OTHERS))}. RolloutSampler has the "
            "settings drafter, logprobs and rescore"
        )
    for name, values in per_row_settings(settings).items():
        if values.shape != (count,):
            raise UsageError(f"{name} must be one number or one per prompt, {count}; it has the shape {values.shape}")


def per_row_settings(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the settings that have one value per row."""
    return {name: np.asarray(settings[name]) for name in WARPS if np.ndim(settings.get(name, 0)) > 0}


def group_rows(
    prompts: list[tuple[int, ...]], settings: dict[str, Any]
) -> tuple[list[tuple[int, ...]], int, dict[str, Any]]:
    """Return the distinct prompts, the samples of each, and the settings with one entry per distinct prompt.

    Rows belong to one group if prompts and settings are equal. If the groups differ in size, each row is a group.
    """
    per_row = per_row_settings(settings)
    rows = [(prompt, *(values[row].item() for values in per_row.values())) for row, prompt in enumerate(prompts)]
    distinct, samples = grouped(rows)
    return (
        [prompt for prompt, *_ in distinct],
        samples,
        settings | {name: values[::samples] for name, values in per_row.items()},
    )


def grouped(rows: list[tuple]) -> tuple[list[tuple], int]:
    """Return the distinct rows and the samples of each, or all rows and 1 if the groups differ in size."""
    groups = [(row, len(list(equal))) for row, equal in itertools.groupby(rows)]
    sizes = {size for _, size in groups}
    return ([row for row, _ in groups], sizes.pop()) if len(sizes) == 1 else (rows, 1)


def samples_of(result: DecodeResult) -> Samples:
    """Return the texts and the cost of a result, on the host."""
    tokens, counts, logprobs, hit_eos = jax.device_get((result.tokens, result.lengths, result.logprobs, result.hit_eos))
    stats = jax.device_get(result.stats)
    cut = lambda rows: [row[:count] for row, count in zip(rows, counts, strict=True)]
    drafted = stats.drafted_by_depth.sum(0)
    share = stats.accepted_by_depth.sum(0) / np.maximum(drafted, 1)
    report = SamplingCost(int(counts.sum()), int(stats.target_passes.sum()), tuple(share[drafted > 0].tolist()))
    return Samples(cut(tokens), None if logprobs is None else cut(logprobs), report, hit_eos)


def padded_left(prompts: Sequence[Sequence[int]], width: int, padding: int) -> np.ndarray:
    """Return prompts int32[B, width] with padding before them."""
    tokens = np.full((len(prompts), width), padding, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return tokens
