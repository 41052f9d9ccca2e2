"""What a loop is given: the parts that stay the same from step to step, and a job, which is these and the prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from specjax.types import Array, Controller, Drafter, PyTree, Sampling, Target
from specjax.verifiers import Verifier


class Keep(NamedTuple):
    """Which fields of `Info` a step fills that cost something."""

    logits: bool = False
    logprobs: bool = False
    violations: bool = False
    scored: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """Everything that a step needs besides its state. A pytree: arguments of the compiled step, never its constants."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    controller: Controller = field(metadata={"static": True})
    sampling: Sampling
    eos: Array  # int32[E], ids that end a row, or per row int32[B, E]
    coupled: bool = field(default=False, metadata={"static": True})  # draft with the noise of the target's own draws
    serving: bool = field(default=False, metadata={"static": True})  # rows come and go, each with settings of its own
    keep: Keep = field(default=Keep(), metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Job:
    """A batch to decode, checked and laid out: what `prepare` makes, and `start` and `run` take."""

    parts: Parts
    tokens: Array  # int32[B, L], the prompts, with room for the text behind them
    lengths: Array  # int32[B], of the prompts
    keys: Array  # key[B]
    stop: Array  # int32[B], length of the text at which the row is full
    inputs: PyTree = None  # what the texts are conditioned on besides their tokens, for `Model.begin`
