"""LoRA-Drop: most layers run at every k-th token only; in between a small correction stands for them.

LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference (2026), arXiv 2601.02569.

Rule: at generated token t with t mod k = 0 everything runs, and o_l, the stream behind each droppable layer l, is kept.
At the others, with h the stream before the layer,
  h_l = o_l + (alpha / r) B_l A_l h
in place of the layer: neither attention nor MLP, and no keys and values, so that what runs the layer later sees the
prompt and the tokens with t mod k = 0 only. The other layers run always. B begins as zeros.
Guarantee: lossy.

Deviations: o_l is that of the last token that ran the layer, as the authors' code has it, where the abstract says of
the previous one. The caches of droppable layers hold 1 / k of the tokens, and are as large as the others. A pass of
several tokens runs what any of them needs: over chains that are longer than k, everything.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.models.variants.layer_skipping import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array, Sublayers, Target

METHOD = Method(
    name="lora_drop",
    kind="adaptive",
    guarantee="lossy",
    summary="runs most layers for every k-th token only, and replaces them by low-rank corrections in between",
    paper="2026, arXiv 2601.02569",
    needs=frozenset({"corrections"}),
    options=(
        Option("every", "int", 4, "every how many tokens all layers run"),
        Option("alpha", "float", 16.0, "scale of the corrections; it is divided by their rank"),
    ),
)


class Corrections(NamedTuple):
    """Low-rank corrections for the droppable layers; zeros for the other layers."""

    down: Array  # float32[layers, r, D], A
    up: Array  # float32[layers, D, r], B


class _Drop(NamedTuple):
    refreshes: Array  # bool[B, T]
    same: Array  # bool[B, T, T], which token of this pass each one's o_l is of, if any
    stored: Array  # [B, droppable, D], o_l of the last refresh before this pass
    streams: Array  # [B, T, droppable, D], what they are behind the tokens of this pass


def lora_drop(corrections: Corrections, *, every: int = 4, alpha: float = 16.0) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, lora_drop(corrections))`.

    corrections: from `blank_corrections`, trained by `fit`. every: k. alpha: as in the module text; r is that of the
    corrections.
    """
    if every < 1:
        raise UsageError(f"every must be at least 1, not {every}")
    layers, rank, width = corrections.down.shape
    if corrections.up.shape != (layers, width, rank):
        raise UsageError(
            f"corrections are down [layers, r, width] and up [layers, width, r]; up is {corrections.up.shape}"
        )
    return _lora_drop(every, float(alpha), layers, width, corrections.down.dtype.name).replace(params=corrections)


def blank_corrections(target: Target, key: Array, rank: int = 8) -> Corrections:
    """Return corrections of zeros, as B is. Dropped layers then repeat their last output."""
    layers, width = target.model.capabilities.num_layers, target.model.config.width
    down = jax.random.normal(key, (layers, rank, width), jnp.float32) * width**-0.5
    return Corrections(down, jnp.zeros((layers, width, rank), jnp.float32))


def droppable(num_layers: int) -> tuple[int, ...]:
    """Return three layers of four."""
    return tuple(layer for layer in range(num_layers) if layer % 4)


@functools.cache
def _lora_drop(every: int, alpha: float, layers: int, width: int, dtype: str) -> DepthPolicy:
    which = droppable(layers)

    def check(num_layers: int) -> None:
        if num_layers != layers:
            raise UsageError(f"the corrections are of {layers} layers, and the model has {num_layers}")

    def refreshing(places: TokenPositions) -> Array:
        return ~places.is_generated | (places.num_generated % every == 0)

    def start(batch: int, num_layers: int) -> Array:
        return jnp.zeros((batch, len(which), width), dtype)

    def plan(params: Corrections, places: TokenPositions, stored: Array, num_layers: int) -> _Drop:
        wanted = places.positions - jnp.where(places.is_generated, places.num_generated % every, 0)
        assert places.mask is not None
        same = places.mask & (places.positions[:, None, :] == wanted[:, :, None])
        refreshes = refreshing(places)
        return _Drop(refreshes, same, stored, jnp.zeros((*refreshes.shape, len(which), width), dtype))

    def runs(carry: _Drop, layer: int) -> Sublayers:
        layer_runs = carry.refreshes if layer in which else jnp.ones_like(carry.refreshes)
        return Sublayers(layer_runs, layer_runs)

    def become(params: Corrections, carry: _Drop, layer_streams: LayerStreams) -> Array:
        if layer_streams.layer not in which:
            return layer_streams.after_mlp
        output = layer_streams.after_mlp.astype(jnp.float32)
        stored = carry.stored[:, which.index(layer_streams.layer)].astype(jnp.float32)[:, None]
        layer_runs = jnp.einsum("bij,bjd->bid", carry.same.astype(jnp.float32), output)
        anchor = jnp.where(jnp.any(carry.same, 2)[..., None], layer_runs, stored)
        down, up = params.down[layer_streams.layer], params.up[layer_streams.layer]
        correction = alpha / down.shape[0] * (layer_streams.before_layer.astype(jnp.float32) @ down.T) @ up.T
        return jnp.where(
            carry.refreshes[..., None],
            layer_streams.after_mlp,
            (anchor + correction).astype(layer_streams.after_mlp.dtype),
        )

    def see(params: Corrections, carry: _Drop, layer_streams: LayerStreams) -> _Drop:
        place = which.index(layer_streams.layer)
        return carry._replace(streams=carry.streams.at[:, :, place].set(layer_streams.after_mlp.astype(dtype)))

    def learn(stored: Array, streams: Array, places: TokenPositions, taken: Array) -> Array:
        order = jnp.where(taken & refreshing(places), jnp.arange(taken.shape[1]), -1)
        last = jnp.argmax(order, 1)
        newest = jnp.take_along_axis(streams, last[:, None, None, None], 1)[:, 0]
        return jnp.where((jnp.max(order, 1) >= 0)[:, None, None], newest, stored)

    return DepthPolicy(
        plan=plan, runs=runs, replace_stream=become, observe=see, observed_layers=lambda num_layers: which,
        init_state=start,
        record=lambda carry: carry.streams, update_state=learn, sparse_layers=droppable, check=check, width=width,
        name="lora_drop",
    )  # fmt: skip
