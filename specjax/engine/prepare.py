"""From the arguments of `decode` to a `Job`: everything that can be wrong is found here, before anything compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from specjax.arrays.x64 import without_x64
from specjax.controllers.fixed import fixed
from specjax.engine.job import Job, Keep, Parts
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.step import LOOP
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, row_keys
from specjax.numerics.validation import check_range
from specjax.types import Array, Controller, Drafter, Draws, Processor, PyTree, Sampling, Target, VerifyFn
from specjax.verifiers import ANY, Verifier, exact_verifier, greedy, sample_and_match


@dataclass(frozen=True)
class Settings:
    """How to decode, as `specjax.decode` explains it; checked when it is made.

    Raises: UsageError for a value outside its range, where values are known.
    """

    temperature: float | Array = 0.0
    top_k: int | Array | None = None
    top_p: float | Array | None = None
    eos: int | Sequence[int] | Array | None = ()
    sampling: Literal["speculative", "coupled"] = "speculative"
    verifier: Verifier | VerifyFn | None = None
    controller: Controller | None = None
    capacity: int | None = None
    logprobs: bool = False
    debug: bool = False
    min_p: float | Array | None = None
    processors: Sequence[Processor] = ()

    def __post_init__(self):
        check_range("temperature", self.temperature, lambda x: x >= 0, "at least 0")
        check_range("top_k", self.top_k, lambda x: (x >= 1) & (x == x // 1), "a whole number of at least 1")
        check_range("top_p", self.top_p, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1")
        check_range("min_p", self.min_p, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
        check_range("capacity", self.capacity, lambda x: (x >= 1) & (x == x // 1), "a whole number of at least 1")
        is_ids = lambda x: (x.ndim <= 1) & (x == x // 1) & (abs(x) < 1 << 31)
        check_range("eos", self.eos, is_ids, "one token id or several")
        if isinstance(self.processors, Processor) or not all(isinstance(p, Processor) for p in self.processors):
            raise UsageError(f"processors must be a list of specjax.processors, not {self.processors!r}")
        if self.sampling not in ("speculative", "coupled"):
            raise UsageError(f'sampling must be "speculative" or "coupled", not "{self.sampling}"')
        if self.sampling == "coupled" and self.verifier is not None:
            raise UsageError('sampling="coupled" brings its own verifier, sample_and_match; leave verifier out')

    @property
    def is_greedy(self) -> bool:
        """Whether the greedy program is compiled: a Python 0, not a traced one."""
        return isinstance(self.temperature, int | float) and self.temperature == 0

    @property
    def is_coupled(self) -> bool:
        return self.sampling == "coupled" and not self.is_greedy

    def warping(self) -> Sampling:
        """What makes a distribution of logits, traced."""
        if self.is_greedy:
            return Sampling()
        values = self.temperature, self.top_k, self.top_p, self.min_p
        return Sampling(*(None if x is None else jnp.asarray(x) for x in values))

    def ends(self) -> Array:
        """int32[E], ids that end a row."""
        return jnp.atleast_1d(jnp.asarray(() if self.eos is None else self.eos, jnp.int32))

    def check_batch(self, batch: int) -> None:
        """Raises: UsageError for a setting that is neither one for all rows nor one for each."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            shape = () if value is None else jnp.shape(value)
            if shape not in ((), (batch,)):
                raise UsageError(f"{name} must be one number or one per prompt, {batch}; it has the shape {shape}")
        for leaf in jax.tree.leaves([processor.settings for processor in self.processors]):
            if jnp.shape(leaf)[:1] not in ((1,), (batch,)):
                raise UsageError(
                    f"the settings of a processor must be for all prompts or one per prompt, {batch}; some have the "
                    f"shape {jnp.shape(leaf)}"
                )

    def verifier_for(self, drafter: Drafter) -> Verifier:
        """The rule asked for, or the exact one; at temperature 0 every exact rule is the greedy one.

        Raises: UsageError for a rule that is not valid for the way the drafter draws.
        """
        verifier = self.verifier
        if self.sampling == "coupled":
            return greedy if self.is_greedy else sample_and_match
        if verifier is None:
            return exact_verifier(drafter, self.is_greedy)
        if not isinstance(verifier, Verifier):  # the caller's own function promises nothing
            name = getattr(verifier, "__name__", "custom")
            verifier = Verifier(name, verifier, ANY, "lossy", "the caller's own rule")
        if self.is_greedy and verifier.guarantee != "lossy":
            return greedy
        if drafter.traits.draws not in verifier.draws:
            default = exact_verifier(drafter, self.is_greedy).name
            raise UsageError(
                f"verifier {verifier.name} is not valid for drafts drawn {drafter.traits.draws}, "
                f"only for {', '.join(verifier.draws)}; the default for this drafter is {default}"
            )
        return verifier


