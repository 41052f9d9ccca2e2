"""LongSpec: one layer that attends to a short window of tokens, and to the target's own keys of the whole text.

Yang et al.: LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification (2025),
arXiv 2502.17421.

Rule: x = E[token], x += attention(norm(x)), x += cross_attention(norm(x)), x += MLP(norm(x)), logits = W_o x. The
attention sees the last 512 tokens before the root, the root and the drafted ancestors. The cross attention has queries
and an output only. It reads the keys and values that the target's last layer has cached. The target has not read the
root yet, so a node of depth d sees the text up to d + 1 positions before it.
The memory is a ring of 512 keys and values, whatever the length of the text. They depend on tokens alone, so a
committed token is never computed again.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the authors' tree verification at temperatures above 0 is biased; here every tree is verified by an exact
rule. Training draws a lag for each position, where the authors draw one per batch. In drafting, the window moves with
the root, and in training with each token. `norm_output` adds a norm before the output layer, which the authors lack.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import activation_function, make_attention
from specjax.models.heads import target_keys
from specjax.models.heads.blocks import (
    bind,
    drafted_mask,
    embed,
    get_target,
    head_layout,
    include_root,
    last_entries,
    last_entry,
    root_node,
    share_cache,
    unembed,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind, StateDraft
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, PyTree

METHOD = Method(
    name="longspec",
    summary="drafts with a layer that reads a short window, and the target's keys of the whole text",
    paper="Yang et al. 2025, arXiv 2502.17421",
    options=shared.head_options(length=4),
    cpu_options={"num_tokens": 3},
    wide_tree="top:4x2x1",
    **shared.HEAD,
)
NAME = METHOD.name
USER = f"a {NAME} head"


@dataclass(frozen=True)
class LongSpecConfig:
    """Shapes of a LongSpec head. Raises: UsageError for a window below 1."""

    layer: LlamaConfig  # the shape of its attention, which is also that of the cross attention
    window: int = 512  # tokens before the root that its attention sees
    norm_output: bool = False  # a norm before the output layer

    def __post_init__(self):
        if self.window < 1:
            raise UsageError(f"the window of a {NAME} head must be at least 1, not {self.window}")


class LongSpec(nnx.Module):
    """The layer of LongSpec."""

    def __init__(self, config: LongSpecConfig, *, rngs: nnx.Rngs):
        c = config.layer
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.attention_norm, self.attention = norm(), make_attention(c, rngs=rngs)
        self.cross_norm, self.cross_attention = norm(), make_attention(c, queries_only=True, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = L.GatedMLP(c.width, c.mlp_width, activation_function(c), dtype=c.dtype, rngs=rngs)
        self.norm = norm() if config.norm_output else None

    def keys(self, x: Array, inputs: L.LayerInputs) -> tuple:
        """Return the keys and values of embedded tokens [B, T, D]."""
        return self.attention.keys(self.attention_norm(x), inputs)

    def layer(self, x: Array, inputs: L.LayerInputs, cross: L.LayerInputs) -> tuple[Array, tuple]:
        """Return the stream [B, T, D] after the layer, and its new keys and values."""
        attended, new = self.attention(self.attention_norm(x), inputs)
        x = x + attended
        read, _ = self.cross_attention(self.cross_norm(x), cross)
        x = x + jnp.where(cross.shared.length[:, None, None] > 0, read, 0)  # an empty cache has nothing to read
        return x + inputs.shared.sum(self.mlp(self.mlp_norm(x)), "mlp"), new

    def logits(self, x: Array, context: Context) -> Array:
        """Return the logits float32[..., V] of the next tokens."""
        return unembed(x if self.norm is None else self.norm(x), context)


class WindowMemory(NamedTuple):
    """The newest tokens that the head has read.

    In drafting, the token at position p has slot p mod window. In training, slots are the columns of a text, and
    `cache.first` is set.
    """

    cache: kv.KVCache  # its `length` counts all tokens that were read
    following: Array  # int32[B, 1], the token after them, if there are any
    shift: Array  # int32[B], distance of the root's position from its number in the text; 0 except in training


class LongSpecScratch(NamedTuple):
    """The drafted nodes of one step."""

    memory: WindowMemory
    pending: kv.Pending  # keys and values by place; the root has place 0


@functools.cache
def longspec_head(config: LongSpecConfig) -> Head:
    """Return the functions of a head. `init_memory` raises a UsageError for a target whose keys it cannot read."""
    module_of, c = bind(LongSpec, config), config.layer

    def layout_of(context: Context) -> Any:
        return target_keys.ring_layout(head_layout(get_target(context).model.mesh, c))

    def init_memory(params, context: Context, batch: int, capacity: int) -> WindowMemory:
        target_keys.check_shape(get_target(context).model, USER, c)
        cache = kv.init(
            batch, config.window, 1, c.num_kv_heads, c.head_dim, c.dtype, False, c.cache_lanes, c.cache_bits
        )
        cache = target_keys.place_ring(cache, layout_of(context))
        return WindowMemory(cache, jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def read(params, memory: WindowMemory, pairs: FeaturePairs, context: Context) -> WindowMemory:
        cache, following, shift = memory
        following = jnp.where(cache.length[:, None] > 0, following, context.tokens[:, :1])
        tokens = jnp.concatenate([following, pairs.tokens[:, :-1]], 1)  # a pair has the token after the one to read
        number = cache.length[:, None] + jnp.arange(tokens.shape[1])
        positions = number if pairs.positions is None else pairs.positions
        mask = jnp.zeros((*tokens.shape, tokens.shape[1]), bool)
        step = L.make_pass_inputs(number, mask, cache, None, layout_of(context))
        inputs = L.LayerInputs(step, L.LayerCache(cache.k[0], cache.v[0]), c.attention_settings(positions))
        k, v = module_of(params).keys(embed(None, tokens, context).astype(c.dtype), inputs)
        pending = kv.Pending((k,), (v,), number, kv.write_dependency(k))
        if pairs.count.ndim == 2:
            shift = last_entries(positions, pairs.count) - (pairs.count.reshape(-1) - 1)
            return WindowMemory(share_cache(pending, pairs), following, shift)
        following = last_entry(pairs.tokens[..., None], pairs.count, following)
        return WindowMemory(kv.commit_to_ring(cache, pending, pairs.count, config.window), following, shift)

    def run(params, scratch: LongSpecScratch, drafted: DraftedNodes, context: Context) -> tuple[LongSpecScratch, Array]:
        module, model, (memory, pending) = module_of(params), get_target(context).model, scratch
        cache, past = memory.cache, context.cache
        (batch, count), layout = drafted.tokens.shape, layout_of(context)
        root = cache.length[:, None]  # its number in the text
        positions = root + memory.shift[:, None] + drafted.depth
        settings = c.attention_settings(positions)
        if cache.first is None:
            settings = settings._replace(window=None)  # the ring has nothing older
            cache = cache._replace(length=jnp.minimum(cache.length, config.window))
        else:
            settings = settings._replace(window=config.window + 1)
        roots = jnp.broadcast_to(root, drafted.tokens.shape)
        step = L.make_pass_inputs(roots, drafted_mask(drafted), cache, pending, layout)
        earlier = (pending.k[0], pending.v[0])
        inputs = L.LayerInputs(step, L.LayerCache(cache.k[0], cache.v[0], earlier=earlier), settings)
        keys = target_keys.last_keys(model, past, batch)
        cross_step = L.make_pass_inputs(
            root + drafted.depth, jnp.zeros((batch, count, count), bool), past, None, target_keys.target_layout(model)
        )
        cross = L.LayerInputs(
            cross_step, keys, target_keys.last_settings(model.config, positions),
            keys=target_keys.no_keys(keys, batch, count),
        )  # fmt: skip
        embedded = embed(None, drafted.tokens, context).astype(c.dtype)
        x, (k, v) = module.layer(embedded, inputs, cross)
        new = kv.Pending((k,), (v,), roots, kv.write_dependency(x))
        return scratch._replace(pending=kv.insert(pending, new, drafted.place)), x

    def start_states(params, memory: WindowMemory, context: Context, places: int) -> tuple[LongSpecScratch, Array]:
        scratch = LongSpecScratch(memory, kv.empty_pending(memory.cache, places))
        scratch, x = run(params, scratch, root_node(context, places), context)
        return scratch, x[:, 0]

    def follow_states(
        params, scratch: LongSpecScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[LongSpecScratch, Array]:
        return run(params, scratch, include_root(drafted), context)

    def logits(params, states: Array, context: Context) -> Array:
        return module_of(params).logits(states, context)

    def start(params, memory: WindowMemory, context: Context, places: int) -> tuple[LongSpecScratch, Array]:
        scratch, x = start_states(params, memory, context, places)
        return scratch, logits(params, x, context)

    def follow(
        params, scratch: LongSpecScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[LongSpecScratch, Array]:
        scratch, x = follow_states(params, scratch, drafted, context)
        return scratch, logits(params, x, context)

    def axes(memory: WindowMemory) -> Any:
        return batch_axes.rows_first(memory)._replace(cache=kv.axes(memory.cache))

    def shardings(memory: WindowMemory, mesh: Mesh) -> PyTree:
        layout: Any = target_keys.ring_layout(head_layout(mesh, c))
        return WindowMemory(layout.cache(memory.cache), layout.rows(memory.following), layout.rows(memory.shift))

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=NAME,
        config=config,
        in_states=StateDraft(start_states, follow_states, logits),
        axes=axes,
        shardings=shardings,
        reads_keys=True,
    )


def of_target(
    target: LlamaConfig, *, window: int | None = None, norm_output: bool = False, **changes: Any
) -> LongSpecConfig:
    """Return the shapes that the authors train for a target. Raises: UsageError for a target without keys to read."""
    last = target_keys.check_last_layer(target, USER)
    shape = {"num_kv_heads": last.num_kv_heads, "head_dim": last.head_dim}
    return LongSpecConfig(target.draft_head_config(**(shape | changes)), window or 512, norm_output)


KIND = HeadKind(METHOD, LongSpec, longspec_head, of_target, numbers=("window",), flags=("norm_output",))
