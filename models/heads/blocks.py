"""Building blocks of draft heads: decoder layers over pairs, draft vocabularies, and modules as pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.candidates import attach, split_factors
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, StateDraft
from specjax.models.hybrid.memory import HybridCache, HybridPending
from specjax.models.layout import Layout
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, PyTree, Target

Block = Callable[[Array, L.LayerInputs], tuple[Array, tuple]]
"""`(x [B, T, D], inputs) -> (x, (k, v))`: a whole layer with its residual additions."""


def run_blocks(
    blocks: Sequence[Block], x: Array, step: L.PassInputs, cache: kv.KVCache, c: LlamaConfig
) -> tuple[Array, kv.Pending]:
    """Run `blocks` one after another, and return the residual stream and their keys and values."""
    reach = attention_reach(c, cache, step.positions if step.rotary is None else step.rotary)
    new = []
    for i, block in enumerate(blocks):
        earlier = () if step.earlier is None else (step.earlier.k[i], step.earlier.v[i])
        x, pending = block(x, L.LayerInputs(step, L.LayerCache(cache.k[i], cache.v[i], earlier=earlier), reach))
        new.append(pending)
    k, v = zip(*new, strict=True)
    return x, kv.Pending(k, v, step.positions, kv.write_dependency(x))


def attention_reach(c: LlamaConfig, cache: kv.KVCache, positions: Array) -> L.AttentionSettings:
    """Return the rotation at positions int32[B, T] and the window of a head's layers.

    Rotary attention depends on distances alone. A cache with room for longer texts than `max_positions`, the trained
    length, therefore gets a window of that length: no distance exceeds the trained ones.
    """
    # The EAGLE-3 head of SmolLM2-135M, trained on texts of 512 tokens, at tokens 600 to 1,900 of a text: the first
    # three drafts agree at 23.2, 19.8 and 18.4 % with this window, and at 22.9, 18.8 and 18.1 % without.
    settings = c.attention_settings(positions)
    if settings.window is not None or cache.k[0].shape[-2] <= c.max_positions:
        return settings
    return settings._replace(window=c.max_positions)


@functools.cache
def head_layout(mesh: Mesh | None, c: LlamaConfig | None) -> Layout | None:
    """Return the layout of a head for a target on `mesh`; None without a mesh.

    The head is split like the target if the mesh divides the attention heads of `c`. Otherwise every device has a copy.

    c: the config of the head's layers; None: the head has no attention.
    """
    if mesh is None:
        return None
    parts = Layout(mesh, mesh.axis_names).parts("heads")
    fits = c is None or (c.num_heads % parts == 0 and c.num_kv_heads % parts == 0)
    return Layout(mesh, mesh.axis_names if fits else ("data",))


def _layout(context: Context, c: LlamaConfig) -> Layout | None:
    return head_layout(get_target(context).model.mesh, c)


def empty_cache(context: Context, c: LlamaConfig, batch: int, capacity: int) -> kv.KVCache:
    """Return an empty cache for the `num_layers` layers of `c`."""
    layout = _layout(context, c)
    capacity = capacity if layout is None else layout.capacity(capacity)
    cache = kv.init(
        batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.dtype, stacked=False, lanes=c.cache_lanes,
        bits=c.cache_bits,
    )  # fmt: skip
    cache = cache if c.latent is None else cache._replace(v=(None,) * c.num_layers)
    return cache if layout is None else jax.lax.with_sharding_constraint(cache, layout.cache(cache))


def pass_inputs(
    context: Context,
    c: LlamaConfig,
    cache: kv.KVCache,
    positions: Array,
    mask: Array,
    earlier: kv.Pending | None = None,
) -> L.PassInputs:
    """Return the inputs that all layers of a pass share, for positions int32[B, T] and mask bool[B, T, P + T]."""
    return L.make_pass_inputs(positions, mask, cache, earlier, _layout(context, c))


def causal_inputs(
    context: Context, c: LlamaConfig, cache: kv.KVCache, count: int, first: Array | None = None
) -> L.PassInputs:
    """Return the inputs of a causal pass over the `count` tokens after the cache.

    first: `FeaturePairs.first`, if several texts are in one row.
    """
    place = jnp.arange(count)
    mask = jnp.broadcast_to(place <= place[:, None], (*cache.length.shape, count, count))
    if first is not None:
        mask &= place >= first[:, :, None]
    return pass_inputs(context, c, cache, cache.length[:, None] + place, mask)


def include_root(drafted: DraftedNodes) -> DraftedNodes:
    """Let the nodes attend to the root, for heads with the root at place 0 of their scratch."""
    return drafted._replace(seen=drafted.seen | (jnp.arange(drafted.seen.shape[2]) == 0))


def root_node(context: Context, places: int) -> DraftedNodes:
    """Return the root as a node of such a head. It attends to itself only."""
    root, none = context.root, jnp.zeros_like(context.root)
    return DraftedNodes(root, none, jnp.int32(0), none, jnp.zeros((*root.shape, places), bool))


def drafted_mask(drafted: DraftedNodes) -> Array:
    """Return the mask bool[B, F, places + F] of drafted nodes: their ancestors in the scratch, and themselves."""
    itself = jnp.broadcast_to(
        jnp.eye(drafted.tokens.shape[1], dtype=bool), (*drafted.tokens.shape, drafted.tokens.shape[1])
    )
    return jnp.concatenate([drafted.seen, itself], 2)


def commit_pairs(
    context: Context, c: LlamaConfig, cache: kv.KVCache, pending: kv.Pending, pairs: FeaturePairs
) -> kv.KVCache:
    """Return `cache` with the pending entries of the first `count` of these pairs."""
    return (
        share_cache(pending, pairs) if pairs.count.ndim == 2 else commit_first(context, c, cache, pending, pairs.count)
    )


def commit_first(
    context: Context, c: LlamaConfig, cache: kv.KVCache, pending: kv.Pending, count: Array, path: Array | None = None
) -> kv.KVCache:
    """Return `cache` with the first `count` int32[B] entries of `path` int32[B, T], or of all pending ones in order."""
    layout = _layout(context, c)
    if path is None:
        path = jnp.broadcast_to(jnp.arange(pending.positions.shape[1]), pending.positions.shape)
    return (kv.commit if layout is None else layout.commit)(cache, pending, path, count)


def share_cache(pending: PyTree, pairs: FeaturePairs) -> PyTree:
    """Return the cache of B R rows, each with the first `count` int32[B, R] pending entries.

    That of a hybrid target has its keys and values only. Return None for a target with another kind of cache.
    """
    if isinstance(pending, HybridPending):
        return HybridCache(share_cache(pending.attention, pairs), ())
    if not isinstance(pending, kv.Pending):
        return None
    return kv.share_pending(
        pending, pairs.count, None if pairs.first is None else last_entries(pairs.first, pairs.count)
    )


def last_entry(rows: Array, count: Array, fallback: Array) -> Array:
    """Return the last of the first `count` int32[B] entries of rows [B, T, W]; `fallback` [B, W] if there is none.

    With a `count` int32[B, R] the result is [B R, W].
    """
    if count.ndim == 2:
        return last_entries(rows, count).astype(fallback.dtype)
    last = take_along(rows, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    return jnp.where(count[:, None] > 0, last.astype(fallback.dtype), fallback)


def last_entries(rows: Array, count: Array) -> Array:
    """Return the last of the first `count` int32[B, R] >= 1 entries of rows [B, T, ..], as [B R, ..]."""
    last = take_along(rows, (count - 1).reshape(*count.shape, *[1] * (rows.ndim - 2)), 1)
    return last.reshape(-1, *rows.shape[2:])


def by_depth(count: int, depth: Array | int, run: Callable[[int], Array], lowest: int = 1) -> Array:
    """Return the result [B, F, ..] of `run(depth)` for each node at `depth` int32[B, F].

    Nodes deeper than `count - 1` get the result of `run(count - 1)`. `run` is called only for depths that have nodes,
    because the nodes of a level are mostly at one depth.

    depth: the static 0 for the root; at least `lowest` for other nodes.
    """
    if isinstance(depth, int) or count == 1:
        return run(0)
    depth, shape = jnp.minimum(depth, count - 1), jax.eval_shape(lambda: run(lowest))
    y = jnp.zeros(shape.shape, shape.dtype)
    for k in range(lowest, count):
        is_k = (depth == k).reshape(*depth.shape, *[1] * (y.ndim - 2))
        write = lambda y, k=k, is_k=is_k: jnp.where(is_k, run(k), y)
        y = jax.lax.cond(jnp.any(is_k), write, lambda y: y, y)
    return y


class DepthLogits(NamedTuple):
    """The scratch of heads that predict all depths in one pass."""

    logits: Array  # float32[B, K, V], by depth


def draft_depths(
    states_of: Callable[..., PyTree],
    logits: Callable[..., Array],
    every: Callable[..., Array] | None = None,
) -> dict[str, Any]:
    """Return the functions `start`, `follow` and `in_states` of a head that predicts all depths in one pass.

    Args:
      states_of: `(params, memory, context) -> states [B, K, ...]` by depth, the inputs of the output layer.
      logits: the output layer, `StateDraft.logits`.
      every: a faster `logits` for the states of all depths; None: `logits`.
    """

    def start(params, memory, context: Context, places: int) -> tuple[DepthLogits, Array]:
        rows = (every or logits)(params, states_of(params, memory, context), context)
        return DepthLogits(rows), rows[:, 0]

    def start_states(params, memory, context: Context, places: int) -> tuple[PyTree, PyTree]:
        states = states_of(params, memory, context)
        return states, jax.tree.map(lambda x: x[:, 0], states)

    def follow_states(params, states: PyTree, drafted: DraftedNodes, context: Context) -> tuple[PyTree, PyTree]:
        return states, LogitRows(states).take(drafted.depth).every()

    return {"start": start, "follow": follow_depths, "in_states": StateDraft(start_states, follow_states, logits)}


def follow_depths(params, scratch: DepthLogits, drafted: DraftedNodes, context: Context) -> tuple[DepthLogits, Array]:
    """Return the logits of the nodes' depths: `Head.follow` of heads that predict all depths in one pass."""
    return scratch, take_along(scratch.logits, drafted.depth[:, :, None], 1)


