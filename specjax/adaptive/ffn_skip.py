"""FFN-SkipLLM: a token skips the MLPs of the middle layers after one of them barely changes its stream.

Jaiswal, Hu, Yin, Ro, Liu, Chen, Akella: FFN-SkipLLM: A Hidden Gem for Autoregressive Decoding with Adaptive Feed
Forward Skipping (2024), arXiv 2404.03865.

Rule: the first and last layers (the cold regions) always run in full, and so do all layers for the first generated
tokens. Between the cold regions an MLP may change the stream so little that the cosine similarity before and after it
is at least s. The token then skips the following MLPs up to the last cold region. Attention always runs, so the cache
has the keys and values of all tokens.
Guarantee: lossy.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from specjax.adaptive.exits import similarity
from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array, Sublayers

METHOD = Method(
    name="ffn_skip",
    kind="adaptive",
    guarantee="lossy",
    summary="skips the MLPs of the middle layers after one of them changes its input little",
    paper="Jaiswal et al. 2024, arXiv 2404.03865",
    options=(
        Option(
            "threshold",
            "float",
            0.95,
            "cosine similarity of an MLP's input and output at which skipping starts; above 1: never",
        ),
        Option("first", "int", None, "number of first layers that always run in full; default: an eighth, at least 2"),
        Option("last", "int", 2, "number of last layers that always run in full"),
        Option("warm_up", "int", 8, "number of first generated tokens that run all layers"),
    ),
)


def ffn_skip(threshold: float = 0.95, *, first: int | None = None, last: int = 2, warm_up: int = 8) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, ffn_skip())`.

    Args:
      threshold: s, an array parameter. Another value needs no recompilation.
      first, last: numbers of layers in the cold regions. The default of `first` is an eighth of the model, at least 2.
      warm_up: number of first generated tokens that run all layers.
    """
    if math.isnan(threshold):
        raise UsageError("threshold must be a number")
    if last < 0 or warm_up < 0 or (first is not None and first < 0):
        raise UsageError(f"first, last and warm_up must be at least 0, not {first}, {last} and {warm_up}")
    return _ffn_skip(first, last, warm_up).replace(params=jnp.float32(threshold))


class _Skipping(NamedTuple):
    now: Array  # bool[B, T], True for tokens that skip MLPs
    may: Array  # bool[B, T], True for tokens after the warm-up
    begin: int  # first layer between the cold regions
    end: int  # first layer of the last cold region


@functools.cache
def _ffn_skip(first: int | None, last: int, warm_up: int) -> DepthPolicy:
    def between(num_layers: int) -> tuple[int, int]:
        begin = max(2, num_layers // 8) if first is None else first
        if begin + last >= num_layers:
            raise UsageError(f"first and last must leave some of the {num_layers} layers, not {begin} and {last}")
        return begin, num_layers - last

    def plan(params, places: TokenPositions, state, num_layers: int) -> _Skipping:
        may = places.is_generated & (places.num_generated >= warm_up)
        return _Skipping(jnp.zeros(may.shape, bool), may, *between(num_layers))

    def runs(carry: _Skipping, layer) -> Sublayers:
        inside = (layer >= carry.begin) & (layer < carry.end)
        return Sublayers(jnp.ones(carry.now.shape, bool), ~(carry.now & inside))

    def see(threshold, carry: _Skipping, layer_streams: LayerStreams) -> _Skipping:
        alike = similarity(layer_streams.after_attention, layer_streams.after_mlp) >= threshold
        return carry._replace(now=carry.now | (carry.may & alike))

    return DepthPolicy(
        plan=plan, runs=runs, observe=see, observed_layers=lambda num_layers: tuple(range(*between(num_layers))),
        check=lambda num_layers: between(num_layers) and None, name="ffn_skip",
    )  # fmt: skip
