"""Routers of S2D2, which decide if the draft of a block is worth a verification pass.

Han et al.: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv 2603.25702.

Rule: the first run of masked columns has n columns. The acceptance probability of the draft of column i is estimated as
a_i. `entropy`: a_i = exp(-beta H_i / log V), with H_i its entropy. `margin`: a_i = 1 if the two largest probabilities
are more than .05 apart, else 0. The expected number of accepted columns is E, the sum of a_1 ... a_k over k = 1 ... n.
The score is E - c (`static`) or E - c #{columns above the confidence threshold} (`dynamic`), with the cost c.
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

ChanceMeasure = Literal["entropy", "margin"]
MARGIN = 0.05


class RoundForecast(NamedTuple):
    """Inputs of a router for each row. They must not depend on the drafted tokens."""

    run: Array  # int32[B], columns that would be verified
    expected: Array  # float32[B], expected number of accepted columns among them
    sure: Array  # int32[B], columns that the rule would decide without verification
    width: int  # W


class VerificationRouter(NamedTuple):
    """A rule that selects the rows to verify.

    `route(state, forecast) -> (bool[B], state)`. `learn(state, verified bool[B], tokens int32[B]) -> state` receives
    the number of tokens that the round decided.
    """

    route: Callable[[PyTree, RoundForecast], tuple[Array, PyTree]]
    init: Callable[[int], PyTree] = lambda batch: ()
    learn: Callable[[PyTree, Array, Array], PyTree] = lambda state, verified, tokens: state


def acceptance(proposal: Proposal, by: ChanceMeasure = "entropy", beta: float = 1.0) -> Array:
    """Return float32[B, W]: the estimated acceptance probability of the draft of each column."""
    if by == "margin":
        return (measures.margin(measures.drawn_logits(proposal)) > MARGIN).astype(jnp.float32)
    return jnp.exp(-beta * measures.entropy(proposal.logits) / jnp.log(proposal.logits.shape[-1]))


def expected_run(chance: Array, run: Array) -> Array:
    """Return float32[B]: E, from the acceptance probabilities [B, W] of the contiguous columns in `run` bool[B, W]."""
    along = jnp.cumprod(jnp.where(run, chance, 1.0), 1)
    return jnp.sum(jnp.where(run, along, 0.0), 1)


@functools.cache
def always() -> VerificationRouter:
    return VerificationRouter(lambda state, forecast: (forecast.run > 0, state))


@functools.cache
def span(min_run: int) -> VerificationRouter:
    """Verify rows whose first run has at least `min_run` masked columns."""
    return VerificationRouter(lambda state, forecast: (forecast.run >= min_run, state))


@functools.cache
def score(above: float = 0.0, cost: float = 1.0, dynamic: bool = False) -> VerificationRouter:
    """Verify rows that have a score greater than `above`."""
    return VerificationRouter(lambda state, forecast: (_score(forecast, cost, dynamic) > above, state))


@functools.cache
def hysteresis(on: float = 1.0, off: float = -5.0, cost: float = 1.0, dynamic: bool = True) -> VerificationRouter:
    """Verify from a score above `on` until a score below `off`. Rows start without verification. State: bool[B].

    Raises: UsageError for an `off` above `on`.
    """
    if off > on:
        raise UsageError(f"off {off} must not be above on {on}")

    def route(state: Array, forecast: RoundForecast) -> tuple[Array, Array]:
        score_value = _score(forecast, cost, dynamic)
        verifies = (score_value > on) | (state & (score_value >= off))
        return verifies, verifies

    return VerificationRouter(route, lambda batch: jnp.zeros((batch,), bool))


def _score(forecast: RoundForecast, cost: float, dynamic: bool) -> Array:
    return forecast.expected - cost * (forecast.sure if dynamic else 1)


class BanditStats(NamedTuple):
    """Statistics of the bandit for 8 kinds of rounds, without and with verification."""

    rounds: Array  # float32[B, 8, 2]
    reward: Array  # float32[B, 8, 2], sum of the rewards
    kind: Array  # int32[B], kind of the current round


@functools.cache
def bandit(explore: float = 1.0) -> VerificationRouter:
    """Select verification by an upper confidence bound (UCB), separately for each kind of round.

    A kind has three bits. At least half of the window is in the run. At least half of the run is expected to be
    accepted. The rule would decide two or more columns. The reward of a round is its tokens per pass. A verified
    round has two passes.
    """

    def init(batch: int) -> BanditStats:
        nothing = jnp.zeros((batch, 8, 2))
        return BanditStats(nothing, nothing, jnp.zeros((batch,), jnp.int32))

    def route(state: BanditStats, forecast: RoundForecast) -> tuple[Array, BanditStats]:
        bits: Any = (2 * forecast.run >= forecast.width, 2 * forecast.expected >= forecast.run, forecast.sure >= 2)
        kind = sum(bit.astype(jnp.int32) << place for place, bit in enumerate(bits))
        of_kind = lambda x: jnp.take_along_axis(x, kind[:, None, None], 1)[:, 0]  # [B, 2]
        rounds, reward = of_kind(state.rounds), of_kind(state.reward)
        total = jnp.sum(rounds, 1, keepdims=True)
        bonus = explore * jnp.sqrt(2 * jnp.log(jnp.maximum(total, 1)) / jnp.maximum(rounds, 1))
        value = jnp.where(rounds > 0, reward / jnp.maximum(rounds, 1) + bonus, jnp.inf)
        return value[:, 1] >= value[:, 0], state._replace(kind=kind)  # untried arms first, verification before none

    def learn(state: BanditStats, verified: Array, tokens: Array) -> BanditStats:
        row, arm = jnp.arange(len(tokens)), verified.astype(jnp.int32)
        at = lambda x, value: x.at[row, state.kind, arm].add(value)
        return BanditStats(at(state.rounds, 1.0), at(state.reward, tokens / (1.0 + arm)), state.kind)

    return VerificationRouter(route, init, learn)
