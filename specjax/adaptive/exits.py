"""Early exit: code shared by the methods that stop a token at the layer where its prediction is confident."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array, PyTree, Sublayers


class Exits(NamedTuple):
    """Exit state of the tokens of a pass."""

    out: Array  # bool[B, T], True for tokens that have exited
    may: Array  # bool[B, T], True for tokens that may exit: the generated ones
    level: Array  # float32[B, T], the confidence at which a token exits


def leaving(
    name: str,
    confidence: Callable[[PyTree, LayerStreams], Array],
    level: Callable[[PyTree, TokenPositions], Array],
    tested: Callable[[int], tuple[int, ...]],
) -> DepthPolicy:
    """Return a policy in which tokens exit early.

    A token exits after the first layer of `tested(num_layers)` at which its confidence reaches the level. Both
    `confidence(params, streams)` and `level(params, places)` return float32[B, T]. Later tokens attend to keys and
    values computed from the stream of the exit. The caller caches the policy and adds the parameters. `tested` raises
    UsageError if a model does not fit.
    """

    def check(num_layers: int) -> None:
        tested(num_layers)

    return DepthPolicy(
        plan=functools.partial(_plan, level),
        runs=lambda carry, layer: Sublayers(~carry.out, ~carry.out),
        observe=functools.partial(_observe, confidence),
        observed_layers=tested,
        repair="propagate",
        check=check,
        name=name,
    )


def every_so_many(every: int) -> Callable[[int], tuple[int, ...]]:
    """Return a function that lists every `every`-th layer of a model, for `leaving`.

    Raises: UsageError if `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"every must be at least 1, not {every}")
    return functools.partial(tested_layers, every)


def tested_layers(every: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers, counted from 0, after which a token may exit.

    The last layer is excluded because an exit there saves no work.

    Raises: UsageError if no layer remains.
    """
    if every >= num_layers:
        raise UsageError(f"every must be below the number of layers of the model, {num_layers}, not {every}")
    return tuple(range(every - 1, num_layers - 1, every))


def threshold_level(threshold: Array, places: TokenPositions) -> Array:
    """Return float32[B, T]: the same threshold for all tokens.

    A threshold above 1 disables exits, even at a probability of 1.
    """
    return jnp.where(threshold > 1, jnp.inf, jnp.broadcast_to(threshold, places.positions.shape))


def _plan(level, params: PyTree, places: TokenPositions, state: PyTree, num_layers: int) -> Exits:
    return Exits(jnp.zeros(places.positions.shape, bool), places.is_generated, level(params, places))


def _observe(confidence, params: PyTree, carry: Exits, streams: LayerStreams) -> Exits:
    undecided = carry.may & ~carry.out

    def judge():
        return carry.out | (undecided & (confidence(params, streams) >= carry.level))

    # A chunk in which no token may exit skips the test, because a confidence may cost the head over all tokens.
    return carry._replace(out=jax.lax.cond(jnp.any(undecided), judge, lambda: carry.out))


def similarity(x: Array, y: Array) -> Array:
    """Return float32[B, T]: the cosine similarity of streams [B, T, D]."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    product = jnp.sum(x * y, -1)
    return product * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1) * jnp.sum(y * y, -1), 1e-30))
