"""Leaving a model early: what the methods share that end a token's way up where they are sure of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.variants.layer_skipping import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array, PyTree, Sublayers


class Exits(NamedTuple):
    """The tokens of a pass on their way up."""

    out: Array  # bool[B, T], which have left
    may: Array  # bool[B, T], which may leave: those that were generated
    level: Array  # float32[B, T], how sure is enough


def leaving(
    name: str,
    confidence: Callable[[PyTree, LayerStreams], Array],
    level: Callable[[PyTree, TokenPositions], Array],
    tested: Callable[[int], tuple[int, ...]],
) -> DepthPolicy:
    """A token leaves behind the first layer of `tested(num_layers)` where `confidence(params, seen)` float32[B, T] is
    `level(params, places)` float32[B, T] or more. Later tokens find the keys and values of the stream that it left
    with. To be cached by the caller, which adds the parameters. `tested` raises UsageError if a model does not fit.
    """

    def check(num_layers: int) -> None:
        tested(num_layers)

    return DepthPolicy(
        plan=functools.partial(_plan, level),
        runs=lambda carry, layer: Sublayers(~carry.out, ~carry.out),
        observe=functools.partial(_see, confidence),
        observed_layers=tested,
        repair="propagate",
        check=check,
        name=name,
    )


def every_so_many(every: int) -> Callable[[int], tuple[int, ...]]:
    """`tested_layers` of any model. Raises: UsageError for a number below 1."""
    if every < 1:
        raise UsageError(f"every must be at least 1, not {every}")
    return functools.partial(tested_layers, every)


def tested_layers(every: int, num_layers: int) -> tuple[int, ...]:
    """The layers, from 0, behind which a token may leave: behind the last there is nothing to save.

    Raises: UsageError if there are none.
    """
    if every >= num_layers:
        raise UsageError(f"every must be below the number of layers of the model, {num_layers}, not {every}")
    return tuple(range(every - 1, num_layers - 1, every))


def threshold_level(threshold: Array, places: TokenPositions) -> Array:
    """float32[B, T]: one threshold for all; above 1 no token leaves, also where a probability is rounded to 1."""
    return jnp.where(threshold > 1, jnp.inf, jnp.broadcast_to(threshold, places.positions.shape))


def _plan(level, params: PyTree, places: TokenPositions, own: PyTree, num_layers: int) -> Exits:
    return Exits(jnp.zeros(places.positions.shape, bool), places.is_generated, level(params, places))


def _see(confidence, params: PyTree, carry: Exits, seen: LayerStreams) -> Exits:
    undecided = carry.may & ~carry.out

    def judge():
        return carry.out | (undecided & (confidence(params, seen) >= carry.level))

    # Of a chunk within all prompts nothing is asked: a confidence may cost the head over all of its tokens.
    return carry._replace(out=jax.lax.cond(jnp.any(undecided), judge, lambda: carry.out))


def similarity(x: Array, y: Array) -> Array:
    """float32[B, T]: the cosine of the angle between streams [B, T, D]."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    product = jnp.sum(x * y, -1)
    return product * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1) * jnp.sum(y * y, -1), 1e-30))
