"""What the modules of heads share: decoder layers over pairs, a trimmed vocabulary, from module to pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.contract import DraftedNodes, FeaturePairs
from specjax.models.layout import Layout
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, PyTree, Target

Block = Callable[[Array, L.LayerInputs], tuple[Array, tuple]]
"""`(x [B, T, D], inputs) -> (x, (k, v))`: a whole layer, its additions included."""


def run_blocks(
    blocks: Sequence[Block], x: Array, step: L.PassInputs, cache: kv.KVCache, c: LlamaConfig
) -> tuple[Array, kv.Pending]:
    """The stream behind `blocks`, one after another, and their keys and values."""
    reach = c.attention_settings()
    new = []
    for i, block in enumerate(blocks):
        earlier = () if step.earlier is None else (step.earlier.k[i], step.earlier.v[i])
        x, pending = block(x, L.LayerInputs(step, L.LayerCache(cache.k[i], cache.v[i], earlier=earlier), reach))
        new.append(pending)
    k, v = zip(*new, strict=True)
    return x, kv.Pending(k, v, step.positions, kv.write_dependency(x))


@functools.cache
def layout_of(mesh: Mesh | None, c: LlamaConfig | None) -> Layout | None:
    """How a head lies beside a target on `mesh`: split like it where that divides the attention heads of `c` (None: it
    has none), else whole on every device. None without a mesh."""
    if mesh is None:
        return None
    parts = Layout(mesh, mesh.axis_names).parts("heads")
    fits = c is None or (c.num_heads % parts == 0 and c.num_kv_heads % parts == 0)
    return Layout(mesh, mesh.axis_names if fits else ("data",))


def _layout(context: Context, c: LlamaConfig) -> Layout | None:
    return layout_of(target_of(context).model.mesh, c)


def empty_cache(context: Context, c: LlamaConfig, batch: int, capacity: int) -> kv.KVCache:
    """Of the `num_layers` of `c`."""
    layout = _layout(context, c)
    capacity = capacity if layout is None else layout.capacity(capacity)
    cache = kv.init(
        batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.dtype, stacked=False, lanes=c.cache_lanes,
        bits=c.cache_bits,
    )  # fmt: skip
    return cache if layout is None else jax.lax.with_sharding_constraint(cache, layout.cache(cache))


def step_of(
    context: Context,
    c: LlamaConfig,
    cache: kv.KVCache,
    positions: Array,
    mask: Array,
    earlier: kv.Pending | None = None,
) -> L.PassInputs:
    """What the layers `c` of one pass share; positions int32[B, T], mask bool[B, T, P + T]."""
    return L.make_pass_inputs(positions, mask, cache, earlier, _layout(context, c))


def next_step(
    context: Context, c: LlamaConfig, cache: kv.KVCache, count: int, first: Array | None = None
) -> L.PassInputs:
    """Of a pass over the `count` tokens behind the cache, one after another; of `FeaturePairs` with `first` where given."""
    place = jnp.arange(count)
    mask = jnp.broadcast_to(place <= place[:, None], (*cache.length.shape, count, count))
    if first is not None:
        mask &= place >= first[:, :, None]
    return step_of(context, c, cache, cache.length[:, None] + place, mask)


def with_root(drafted: DraftedNodes) -> DraftedNodes:
    """For heads that keep the root in the scratch, at place 0: its nodes see it too."""
    return drafted._replace(seen=drafted.seen | (jnp.arange(drafted.seen.shape[2]) == 0))


def root_of(context: Context, places: int) -> DraftedNodes:
    """The root as a node of such a head, which sees none but itself there."""
    root, none = context.root, jnp.zeros_like(context.root)
    return DraftedNodes(root, none, jnp.int32(0), none, jnp.zeros((*root.shape, places), bool))


def among_drafted(drafted: DraftedNodes) -> Array:
    """bool[B, F, places + F]: what drafted nodes see of those before and of each other, of which only themselves."""
    among = jnp.broadcast_to(
        jnp.eye(drafted.tokens.shape[1], dtype=bool), (*drafted.tokens.shape, drafted.tokens.shape[1])
    )
    return jnp.concatenate([drafted.seen, among], 2)


def commit_pairs(context: Context, c: LlamaConfig, cache: kv.KVCache, pending: kv.Pending, pairs: FeaturePairs) -> kv.KVCache:
    """`cache` with what is pending of the first `count` of these pairs."""
    return (
        cache_of_rows(pending, pairs)
        if pairs.count.ndim == 2
        else commit_first(context, c, cache, pending, pairs.count)
    )


def commit_first(context: Context, c: LlamaConfig, cache: kv.KVCache, pending: kv.Pending, count: Array) -> kv.KVCache:
    """`cache` with the first `count` int32[B] of what is pending."""
    layout = _layout(context, c)
    path = jnp.broadcast_to(jnp.arange(pending.positions.shape[1]), pending.positions.shape)
    return (kv.commit if layout is None else layout.commit)(cache, pending, path, count)


def cache_of_rows(pending: PyTree, pairs: FeaturePairs) -> PyTree:
    """The cache of B R rows, each of the first `count` int32[B, R] tokens of what is pending. None where that is no
    keys and values, as of a target with another memory."""
    if not isinstance(pending, kv.Pending):
        return None
    return kv.share_pending(pending, pairs.count, None if pairs.first is None else last_of(pairs.first, pairs.count))


def newest(rows: Array, count: Array, before: Array) -> Array:
    """[B, W]: the last of the first `count` int32[B] of rows [B, T, W]; `before` [B, W] where there are none. Of
    `count` int32[B, R] [B R, W]."""
    if count.ndim == 2:
        return last_of(rows, count).astype(before.dtype)
    last = take_along(rows, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    return jnp.where(count[:, None] > 0, last.astype(before.dtype), before)


def last_of(rows: Array, count: Array) -> Array:
    """[B R, ..]: the last of the first `count` int32[B, R] of rows [B, T, ..]; there is at least one."""
    last = take_along(rows, (count - 1).reshape(*count.shape, *[1] * (rows.ndim - 2)), 1)
    return last.reshape(-1, *rows.shape[2:])


def by_depth(count: int, depth: Array | int, run: Callable[[int], Array]) -> Array:
    """[B, F, ..]: of each node at `depth` int32[B, F] what `run(depth)` [B, F, ..] gives, the last of `count` for all
    below. What no node needs does not run: the nodes of a level are mostly at one depth.

    depth: 0 for the root, which is known while tracing; of others at least 1.
    """
    if isinstance(depth, int) or count == 1:
        return run(0)
    depth, shape = jnp.minimum(depth, count - 1), jax.eval_shape(lambda: run(1))
    y = jnp.zeros(shape.shape, shape.dtype)
    for k in range(1, count):
        here = (depth == k).reshape(*depth.shape, *[1] * (y.ndim - 2))
        write = lambda y, k=k, here=here: jnp.where(here, run(k), y)
        y = jax.lax.cond(jnp.any(here), write, lambda y: y, y)
    return y


class Residual(nnx.Module):
    """z + SiLU(W z + b). A new one adds nothing."""

    def __init__(self, width: int, *, bias: bool = True, dtype, rngs: nnx.Rngs):
        self.linear = L.Linear(width, width, bias=bias, dtype=dtype, rngs=rngs)
        self.linear.weight[...] = jnp.zeros_like(self.linear.weight[...])

    def __call__(self, z: Array) -> Array:
        return z + nnx.silu(self.linear(z))


class Ids(nnx.Variable):
    """Whole numbers of a head that no training changes."""


class DraftVocabulary(nnx.Module):
    """The target's ids that a head can draft, where these are not all."""

    def __init__(self, vocab: int, size: int):
        self.place = Ids(jnp.minimum(jnp.arange(vocab, dtype=jnp.int32), size))  # int32[V]; size: none

    def spread(self, logits: Array) -> Array:
        """[..., V] from logits [..., size] of the head's own ids: -inf of the others. As they are, if there is no map:
        training has use for the head's own ids alone."""
        if not len(self.place[...]):
            return logits
        padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
        return jnp.take(padded, self.place[...], axis=-1)


def target_of(context: Context) -> Target:
    """The target that a head reads."""
    assert context.target is not None
    return context.target


def embed(own: L.Embedding | None, tokens: Array, context: Context) -> Array:
    """[B, T, D]: by the head's own table, or by the target's."""
    if own is not None:
        return own(tokens)
    target = target_of(context)
    assert target.model.embed is not None
    return target.model.embed(target.params, tokens)


def unembed(hidden: Array, context: Context) -> Array:
    """float32[..., V] of [..., D], by the target's head without its norm."""
    target = target_of(context)
    assert target.model.unembed is not None
    return target.model.unembed(target.params, hidden)


def taps_of(target: Any, taps: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The streams of the target that a head reads: those given, or its authors'. Raises: UsageError for others."""
    if taps is None:
        return default
    if not taps or min(taps) < 0 or max(taps) > target.num_layers or tuple(sorted({*taps})) != tuple(taps):
        raise UsageError(
            f"taps are streams of the target, 0 (the embedding) to {target.num_layers} (behind all its layers), from "
            f"low to high, not {' '.join(map(str, taps)) or 'none'}"
        )
    return taps


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
