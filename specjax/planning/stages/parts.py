"""Bytes and parameters of the attention part and the feed-forward part of a model, from the shapes of its arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.experts.sizes import MixtureSizes
from specjax.models.storage import is_of_experts, num_bytes
from specjax.numerics.quantized_array import QuantizedArray
from specjax.planning.abstract import cache_shapes, unsharded
from specjax.planning.traffic import bytes_per_token, fixed_bytes, mean_context
from specjax.types import PyTree

FEED = "mlp"
"""Module of a layer's feed-forward part. Its norms have names that begin with it."""


class PartSize(NamedTuple):
    """Size of a part of a model's parameters."""

    bytes: int = 0
    params: int = 0

    def plus(self, leaf: PyTree) -> PartSize:
        """Return the size with one more array or quantised matrix."""
        return PartSize(self.bytes + num_bytes(leaf), self.params + math.prod(leaf.shape))


class StageParts(NamedTuple):
    """The bytes and products of a pass over a model in each part, summed over all layers."""

    num_layers: int
    width: int
    item: int  # bytes of a number of the stream
    is_float32: bool
    attention: PartSize  # of all mixers: attention, and recurrent layers of hybrid models
    feed: PartSize  # of MLPs, routers and shared experts: a pass reads all of them
    experts: PartSize  # of all experts together
    outer: int  # bytes of the embedding and the output head
    sizes: MixtureSizes | None  # None: the model has no experts
    context: float  # cached tokens that a layer with keys reads, averaged over these layers
    token_bytes: float  # of the cache of one row, per token
    state_bytes: int  # of the recurrent states of one row
    score_flops: float  # of scores and sums of values, per node and cached token

    def touched(self, nodes: float) -> float:
        """Return the expected share of the experts that a pass over `nodes` nodes reads."""
        return 0.0 if self.sizes is None else self.sizes.expected_experts(nodes) / self.sizes.num_experts

    @property
    def chosen(self) -> float:
        """Return the share of the experts that multiply one node."""
        return 0.0 if self.sizes is None else self.sizes.routing.num_chosen / self.sizes.num_experts


def parts_of(config: Any, context: int) -> StageParts:
    """Return the parts of a model with `context` cached tokens per row. No array is allocated."""
    target = unsharded(config)
    is_matrix = lambda leaf: isinstance(leaf, QuantizedArray)
    outer = {name: part for name, part in target.params.items() if name != "layers"}
    attention, feed, experts = PartSize(), PartSize(), PartSize()
    for path, leaf in jax.tree_util.tree_flatten_with_path(target.params["layers"], is_leaf=is_matrix)[0]:
        names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        if is_of_experts(tuple(map(str, names))):
            experts = experts.plus(leaf)
        elif any(str(name).startswith(FEED) for name in names):
            feed = feed.plus(leaf)
        else:
            attention = attention.plus(leaf)
    cache = cache_shapes(target, 1, 1024)
    return StageParts(
        num_layers=config.num_layers,
        width=config.width,
        item=jnp.dtype(config.dtype).itemsize,
        is_float32=config.dtype == "float32",
        attention=attention,
        feed=feed,
        experts=experts,
        outer=num_bytes(outer),
        sizes=config.experts,
        context=mean_context(config, context),
        token_bytes=bytes_per_token(target, 1, cache),
        state_bytes=fixed_bytes(target, 1, cache),
        score_flops=_score_flops(config),
    )


def _score_flops(config: Any) -> float:
    """Return the FLOPs of all layers per node and cached token: two products with each number of each head."""
    kinds = getattr(config, "kinds", ())
    layers = [config.of_layer(i) for i, kind in enumerate(kinds) if kind.attends] if kinds else [config]
    flops = sum(4.0 * layer.num_heads * layer.head_dim for layer in layers)
    return flops if kinds else flops * config.num_layers