class Residual(nnx.Module):
    """z + SiLU(W z + b). A new block is the identity."""

    def __init__(self, width: int, *, bias: bool = True, dtype, rngs: nnx.Rngs):
        self.linear = L.Linear(width, width, bias=bias, dtype=dtype, rngs=rngs)
        self.linear.weight[...] = jnp.zeros_like(self.linear.weight[...])

    def __call__(self, z: Array) -> Array:
        return z + nnx.silu(self.linear(z))


class Ids(nnx.Variable):
    """Integers of a head that training does not change."""


class DraftVocabulary(nnx.Module):
    """A draft vocabulary: the subset of the target's ids that a head can draft."""

    def __init__(self, vocab: int, size: int):
        self.place = Ids(
            jnp.minimum(jnp.arange(vocab, dtype=jnp.int32), size)
        )  # int32[V], the head's own id; size: the head cannot draft it

    def spread(self, logits: Array) -> Array:
        """Return logits [..., V] from logits [..., size] of the head's own ids, with -inf for all others.

        Without a map the logits are returned unchanged: training uses the head's own ids only.
        """
        if not len(self.place[...]):
            return logits
        padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
        return jnp.take(padded, self.place[...], axis=-1)


def get_target(context: Context) -> Target:
    """Return the target of a head."""
    assert context.target is not None
    return context.target


