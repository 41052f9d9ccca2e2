"""What the modules of heads share: decoder layers over pairs, a trimmed vocabulary, from module to pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, PyTree, Target

Block = Callable[[Array, L.LayerInputs], tuple[Array, tuple]]
"""`(x [B, T, D], inputs) -> (x, (k, v))`: a whole layer, its additions included."""


def run_blocks(
    blocks: Sequence[Block], x: Array, step: L.Step, cache: kv.KVCache, c: LlamaConfig
) -> tuple[Array, kv.Pending]:
    """The stream behind `blocks`, one after another, and their keys and values."""
    reach = L.Reach(L.rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling), c.window)
    new = []
    for i, block in enumerate(blocks):
        earlier = () if step.earlier is None else (step.earlier.k[i], step.earlier.v[i])
        x, pending = block(x, L.LayerInputs(step, L.Prefix(cache.k[i], cache.v[i], earlier=earlier), reach))
        new.append(pending)
    k, v = zip(*new, strict=True)
    return x, kv.Pending(k, v, step.positions, kv.after(x))


def empty_cache(c: LlamaConfig, batch: int, capacity: int) -> kv.KVCache:
    """Of the `num_layers` of `c`."""
    return kv.init(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.dtype, stacked=False, bits=c.cache_bits)


def causal(length: Array, count: int) -> tuple[Array, Array]:
    """Positions int32[B, T] of `count` tokens behind `length` int32[B], and their mask bool[B, T, T]."""
    mask = jnp.tril(jnp.ones((count, count), bool))
    return length[:, None] + jnp.arange(count), jnp.broadcast_to(mask, (*length.shape, count, count))


def commit_first(cache: kv.KVCache, pending: kv.Pending, count: Array) -> kv.KVCache:
    """`cache` with the first `count` int32[B] of what is pending."""
    path = jnp.broadcast_to(jnp.arange(pending.positions.shape[1]), pending.positions.shape)
    return kv.commit(cache, pending, path, count)


class Ids(nnx.Variable):
    """Whole numbers of a head that no training changes."""


class DraftVocabulary(nnx.Module):
    """The target's ids that a head can draft, where these are not all."""

    def __init__(self, vocab: int, size: int):
        self.place = Ids(jnp.minimum(jnp.arange(vocab, dtype=jnp.int32), size))  # int32[V]; size: none

    def spread(self, logits: Array) -> Array:
        """[..., V] from logits [..., size] of the head's own ids: -inf of the others."""
        padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
        return jnp.take(padded, self.place[...], axis=-1)


def target_of(context: Context) -> Target:
    """The target that a head reads."""
    assert context.target is not None
    return context.target


@functools.cache
def _abstract(module: Callable[..., nnx.Module], config: Any) -> tuple[nnx.GraphDef, PyTree]:
    """(graphdef, shapes of the parameters)."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(module: Callable[..., nnx.Module], config: Any) -> PyTree:
    """Shapes and dtypes of the parameters of `module(config)`, as a nested dict of `jax.ShapeDtypeStruct`."""
    return _abstract(module, config)[1]


def bind(module: Callable[..., nnx.Module], config: Any) -> Callable[[PyTree], Any]:
    """`(params) -> module`."""
    graphdef, _ = _abstract(module, config)
    return lambda params: nnx.merge(graphdef, nnx.State(params))


def init_params(module: Callable[..., nnx.Module], config: Any, key) -> PyTree:
    """Random parameters, for tests and for training."""
    return nnx.to_pure_dict(nnx.split(module(config, rngs=nnx.Rngs(params=key)))[1])
