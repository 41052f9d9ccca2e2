"""Conversion of the arguments of `decode` to a checked `Job`. Usage errors are raised here, before any compilation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import with_standard_modes
from specjax.controllers.fixed import fixed
from specjax.engine.job import LOGPROBS, Job, Keep, Parts
from specjax.engine.packing import Prompts, check_new_tokens, check_source, find_usable_rows, is_traced, pack
from specjax.engine.step import LOOP
from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.numerics.sampling import fold_in, row_keys
from specjax.numerics.validation import MAX_NODES, check_range
from specjax.types import (
    Array,
    Controller,
    Drafter,
    Draws,
    Model,
    Processor,
    PyTree,
    Sampling,
    Source,
    Target,
    VerifyFn,
)
from specjax.verifiers import ANY, Verifier, exact_verifier, greedy, sample_and_match

RANGES = {
    "temperature": (lambda x: x >= 0, "at least 0"),
    "top_k": (lambda x: (x >= 1) & (x == x // 1), "a whole number of at least 1"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
}
"""Ranges of the settings that may be traced, as a predicate and in words."""
EOS_UNIT, EOS_PADDING = 8, -(1 << 31)
"""Arrays of eos ids are padded to a multiple of this length, so that their number does not change the program. No token
of any draft, not even of an invalid one, equals the padding."""


@dataclass(frozen=True)
class Settings:
    """Settings of `specjax.decode`, which documents them. They are checked when the object is created.

    Raises: UsageError for a value outside its range. `find_usable` marks traced values instead.
    """

    temperature: float | Array = 0.0
    top_k: int | Array | None = None
    top_p: float | Array | None = None
    eos: int | Sequence[int] | Array | None = ()
    sampling: Literal["speculative", "coupled"] = "speculative"
    verifier: Verifier | VerifyFn | None = None
    controller: Controller | None = None
    capacity: int | None = None
    logprobs: bool | Literal["processed", "tempered", "raw", "untempered"] = False
    debug: bool = False
    min_p: float | Array | None = None
    processors: Sequence[Processor] = ()

    def __post_init__(self):
        for name, (predicate, expected) in RANGES.items():
            check_range(name, getattr(self, name), predicate, expected)
        check_range("capacity", self.capacity, lambda x: (x >= 1) & (x == x // 1), "a whole number of at least 1")
        is_ids = lambda x: (x.ndim <= 1) & (x == x // 1) & (abs(x) < 1 << 31)
        check_range("eos", self.eos, is_ids, "one token id or several")
        if isinstance(self.eos, jax.core.Tracer) and (self.eos.ndim > 1 or self.eos.dtype.kind not in "iu"):
            raise UsageError(f"eos must be one token id or several, not {self.eos.dtype}{list(self.eos.shape)}")
        if isinstance(self.processors, Processor) or not all(isinstance(p, Processor) for p in self.processors):
            raise UsageError(f"processors must be a list of specjax.processors, not {self.processors!r}")
        if self.sampling not in ("speculative", "coupled"):
            raise UsageError(f'sampling must be "speculative" or "coupled", not "{self.sampling}"')
        if self.logprobs not in (False, True, *LOGPROBS):
            raise UsageError(f"logprobs must be True, False, or one of {', '.join(LOGPROBS)}, not {self.logprobs!r}")
        if self.sampling == "coupled" and self.verifier is not None:
            raise UsageError('sampling="coupled" always uses the verifier sample_and_match; leave verifier out')

    @property
    def is_greedy(self) -> bool:
        """Return True if the temperature is a Python 0, which compiles the greedy program. A traced 0 does not."""
        return isinstance(self.temperature, int | float) and self.temperature == 0

    @property
    def is_coupled(self) -> bool:
        """Return True if the draft uses the noise of the target's draws."""
        return self.sampling == "coupled" and not self.is_greedy

    def to_sampling(self, *, filters_at_zero: bool = False) -> Sampling:
        """Return the options of the sampling distribution as traced arrays.

        filters_at_zero: keep top-k, top-p and min-p in greedy programs too, for methods that rank columns by them.
        """
        if self.is_greedy and not filters_at_zero:
            return Sampling()
        top_k = None if self.top_k is None else _as_int32(self.top_k)
        values = None if self.is_greedy else self.temperature, top_k, self.top_p, self.min_p
        return Sampling(*(None if x is None else jnp.asarray(x) for x in values))

    def eos_ids(self) -> Array:
        """Return the ids that end a row, int32[E], padded to a multiple of `EOS_UNIT`."""
        ids = jnp.atleast_1d(jnp.asarray(() if self.eos is None else self.eos, jnp.int32))
        size = max(-(-len(ids) // EOS_UNIT), 1) * EOS_UNIT
        return jnp.pad(ids, (0, size - len(ids)), constant_values=EOS_PADDING)

    def check_eos(self, vocab_size: int) -> None:
        """Check that the eos ids are in the vocabulary, or -1 as padding. Traced ids pass. Raises: UsageError."""
        expected = f"one token id or several, from 0 to {vocab_size - 1}, the last of the model's vocabulary"
        check_range("eos", self.eos, lambda x: (x >= -1) & (x < vocab_size), expected)

    def find_usable(self, vocab_size: int) -> Array | None:
        """Return True where traced settings are in their ranges, bool[] or bool[R], or None if nothing is traced."""
        is_traced = lambda name: isinstance(getattr(self, name), jax.core.Tracer)
        marks = [predicate(getattr(self, name)) for name, (predicate, _) in RANGES.items() if is_traced(name)]
        if is_traced("eos"):
            eos = _as_int32(self.eos)
            marks.append(jnp.all((eos >= -1) & (eos < vocab_size)))
        return functools.reduce(jnp.logical_and, marks) if marks else None

    def check_batch(self, batch: int) -> None:
        """Check that each setting is one value for all rows or one value per row. Raises: UsageError."""
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

    def select_verifier(self, drafter: Drafter) -> Verifier:
        """Return the requested verifier, or the exact one. At temperature 0, every exact verifier is the greedy one.

        Raises: UsageError for a verifier that is not valid for the drafter's `draws`.
        """
        verifier = self.verifier
        if self.sampling == "coupled":
            return greedy if self.is_greedy else sample_and_match
        if verifier is None:
            return exact_verifier(drafter, self.is_greedy)
        if not isinstance(verifier, Verifier):  # a plain function has no guarantee
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


def _as_int32(value: Any) -> Array:
    """Return whole numbers as int32, which can be compared with any id. Larger ones become its limits.

    Arrays of JAX that are not integers are returned unchanged.
    """
    limits = np.iinfo(np.int32)
    if not isinstance(value, jax.Array):
        return jnp.asarray(np.clip(np.asarray(value, np.float64), limits.min, limits.max).astype(np.int32))
    if value.dtype.kind not in "iu" or value.dtype == jnp.int32:
        return value
    if value.dtype.itemsize >= 4:
        value = jnp.clip(value, limits.min if value.dtype.kind == "i" else 0, limits.max)
    return value.astype(jnp.int32)


@with_standard_modes
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
    """Check that the arguments of `decode` fit each other, and pack the prompts.

    Args:
      samples: number of texts per prompt. Each prompt is prefilled once.

    Raises: UsageError without a prompt, or if a prompt is empty or exceeds the capacity. The same is raised if the
      verifier, the drafter or a processor does not fit.
    """
    check_pair(target, drafter)
    capacity, count = settings.capacity or target.model.max_positions, check_new_tokens(max_new_tokens)
    _check_room(target, count)
    tokens, lengths = pack(prompts, count, drafter.num_nodes, capacity, target.model.vocab_size)
    settings.check_batch(len(tokens))
    usable = find_usable(settings, prompts, len(tokens), count, capacity, target.model.vocab_size)
    samples = check_samples(samples)
    for processor in settings.processors:
        processor.check(processor, target.model.vocab_size)
    parts = Parts(
        loop=LOOP,
        target=target,
        drafter=drafter,
        verifier=settings.select_verifier(drafter),
        controller=_fit_controller(settings.controller or fixed(), target, drafter, len(tokens) * samples),
        sampling=repeat_per_sample(settings.to_sampling(), samples),
        eos=settings.eos_ids(),
        coupled=settings.is_coupled,
        keep=Keep(logprobs=settings.logprobs, violations=settings.debug),
        processors=tuple(settings.processors),
    )
    check_inputs(target, inputs, tokens, lengths, count)
    keys = sample_keys(key, tokens.shape[0], samples)
    stop = repeat_per_sample(lengths, samples) + count
    return Job(parts, tokens, lengths, keys, stop, inputs, samples, usable)


def _check_room(target: Target, count: int) -> None:
    """Raise a UsageError if a compressed cache has no room for `count` new tokens."""
    room = target.model.capabilities.new_tokens
    if room is not None and count > room:
        raise UsageError(
            f"max_new_tokens must be at most {room}, for which the caches of {target.model.name} have room, not "
            f"{count}; compress the target for more new tokens"
        )


def _fit_controller(controller: Controller, target: Target, drafter: Drafter, batch: int) -> Controller:
    """Return the controller for the widths of the target pass that are compiled for `batch` rows."""
    if controller.for_widths is None:
        return controller
    return controller.for_widths(tuple(drafter.pass_widths(batch, target)))


def find_usable(
    settings: Settings, prompts: Prompts, batch: int, max_new_tokens: int, capacity: int, vocab_size: int
) -> Array | None:
    """Return True for prompts whose traced values and settings are valid, bool[R], or None if nothing is traced.

    Errors cannot be raised for traced values, so the rows of the other prompts are marked (`DecodeResult.finite`).
    """
    marks = find_usable_rows(prompts, max_new_tokens, capacity, vocab_size), settings.find_usable(vocab_size)
    traced = [mark for mark in marks if mark is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, traced), (batch,)) if traced else None


def check_samples(samples: int) -> int:
    """Return the number of samples per prompt as an int. Raises: UsageError unless it is at least 1."""
    is_count = lambda x: (x.ndim == 0) & (x >= 1) & (x == x // 1)
    check_range("samples_per_prompt", samples, is_count, "a whole number of at least 1")
    return int(samples)


def repeat_per_sample(tree: PyTree, samples: int) -> PyTree:
    """Repeat arrays with one entry per prompt for each of its samples. Scalars are returned unchanged."""
    return jax.tree.map(lambda x: x if samples == 1 or not x.ndim else jnp.repeat(x, samples, 0), tree)


def sample_keys(key: Array | int, prompts: int, samples: int) -> Array:
    """Return one key per row, key[prompts * samples].

    A single sample has the key of its prompt. With several samples, each has that key folded with its number.
    """
    keys = row_keys(key, prompts)
    return keys if samples == 1 else fold_in(keys[:, None], jnp.arange(samples)).reshape(-1)


def check_pair(target: Target, drafter: Drafter) -> None:
    """Check that the target has the capabilities that the drafter needs. Raises: UsageError."""
    if drafter.traits.draws not in get_args(Draws):
        raise UsageError(
            f"the drafter's draws must be one of {', '.join(get_args(Draws))}, not {drafter.traits.draws!r}"
        )
    capabilities, name = target.model.capabilities, target.model.name
    if drafter.num_nodes - 1 > MAX_NODES:
        raise UsageError(
            f"the drafter drafts {drafter.num_nodes - 1} tokens in a step, but at most {MAX_NODES} are possible; use "
            "a shorter draft or a smaller tree"
        )
    if not ((drafter.drafts_chains and drafter.hooks.soft_prompts is None) or capabilities.trees):
        raise UsageError(
            f"the model {name} accepts only chains, but this drafter may draft trees; choose a drafter of chains, such "
            "as prompt_lookup, or set Traits(chains=True) if all its trees are chains"
        )
    limit = capabilities.tree_depth
    if limit is not None and not drafter.drafts_chains and drafter.max_depth > limit:
        raise UsageError(
            f"the drafter's trees are {drafter.max_depth} tokens deep, but the cache of {name} accepts {limit}; use a "
            "smaller tree, or a cache with larger blocks"
        )
    if drafter.hooks.soft_prompts is not None and not capabilities.vectors:
        raise UsageError(
            f"the drafter's soft prompts are vectors, but the model {name} reads only tokens; choose a drafter without "
            "them, such as token_recycling, or set Capabilities(vectors=True) for a model that accepts `Appended`"
        )
    if drafter.traits.taps and not capabilities.taps:
        raise UsageError(
            f"the drafter reads the target's layers {drafter.traits.taps}, which the model {name} does not return; "
            "use a drafter without taps, or a model with Capabilities(taps=True)"
        )


def check_inputs(target: Target, inputs: PyTree, tokens: Array, lengths: Array, max_new_tokens: int) -> None:
    """Check that the inputs of the model are present, with one entry per prompt, and fit. Raises: UsageError."""
    name, batch = target.model.name, len(tokens)
    if target.model.capabilities.requires_inputs and inputs is None:
        raise UsageError(f"the model {name} needs inputs in addition to tokens; pass inputs=, one per prompt")
    for leaf in jax.tree.leaves(inputs):
        if jnp.ndim(leaf) < 1 or len(leaf) != batch:
            raise UsageError(f"inputs must have one entry per prompt, {batch}, but one has the shape {jnp.shape(leaf)}")
    check_input_values(target.model, target.model.vocab_size, inputs, tokens, lengths, max_new_tokens)


def check_input_values(
    model: Model | None, vocab_size: int, inputs: PyTree, tokens: Any, lengths: Any, max_new_tokens: int
) -> None:
    """Check the values of inputs for prompts int[B, P] of `lengths` int[B] tokens; traced values pass.

    model: None leaves out what only the model can check. Raises: UsageError.
    """
    if isinstance(inputs, Source):
        check_source(inputs, vocab_size)
    elif model is not None and inputs is None:
        _check_placeholders(model.capabilities.placeholder, tokens, lengths)
    elif model is None or model.check_inputs is None or is_traced(tokens, lengths, *jax.tree.leaves(inputs)):
        return
    else:
        model.check_inputs(inputs, tokens, lengths, max_new_tokens)


def _check_placeholders(placeholder: int | None, tokens: Any, lengths: Any) -> None:
    """Check that prompts int[B, P] of `lengths` int[B] tokens have no placeholder, if there are no inputs for it.

    Traced values pass. Raises: UsageError.
    """
    if placeholder is None or is_traced(tokens, lengths):
        return
    tokens, lengths = gather((tokens, lengths))
    for row, place in np.argwhere((tokens == placeholder) & (np.arange(tokens.shape[1]) < lengths[:, None]))[:1]:
        raise UsageError(
            f"prompt {row} has the placeholder {placeholder} of an image at place {place}, but there are no images; "
            "pass inputs=specjax.models.images(...), or remove the placeholder"
        )
