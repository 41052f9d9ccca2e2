"""Arguments of a decoding loop: the parts that are the same in all steps, and a job, which adds the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.types import (
    STATIC,
    Array,
    Controller,
    DecodeState,
    Drafter,
    Info,
    Processor,
    PyTree,
    Sampling,
    Target,
    TokenLogprobs,
)
from specjax.verifiers import Verifier

LOGPROBS = "processed", "tempered", "raw", "untempered"
"""Forms of log-probabilities: of the draw; after temperature only; of the target's own logits; after processors."""


class Keep(NamedTuple):
    """Flags for the fields of `Info` that cost time or memory. A step computes only the requested ones."""

    logits: bool = False
    logprobs: bool | str = False  # True or one of LOGPROBS
    violations: bool = False
    scored: bool = False
    alternatives: int | None = None  # number of the likeliest tokens in `Info.raw_logprobs`


class DecodeLoop(NamedTuple):
    """The functions of a decoding loop. `run`, `stream` and `serve` drive every loop through them.

    `init(parts, tokens[B, L], length[B], keys[B], stop[B], inputs=None, beside=None) -> DecodeState` reads prompts.
    `step(parts, state) -> (DecodeState, Info)` runs one pass of the target.
    `axes(parts, state)` returns the position of the batch axis in each array of the state.
    `result(state, lengths[B], result) -> result` adds the fields of this loop to a `DecodeResult`.
    `begin` and `read` are the two parts of `init`, so that `serve` can read a prompt between steps. `begin` takes the
    arguments of `init` and reads no token. `read(parts, state, start, size, inputs, scores) -> (state, TokenLogprobs)`
    reads `size` tokens. `TokenLogprobs` [B, size] are those of the tokens after them, if bool[] `scores` is True and
    `can_score(parts)`; otherwise they are zeros or None. None: `serve` reads prompts with `init`.
    """

    init: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, Info]]
    axes: Callable[..., DecodeState]
    result: Callable[..., Any] = lambda state, lengths, result: result
    begin: Callable[..., DecodeState] | None = None
    read: Callable[..., tuple[DecodeState, TokenLogprobs | None]] | None = None


class LoopParts(Protocol):
    """The fields that the parts of every loop have in common."""

    @property
    def loop(self) -> DecodeLoop: ...
    @property
    def target(self) -> Target: ...
    @property
    def drafter(self) -> Drafter: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def eos(self) -> Array: ...
    @property
    def keep(self) -> Keep: ...
    @property
    def processors(self) -> tuple[Processor, ...]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """All inputs of a step of the draft-verify-commit loop except its state.

    It is a pytree, so its arrays are arguments of the compiled step, never constants.
    """

    target: Target
    drafter: Drafter
    verifier: Verifier
    controller: Controller = field(metadata=STATIC)
    sampling: Sampling
    eos: Array  # int32[E], ids that end a row, or int32[B, E], per row
    coupled: bool = field(default=False, metadata=STATIC)  # draft with the noise of the target's own draws
    serving: bool = field(default=False, metadata=STATIC)  # requests enter and leave rows, each with its own settings
    keep: Keep = field(default=Keep(), metadata=STATIC)
    plain: bool = field(default=False, metadata=STATIC)  # steps draft no tokens, but the state has the drafter's fields
    processors: tuple[Processor, ...] = ()  # in the order in which they change the target's logits
    reports: Array | None = None  # bool[B], rows whose `Info.raw_logprobs` are read; None: none
    loop: DecodeLoop = field(kw_only=True, metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Job:
    """A checked and packed batch, made by `prepare` for `start` and `run`.

    It has R prompts, each read once, and B rows: first all `samples` of prompt 0, then all samples of prompt 1, ...
    """

    parts: Any  # `LoopParts` of B rows: `Parts`, or the parts of another loop
    tokens: Array  # int32[R, L], prompts, then slots for the text that follows
    lengths: Array  # int32[R], lengths of the prompts
    keys: Array  # key[B]
    stop: Array  # int32[B], length of the text at which the row is full
    inputs: PyTree = None  # inputs that condition the texts, for `Model.init_cache`; arrays [R, ...]
    samples: int = field(default=1, metadata=STATIC)
    usable: Array | None = (
        None  # bool[R], False for prompts or settings with invalid traced values; None: all are valid
    )

    @property
    def starts(self) -> Array:
        """Return the length of each row's prompt, int32[B]."""
        return self.lengths if self.samples == 1 else jnp.repeat(self.lengths, self.samples)
