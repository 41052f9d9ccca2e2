"""Routers of S2D2: whether what is drafted for a block is worth a pass that verifies it.

Han et al.: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv 2603.25702.

Rule: of the first run of open columns, n of them, the chance that column i's draft is accepted is taken for a_i =
exp(-beta H_i / log V), H_i its entropy (`entropy`), or 1 if the two largest probabilities are more than .05 apart, else
0 (`margin`). The run expected is E = sum over k of the product of a_1 ... a_k, its score E - c (`static`) or
E - c #{columns that are sure enough} (`dynamic`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from specjax.diffusion import measures
from specjax.diffusion.types import Proposal
from specjax.errors import UsageError
from specjax.types import Array, PyTree

Chance = Literal["entropy", "margin"]
MARGIN = 0.05


class Asked(NamedTuple):
    """What a router knows of a round, for each row. It must not know which tokens were drafted."""

    run: Array  # int32[B], columns that would be verified
    expected: Array  # float32[B], those of them that would stand
    sure: Array  # int32[B], columns that the rule would decide without asking
    width: int  # W


class Router(NamedTuple):
    """`route(state, asked) -> (bool[B], state)`; `learn(state, verified bool[B], tokens int32[B]) -> state` sees what a
    round decided."""

    route: Callable[[PyTree, Asked], tuple[Array, PyTree]]
    init: Callable[[int], PyTree] = lambda batch: ()
    learn: Callable[[PyTree, Array, Array], PyTree] = lambda state, verified, tokens: state


def acceptance(proposal: Proposal, by: Chance = "entropy", beta: float = 1.0) -> Array:
    """float32[B, W]: the chance that each column's draft is accepted."""
    if by == "margin":
        return (measures.margin(proposal.warped) > MARGIN).astype(jnp.float32)
    return jnp.exp(-beta * measures.entropy(proposal.logits) / jnp.log(proposal.logits.shape[-1]))


def expected_run(chance: Array, run: Array) -> Array:
    """float32[B]: E, of chances [B, W] of the columns in `run` bool[B, W], which are neighbours."""
    along = jnp.cumprod(jnp.where(run, chance, 1.0), 1)
    return jnp.sum(jnp.where(run, along, 0.0), 1)


@functools.cache
def always() -> Router:
    return Router(lambda state, asked: (asked.run > 0, state))


@functools.cache
def span(least: int) -> Router:
    """Where so many columns in a row are open."""
    return Router(lambda state, asked: (asked.run >= least, state))


@functools.cache
def score(above: float = 0.0, cost: float = 1.0, dynamic: bool = False) -> Router:
    """Where the score is above a number."""
    return Router(lambda state, asked: (_score(asked, cost, dynamic) > above, state))


@functools.cache
def hysteresis(on: float = 1.0, off: float = -5.0, cost: float = 1.0, dynamic: bool = True) -> Router:
    """From a score above `on` until one below `off`; not at first. State: bool[B].

    Raises: UsageError for an `off` above `on`.
    """
    if off > on:
        raise UsageError(f"off {off} must not be above on {on}")

    def route(state: Array, asked: Asked) -> tuple[Array, Array]:
        now = _score(asked, cost, dynamic)
        verifies = (now > on) | (state & (now >= off))
        return verifies, verifies

    return Router(route, lambda batch: jnp.zeros((batch,), bool))


def _score(asked: Asked, cost: float, dynamic: bool) -> Array:
    return asked.expected - cost * (asked.sure if dynamic else 1)


class Tried(NamedTuple):
    """What a bandit knows: of 8 kinds of rounds, with and without verification."""

    rounds: Array  # float32[B, 8, 2]
    reward: Array  # float32[B, 8, 2], their sum
    kind: Array  # int32[B], of the round that is going on


@functools.cache
def bandit(explore: float = 1.0) -> Router:
    """UCB over the kinds of rounds: half of the window is open or not, half of the run is expected to stand or not, two
    columns are sure enough or not. The reward of a round is its tokens over its passes, two where it verifies."""

    def init(batch: int) -> Tried:
        nothing = jnp.zeros((batch, 8, 2))
        return Tried(nothing, nothing, jnp.zeros((batch,), jnp.int32))

    def route(state: Tried, asked: Asked) -> tuple[Array, Tried]:
        bits: Any = (2 * asked.run >= asked.width, 2 * asked.expected >= asked.run, asked.sure >= 2)
        kind = sum(bit.astype(jnp.int32) << place for place, bit in enumerate(bits))
        of_kind = lambda x: jnp.take_along_axis(x, kind[:, None, None], 1)[:, 0]  # [B, 2]
        rounds, reward = of_kind(state.rounds), of_kind(state.reward)
        total = jnp.sum(rounds, 1, keepdims=True)
        bonus = explore * jnp.sqrt(2 * jnp.log(jnp.maximum(total, 1)) / jnp.maximum(rounds, 1))
        value = jnp.where(rounds > 0, reward / jnp.maximum(rounds, 1) + bonus, jnp.inf)
        return value[:, 1] >= value[:, 0], state._replace(kind=kind)  # what was never tried first, verifying before not

    def learn(state: Tried, verified: Array, tokens: Array) -> Tried:
        row, arm = jnp.arange(len(tokens)), verified.astype(jnp.int32)
        at = lambda x, value: x.at[row, state.kind, arm].add(value)
        return Tried(at(state.rounds, 1.0), at(state.reward, tokens / (1.0 + arm)), state.kind)

    return Router(route, init, learn)
