"""What a loop is given: the parts that stay the same from step to step, and a job, which is these and the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.types import Array, Controller, DecodeState, Drafter, Info, Processor, PyTree, Sampling, Target
from specjax.verifiers import Verifier


class Keep(NamedTuple):
    """Which fields of `Info` a step fills that cost something."""

    logits: bool = False
    logprobs: bool = False
    violations: bool = False
    scored: bool = False


class Loop(NamedTuple):
    """What is driven by `run`, `stream` and `serve` alike: where a batch begins, and what one pass of the target adds.

    `init(parts, tokens[B, L], length[B], keys[B], stop[B], inputs=None, beside=None) -> DecodeState` reads prompts;
    `step(parts, state) -> (DecodeState, Info)`; `axes(parts, state)` has the place of the rows in the shape of each of
    its arrays; `result(state, lengths[B], result) -> result` adds what this loop alone knows to a `DecodeResult`.
    """

    init: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, Info]]
    axes: Callable[..., DecodeState]
    result: Callable[..., Any] = lambda state, lengths, result: result


class Looped(Protocol):
    """The parts of any loop, as far as what drives it looks into them."""

    @property
    def loop(self) -> Loop: ...
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
    """Everything that a step of `loop`, draft, verify and commit, needs besides its state. A pytree: arguments of the
    compiled step, never its constants."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    controller: Controller = field(metadata={"static": True})
    sampling: Sampling
    eos: Array  # int32[E], ids that end a row, or per row int32[B, E]
    coupled: bool = field(default=False, metadata={"static": True})  # draft with the noise of the target's own draws
    serving: bool = field(default=False, metadata={"static": True})  # rows come and go, each with settings of its own
    keep: Keep = field(default=Keep(), metadata={"static": True})
    plain: bool = field(default=False, metadata={"static": True})  # steps without a draft, of a state with one
    processors: tuple[Processor, ...] = ()  # in the order in which they change the target's logits
    loop: Loop = field(kw_only=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Job:
    """A batch to decode, checked and laid out: what `prepare` makes, and `start` and `run` take.

    Of R prompts, each read once, and B rows: `samples` of the first prompt, then of the second, ...
    """

    parts: Any  # `Looped`, of B rows: `Parts`, or those of another loop
    tokens: Array  # int32[R, L], the prompts, with room for the text behind them
    lengths: Array  # int32[R], of the prompts
    keys: Array  # key[B]
    stop: Array  # int32[B], length of the text at which the row is full
    inputs: PyTree = None  # what the texts are conditioned on besides their tokens, for `Model.begin`; of R prompts
    samples: int = field(default=1, metadata={"static": True})

    @property
    def starts(self) -> Array:
        """int32[B]: the length of each row's prompt."""
        return self.lengths if self.samples == 1 else jnp.repeat(self.lengths, self.samples)
