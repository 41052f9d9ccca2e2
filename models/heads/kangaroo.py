"""Kangaroo: the target's own first layers, and an adapter of attention alone in place of all others.

Liu et al.: Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (2024), arXiv 2404.18911.
a_t = h_t + attention(norm_in(h))_t, logits = W_o norm_out(a_t), where h is the target's stream behind its first layers:
it has read the token, so that there is no pair of a feature and the next token here. Drafted tokens pass the
target's first layers, on its own cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.blocks import (
    among_drafted,
    bind,
    commit_pairs,
    empty_cache,
    layout_of,
    next_step,
    root_of,
    run_blocks,
    step_of,
    target_of,
    unembed,
    with_root,
)
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, PyTree, Sublayers


@dataclass(frozen=True)
class KangarooConfig:
    """Shapes of an adapter. Parameters are published as attention_norm `layers.0.input_layernorm`, attention
    `layers.0.self_attn`, norm `norm`; the exit layer is given beside the file (2 for 7B)."""

    layer: LlamaConfig  # of its attention; of the target's width
    exit_layer: int = 2  # how many layers of the target draft

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.exit_layer,)


class Kangaroo(nnx.Module):
    """The adapter."""

    def __init__(self, config: KangarooConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.attention_norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.attention = make_attention(c, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)

    def layers(self, h: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        def block(x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
            attended, new = self.attention(self.attention_norm(x), inputs)
            return x + attended, new

        return run_blocks([block], h.astype(self.config.layer.dtype), step, cache, self.config.layer)

    def logits(self, a: Array, context: Context) -> Array:
        """float32[..., V] of what follows."""
        return unembed(self.norm(a), context)


class KangarooScratch(NamedTuple):
    cache: kv.KVCache  # the adapter's
    pending: kv.Pending  # the adapter's, by place, the root's at 0
    streams: PyTree  # what is pending of the target's first layers, likewise


@functools.cache
def kangaroo_head(config: KangarooConfig) -> Head:
    """The functions of an adapter. Memory: its keys and values, a `KVCache`.

    Raises (`init_memory`): UsageError for a target that cannot run a part of its layers, or has not as many.
    """
    module_of, layer = bind(Kangaroo, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> kv.KVCache:
        model = target_of(context).model
        if not model.capabilities.layer_skipping or not 1 <= config.exit_layer <= model.capabilities.num_layers:
            raise UsageError(
                f"the head drafts with the first {config.exit_layer} layers of its target, but the model {model.name} "
                f"can run {'a part' if model.capabilities.layer_skipping else 'no part'} of its "
                f"{model.capabilities.num_layers}; give it the target that it was trained for"
            )
        return empty_cache(context, layer, batch, capacity)

    def read(params, cache: kv.KVCache, pairs: FeaturePairs, context: Context) -> kv.KVCache:
        step = next_step(context, layer, cache, pairs.tokens.shape[1], pairs.first)
        _, pending = module_of(params).layers(pairs.features, step, cache)
        return commit_pairs(context, layer, cache, pending, pairs)

    def start(params, cache: kv.KVCache, context: Context, places: int) -> tuple[KangarooScratch, Array]:
        root = root_of(context, places)
        h, streams = exited(context, root, jnp.ones((*root.tokens.shape, 1), bool))
        streams = target_of(context).model.widen(streams, places)
        scratch = KangarooScratch(cache, kv.empty_pending(cache, places), streams)
        scratch, logits = adapted(params, scratch, root, h, context)
        return scratch, logits[:, 0]

    def follow(params, scratch: KangarooScratch, drafted: DraftedNodes, context: Context) -> tuple[KangarooScratch, Array]:
        drafted = with_root(drafted)
        h, new = exited(context, drafted, among_drafted(drafted), earlier=scratch.streams)
        streams = target_of(context).model.insert(scratch.streams, new, drafted.place)
        return adapted(params, scratch._replace(streams=streams), drafted, h, context)

    def exited(context: Context, drafted: DraftedNodes, mask: Array, **earlier) -> tuple[Array, PyTree]:
        """h [B, F, D] of drafted tokens, and what is pending of the target."""
        target, batch = target_of(context), len(context.length)
        first = jnp.arange(target.model.capabilities.num_layers) < config.exit_layer
        first = jnp.broadcast_to(first, (batch, *first.shape))
        output, pending = target.model.forward(
            target.params, drafted.tokens, context.cache, positions=context.length[:, None] - 1 + drafted.depth,
            mask=mask, layers=Sublayers(first, first), taps=config.taps, **earlier,
        )  # fmt: skip
        return output.taps[0], pending

    def adapted(params, scratch: KangarooScratch, drafted: DraftedNodes, h: Array, context: Context) -> tuple[KangarooScratch, Array]:
        module, cache = module_of(params), scratch.cache
        positions = cache.length[:, None] + drafted.depth  # it has read what the target has, all but the root
        step = step_of(context, layer, cache, positions, among_drafted(drafted), scratch.pending)
        a, new = module.layers(h, step, cache)
        pending = kv.insert(scratch.pending, new, drafted.place)
        return scratch._replace(pending=pending), module.logits(a, context)

    def shardings(cache: kv.KVCache, mesh: Mesh) -> PyTree:
        layout = layout_of(mesh, layer)
        assert layout is not None
        return layout.cache(cache)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="kangaroo",
        config=config,
        taps=config.taps,
        target_layers=lambda num_layers: ((0, config.exit_layer),),
        axes=kv.axes,
        shardings=shardings,
    )


def of_target(target: LlamaConfig, *, exit_layer: int | None = None, **changes) -> KangarooConfig:
    """The shapes that the authors train for a target: attention like its own, behind its second layer.

    Raises: UsageError for a layer that the target has not.
    """
    exit_layer = min(2, target.num_layers) if exit_layer is None else exit_layer
    if not 1 <= exit_layer <= target.num_layers:
        raise UsageError(f"exit_layer must be from 1 to {target.num_layers}, the target's layers, not {exit_layer}")
    layer = target.draft_head_config(**changes)
    return KangarooConfig(layer, exit_layer)
