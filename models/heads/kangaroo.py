"""Kangaroo: the target's own first layers, and an adapter with only attention in place of all other layers.

Liu et al.: Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (2024), arXiv 2404.18911.

Rule: a_t = h_t + attention(norm_in(h))_t, logits = W_o norm_out(a_t). h is the target's stream after its first layers.
It has read the token, so this head needs no pairs of a feature and the next token. Drafted tokens run through the
target's first layers on its own cache. The draft ends after a token that was drawn with a probability of at most 0.6,
or at 6 tokens.
Guarantee: distribution (verified with the q that was sampled; the authors decode greedily).
Deviations: the target pass runs all layers on the drafted tokens, where the authors reuse the first layers' results
(like `early_exit`). The adapter reads the accepted tokens at the start of the next draft, from the target's taps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.blocks import (
    bind,
    causal_inputs,
    commit_pairs,
    drafted_mask,
    empty_cache,
    get_target,
    head_layout,
    include_root,
    pass_inputs,
    root_node,
    run_blocks,
    unembed,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind
from specjax.models.llama import LlamaConfig
from specjax.models.requirements import check_partial_passes
from specjax.types import Array, Context, PyTree, Sublayers

METHOD = Method(
    name="kangaroo",
    summary="drafts with the target's first layers and a trained adapter until the probability of a token is low",
    paper="Liu et al. 2024, arXiv 2404.18911",
    options=shared.head_options(length=6, stop="confidence:0.6"),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class KangarooConfig:
    """Shapes of an adapter. The exit layer is not part of published files; for 7B it is 2."""

    layer: LlamaConfig  # shape of its attention, as wide as the target
    exit_layer: int = 2  # number of the target's layers that draft

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.exit_layer,)


class Kangaroo(nnx.Module):
    """The adapter of Kangaroo."""

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
        """Return the logits float32[..., V] of the next tokens."""
        return unembed(self.norm(a), context)


class KangarooScratch(NamedTuple):
    """The drafted nodes of one step."""

    cache: kv.KVCache  # of the adapter
    pending: kv.Pending  # of the adapter, by place; the root has place 0
    streams: PyTree  # pending entries of the target's first layers, by place


@functools.cache
def kangaroo_head(config: KangarooConfig) -> Head:
    """Return the functions of an adapter. Its memory stores its keys and values, a `KVCache`.

    `init_memory` raises a UsageError for a target that cannot run some of its layers, or has too few.
    """
    module_of, layer = bind(Kangaroo, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> kv.KVCache:
        model = get_target(context).model
        num_layers = check_partial_passes(model, "kangaroo")
        if not 1 <= config.exit_layer <= num_layers:
            raise UsageError(
                f"the head drafts with the first {config.exit_layer} layers of its target, but the model {model.name} "
                f"has {num_layers}; use the target that it was trained for"
            )
        return empty_cache(context, layer, batch, capacity)

    def read(params, cache: kv.KVCache, pairs: FeaturePairs, context: Context) -> kv.KVCache:
        step = causal_inputs(context, layer, cache, pairs.tokens.shape[1], pairs.first)
        _, pending = module_of(params).layers(pairs.features, step, cache)
        return commit_pairs(context, layer, cache, pending, pairs)

    def start(params, cache: kv.KVCache, context: Context, places: int) -> tuple[KangarooScratch, Array]:
        root = root_node(context, places)
        h, streams = run_first_layers(context, root, jnp.ones((*root.tokens.shape, 1), bool))
        streams = get_target(context).model.widen(streams, places)
        scratch = KangarooScratch(cache, kv.empty_pending(cache, places), streams)
        scratch, logits = run_adapter(params, scratch, root, h, context)
        return scratch, logits[:, 0]

    def follow(
        params, scratch: KangarooScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[KangarooScratch, Array]:
        drafted = include_root(drafted)
        h, new = run_first_layers(context, drafted, drafted_mask(drafted), earlier=scratch.streams)
        streams = get_target(context).model.insert(scratch.streams, new, drafted.place)
        return run_adapter(params, scratch._replace(streams=streams), drafted, h, context)

    def run_first_layers(context: Context, drafted: DraftedNodes, mask: Array, **earlier) -> tuple[Array, PyTree]:
        """Return h [B, F, D] of drafted tokens, and the pending entries of the target."""
        target, batch = get_target(context), len(context.length)
        first = jnp.arange(target.model.capabilities.num_layers) < config.exit_layer
        first = jnp.broadcast_to(first, (batch, *first.shape))
        output, pending = target.model.forward(
            target.params, drafted.tokens, context.cache, positions=context.length[:, None] - 1 + drafted.depth,
            mask=mask, layers=Sublayers(first, first), taps=config.taps, **earlier,
        )  # fmt: skip
        return output.taps[0], pending

    def run_adapter(
        params, scratch: KangarooScratch, drafted: DraftedNodes, h: Array, context: Context
    ) -> tuple[KangarooScratch, Array]:
        module, cache = module_of(params), scratch.cache
        positions = cache.length[:, None] + drafted.depth  # the adapter, like the target, has read all but the root
        step = pass_inputs(context, layer, cache, positions, drafted_mask(drafted), scratch.pending)
        a, new = module.layers(h, step, cache)
        pending = kv.insert(scratch.pending, new, drafted.place)
        return scratch._replace(pending=pending), module.logits(a, context)

    def shardings(cache: kv.KVCache, mesh: Mesh) -> PyTree:
        layout = head_layout(mesh, layer)
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
    """Return the shapes that the authors train for a target: attention like the target's, after its second layer.

    Raises: UsageError for a layer that the target lacks.
    """
    exit_layer = min(2, target.num_layers) if exit_layer is None else exit_layer
    if not 1 <= exit_layer <= target.num_layers:
        raise UsageError(f"exit_layer must be from 1 to {target.num_layers}, the target's layers, not {exit_layer}")
    layer = target.draft_head_config(**changes)
    return KangarooConfig(layer, exit_layer)


KIND = HeadKind(METHOD, Kangaroo, kangaroo_head, of_target, ("exit_layer",))
