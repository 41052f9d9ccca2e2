"""The keys and values of the target's last layer, for heads that attend to them in the target's own cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.catalog.schemes import compressed_form
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import DecoderConfig
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.memory import layer_cache
from specjax.models.layout import Layout
from specjax.numerics.quantization import BITS, Quantized, dequantize
from specjax.pallas_kernels.tree_attention.reference import select_layer
from specjax.types import Array, Model, PyTree


def last_layer_of(model: Model, user: str) -> DecoderConfig:
    """Return the config of a model's last layer, whose keys and values `user` reads.

    Raises: UsageError for a model whose last layer caches no keys, or a latent in their place.
    """
    config = model.config
    if not isinstance(config, DecoderConfig):
        raise UsageError(
            f"{user} reads the keys of the target's last layer, and the cache of {model.name} has another form; choose "
            "a head that reads features, such as eagle3"
        )
    return check_last_layer(config, user)


def check_last_layer(config: DecoderConfig, user: str) -> DecoderConfig:
    """Return the config of the last layer of a decoder. Raises: UsageError as in `last_layer_of`."""
    last = config
    if isinstance(config, HybridConfig):
        kind, last = config.kinds[-1], config.of_layer(config.num_layers - 1)
        if not kind.attends:
            raise UsageError(
                f"{user} reads the keys of the target's last layer, and that of {config.name} has none (it is "
                f"{kind.mixer}); choose a head that reads features, such as eagle3"
            )
    if compressed_form(config.cache_dtype) is not None:
        raise UsageError(
            f"{user} reads the keys of the target's last layer, and {config.name} has a cache of the form "
            f"{config.cache_dtype}; choose another cache dtype, or a head that reads features, such as eagle3"
        )
    if last.latent is not None:
        raise UsageError(
            f"{user} reads the keys of the target's last layer, and {config.name} caches a latent in their place; "
            "choose a head that reads features, such as eagle3"
        )
    return last


def check_shape(model: Model, user: str, layer: DecoderConfig) -> None:
    """Check that a head with attention like `layer` can read the keys of a model's last layer.

    Raises: UsageError if it cannot.
    """
    last = last_layer_of(model, user)
    needed, cached = ((c.num_kv_heads, c.head_dim) for c in (layer, last))
    if needed != cached:
        raise UsageError(
            f"the head reads keys of {needed[0]} heads of size {needed[1]}, but the last layer of {model.name} has "
            f"{cached[0]} of size {cached[1]}; use the target that it was trained for"
        )


def last_keys(model: Model, cache: PyTree, rows: int) -> L.LayerCache:
    """Return the keys and values of the last layer in the target's cache, without a copy.

    If several of the `rows` share a row of the cache, int8 values are expanded, because such rows cannot share them.
    """
    layers = model.config.num_layers
    if isinstance(model.config, HybridConfig):
        last = layer_cache(model.config, cache, layers - 1)
    else:
        last = L.LayerCache.of_layer(cache, layers - 1, ())
    if not isinstance(last.k, Quantized) or last.k.shape[-4] == rows:
        return last
    dtype = model.config.dtype
    k, v = (dequantize(select_layer(x, last.layer)).astype(dtype) for x in (last.k, last.v))
    return L.LayerCache(k, v)


def last_settings(config: DecoderConfig, positions: Array) -> L.AttentionSettings:
    """Return the rotation and the window of the last layer for queries at positions int32[B, T]."""
    last = config.num_layers - 1
    if isinstance(config, HybridConfig):
        return config.of_layer(last).attention_settings(positions)
    return config.attention_settings(positions).at_layer(last)


def no_keys(cache: L.LayerCache, batch: int, count: int) -> tuple:
    """Return empty keys and values of `count` new tokens in `batch` rows, in the form of a layer's cache.

    A pass gives them to a layer that reads the keys of another model, and no token attends to them.
    """

    def empty(x: Array | Quantized) -> Any:
        shape = (batch, x.shape[-3], count, x.shape[-1])
        if isinstance(x, Quantized):
            return Quantized(jnp.zeros(shape, x.values.dtype), jnp.zeros(shape[:-1], x.scale.dtype))
        return jnp.zeros(shape, jnp.bfloat16 if x.dtype == BITS else x.dtype)

    return empty(cache.k), empty(cache.v)


def target_layout(model: Model) -> Layout | None:
    """Return the layout of a target on its mesh; None without a mesh."""
    if model.mesh is None:
        return None
    return Layout(model.mesh, model.mesh.axis_names if model.over is None else ("data", *model.over))


def ring_layout(layout: Layout | None) -> Layout | None:
    """Return a layout for a ring of tokens, whose slots stay together on each device."""
    return None if layout is None else Layout(layout.mesh, tuple(a for a in layout.over if a != "sequence"))


def place_ring(cache: kv.KVCache, layout: Layout | None) -> kv.KVCache:
    """Constrain a ring to its sharding."""
    return cache if layout is None else jax.lax.with_sharding_constraint(cache, layout.cache(cache))