@without_x64
def prepare(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    settings: Settings,
    *,
    key: Array | int,
    max_new_tokens: int,
    inputs: PyTree = None,
    samples: int = 1,
) -> Job:
    """Check the arguments of `decode` against each other, and lay the prompts out.

    samples: texts per prompt, which is read once.

    Raises: UsageError for no prompt, an empty one, one over the capacity, or a rule or drafter that does not fit.
    """
    check_pair(target, drafter)
    capacity, count = settings.capacity or target.model.max_positions, new_tokens(max_new_tokens)
    tokens, lengths = pack(prompts, count, drafter.num_nodes, capacity, target.model.vocab_size)
    settings.check_batch(len(tokens))
    samples = checked_samples(samples)
    for processor in settings.processors:
        processor.check(processor, target.model.vocab_size)
    parts = Parts(
        loop=LOOP,
        target=target,
        drafter=drafter,
        verifier=settings.verifier_for(drafter),
        controller=settings.controller or fixed(),
        sampling=repeated(settings.warping(), samples),
        eos=settings.ends(),
        coupled=settings.is_coupled,
        keep=Keep(logprobs=settings.logprobs, violations=settings.debug),
        processors=tuple(settings.processors),
    )
    _check_inputs(target, inputs, len(tokens))
    keys = sample_keys(key, tokens.shape[0], samples)
    return Job(parts, tokens, lengths, keys, repeated(lengths, samples) + count, inputs, samples)


def checked_samples(samples: int) -> int:
    """Raises: UsageError for what is no number of samples per prompt."""
    whole = lambda x: (x.ndim == 0) & (x >= 1) & (x == x // 1)
    check_range("samples_per_prompt", samples, whole, "a whole number of at least 1")
    return int(samples)


def repeated(tree: PyTree, samples: int) -> PyTree:
    """What is one per prompt, for each of its samples; what is one for all stays."""
    return jax.tree.map(lambda x: x if samples == 1 or not x.ndim else jnp.repeat(x, samples, 0), tree)


def sample_keys(key: Array | int, prompts: int, samples: int) -> Array:
    """key[prompts samples]: of a prompt's only sample its row's key, of several that key folded with their number."""
    keys = row_keys(key, prompts)
    return keys if samples == 1 else fold_in(keys[:, None], jnp.arange(samples)).reshape(-1)


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raises: UsageError for a drafter that is none, or asks of the target what it cannot do."""
    if drafter.traits.draws not in get_args(Draws):
        raise UsageError(
            f"the drafter's draws must be one of {', '.join(get_args(Draws))}, not {drafter.traits.draws!r}"
        )
    able, name = target.model.capabilities, target.model.name
    if not ((drafter.drafts_chains and drafter.hooks.soft_prompts is None) or able.trees):
        raise UsageError(
            f"the model {name} takes chains only, and this drafter may draft trees; choose one of chains, such as "
            "prompt_lookup, or say chains=True of your own"
        )
    if drafter.hooks.soft_prompts is not None and not able.vectors:
        raise UsageError(
            f"the drafter's prompts are vectors, and the model {name} reads tokens only; choose a drafter without, "
            "such as token_recycling, or say vectors=True of a model that takes `specjax.types.Appended`"
        )
    if drafter.traits.taps and not able.taps:
        raise UsageError(
            f"the drafter reads the target's layers {drafter.traits.taps}, which the model {name} does not show"
        )


def _check_inputs(target: Target, inputs: PyTree, batch: int) -> None:
    """Raises: UsageError for inputs that the model does not read, lacks, or that are not one per row."""
    name = target.model.name
    if target.model.capabilities.inputs and inputs is None:
        raise UsageError(f"the model {name} reads inputs besides tokens; give inputs=, one per prompt")
    for leaf in jax.tree.leaves(inputs):
        if jnp.ndim(leaf) < 1 or len(leaf) != batch:
            raise UsageError(f"inputs must have one entry per prompt, {batch}, but one has the shape {jnp.shape(leaf)}")