def embed(table: L.Embedding | None, tokens: Array, context: Context) -> Array:
    """Return the embeddings [B, T, D] from the head's own table, or from the target's if `table` is None."""
    if table is not None:
        return table(tokens)
    target = get_target(context)
    assert target.model.embed is not None
    return target.model.embed(target.params, tokens)


def unembed(hidden: Array, context: Context) -> Array:
    """Return the logits float32[..., V] of states [..., D] by the target's output layer, without its norm."""
    target = get_target(context)
    assert target.model.unembed is not None
    return target.model.unembed(target.params, hidden)


def check_taps(target: Any, taps: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the streams of the target that a head reads: `taps`, or `default` for None.

    A default made for deep targets may not rise in a shallow one. Streams spread evenly over its layers replace it. If
    the target has too few layers, there are fewer of them.

    Raises: UsageError for streams that the target lacks, or that do not rise.
    """
    if taps is None:
        return default if _are_rising(default, target.num_layers) else _spread(len(default), target.num_layers)
    if not _are_rising(taps, target.num_layers):
        raise UsageError(
            f"taps must be rising streams of the target from 0 (the embedding) to {target.num_layers} (after all "
            f"layers), not {' '.join(map(str, taps)) or 'none'}"
        )
    return taps


def _are_rising(taps: tuple[int, ...], num_layers: int) -> bool:
    """Return True for different streams of a target in ascending order."""
    return bool(taps) and tuple(sorted({*taps} & {*range(num_layers + 1)})) == tuple(taps)


def _spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Return up to `count` streams at equal distances, up to the last layer. Too few layers add the embedding, 0."""
    if count > num_layers:
        return tuple(range(num_layers + 1))[-count:]
    return tuple(-(-num_layers * number // count) for number in range(1, count + 1))


@functools.cache
def _abstract(module: Callable[..., nnx.Module], config: Any) -> tuple[nnx.GraphDef, PyTree]:
    """Return the graph definition and the shapes of the parameters."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(module: Callable[..., nnx.Module], config: Any) -> PyTree:
    """Return shapes and dtypes of the parameters of `module(config)` as a nested dict of `jax.ShapeDtypeStruct`."""
    return _abstract(module, config)[1]


def bind(module: Callable[..., nnx.Module], config: Any) -> Callable[[PyTree], Any]:
    """Return a function that builds the module from its parameters."""
    graphdef, _ = _abstract(module, config)

    def build(params: PyTree) -> Any:
        params, factors = split_factors(params)
        merged = nnx.merge(graphdef, nnx.State(params))
        return merged if factors is None else attach(merged, factors)

    return build


def init_params(module: Callable[..., nnx.Module], config: Any, key) -> PyTree:
    """Return random parameters, for tests and for training."""
    return nnx.to_pure_dict(nnx.split(module(config, rngs=nnx.Rngs(params=key)))[1])
