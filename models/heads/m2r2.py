"""M2R2: a second, faster stream through the target's first layers anticipates the target's own stream higher up.

Bhendawade, Najibi, Naik, Belousova: M2R2: Mixture of Multi-Rate Residuals for Efficient Transformer Inference (2025),
arXiv 2502.02040.

Rule: both streams begin with the embedding. After layer l

    h_{l+1} = h_l + S_l(h_l)                                   the target's own stream
    a_{l+1} = a_l + S_l(a_l; keys and values of h) + B_l SiLU(A_l a_l)

q(. | text) = softmax(W_o norm(a_E)). Drafted tokens read the target's keys and values and add those of their slow
stream. A router predicts from the last few a_l whether the fast stream predicts the target's token:
sigmoid(sum_l softmax(s)_l s_l + b), s_l = query . W_k (a_l / |a_l| sqrt(D)) / sqrt(dq). Drafting stops where that
probability is below 1/2. `specjax.adaptive.train_m2r2` trains a head.
Guarantee: distribution (verified with the q that was sampled).
Deviations: the equations are our interpretation of the paper's outline. Loading experts ahead of time (MoE) is left
out. The target pass runs all layers on the drafted tokens, as in `early_exit`. A pass of the first layers processes
each token twice. That is free where the layers are bound by memory, and up to twice as slow elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind, drafted_mask, get_target, include_root, root_node
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind
from specjax.models.llama import LlamaConfig
from specjax.models.requirements import check_partial_passes
from specjax.models.variants.m2r2_streams import AccelerationWeights, TwoStreamLayers
from specjax.types import Array, Context, DraftOutput, PyTree, Sublayers

METHOD = Method(
    name="m2r2",
    summary="drafts with a faster residual stream through the target's first layers until a router is not confident",
    paper="Bhendawade et al. 2025, arXiv 2502.02040",
    options=shared.head_options(length=6, stop="own:0.5"),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class M2R2Config:
    """Shapes of a fast stream. No checkpoints are published."""

    width: int
    exit_layer: int  # E, number of the target's layers that draft
    rank: int  # r, rank of the accelerators
    rate: float = 2.0  # R: a_l is trained to be h of layer R l
    recent: int = 4  # number of last layers that the router reads
    router_width: int = 16  # dq
    dtype: str = "float32"

    confidence = "router"
    """The name of the trained confidence (`specjax.training.objectives.head_objective`)."""

    @property
    def router_layers(self) -> tuple[int, ...]:
        """Return the layers that the router reads, counted from 1."""
        return tuple(range(max(1, self.exit_layer - self.recent + 1), self.exit_layer + 1))


class M2R2(nnx.Module):
    """The accelerators and the router. New accelerators add zero, and a new router predicts 1/2."""

    def __init__(self, config: M2R2Config, *, rngs: nnx.Rngs):
        c = config
        normal = lambda *shape: jax.random.normal(rngs.params(), shape, c.dtype) * c.width**-0.5
        self.config = config
        self.down = nnx.Param(normal(c.exit_layer, c.rank, c.width))
        self.up = nnx.Param(jnp.zeros((c.exit_layer, c.width, c.rank), c.dtype))
        self.key = nnx.Param(normal(c.router_width, c.width))
        self.query = nnx.Param(jnp.zeros((c.router_width,), c.dtype))
        self.bias = nnx.Param(jnp.zeros((1,), c.dtype))

    def two_streams(self) -> TwoStreamLayers:
        """Return the loop over layers with both streams."""
        return TwoStreamLayers(AccelerationWeights(self.down[...], self.up[...]))

    def confidence(self, streams: tuple[Array, ...]) -> Array:
        """Return the router's probability float32[B, T] from the fast `streams` [B, T, D] after `router_layers`."""
        x = jax.lax.stop_gradient(jnp.stack(streams, 2).astype(jnp.float32))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        score = (x @ self.key[...].T) @ self.query[...] * self.config.router_width**-0.5
        return jax.nn.sigmoid(jnp.sum(jax.nn.softmax(score, -1) * score, -1) + self.bias[...])


class M2R2Scratch(NamedTuple):
    """The drafted nodes of one step."""

    streams: PyTree  # pending entries of the target's first layers, by place; the root has place 0


@functools.cache
def m2r2_head(config: M2R2Config) -> Head:
    """Return the functions of a fast stream. It has no memory: the keys and values are the target's own.

    `init_memory` raises a UsageError for a target that is not of `specjax.models`, or has another width or too few
    layers.
    """
    module_of = bind(M2R2, config)

    def init_memory(params, context: Context, batch: int, capacity: int) -> tuple[()]:
        check_target(config, get_target(context).model)
        return ()

    def read(params, memory: tuple[()], pairs: FeaturePairs, context: Context) -> tuple[()]:
        return memory

    def start(params, memory: tuple[()], context: Context, places: int) -> tuple[M2R2Scratch, DraftOutput]:
        root = root_node(context, places)
        output, pending = run_layers(params, context, root, jnp.ones((*root.tokens.shape, 1), bool))
        return M2R2Scratch(get_target(context).model.widen(pending, places)), jax.tree.map(lambda x: x[:, 0], output)

    def follow(
        params, scratch: M2R2Scratch, drafted: DraftedNodes, context: Context
    ) -> tuple[M2R2Scratch, DraftOutput]:
        drafted = include_root(drafted)
        output, new = run_layers(params, context, drafted, drafted_mask(drafted), earlier=scratch.streams)
        return M2R2Scratch(get_target(context).model.insert(scratch.streams, new, drafted.place)), output

    def run_layers(
        params, context: Context, drafted: DraftedNodes, mask: Array, **earlier
    ) -> tuple[DraftOutput, PyTree]:
        target, module = get_target(context), module_of(params)
        runs = jnp.ones((len(context.length), target.model.capabilities.num_layers), bool)
        output, pending = target.model.forward(
            target.params, drafted.tokens, context.cache, positions=context.length[:, None] - 1 + drafted.depth,
            mask=mask, layers=Sublayers(runs, runs), taps=config.router_layers, run=module.two_streams(), **earlier,
        )  # fmt: skip
        return DraftOutput(output.logits, module.confidence(output.taps)), pending

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="m2r2",
        config=config,
        target_layers=lambda num_layers: ((0, config.exit_layer),),
    )


def check_target(config: M2R2Config, model) -> None:
    """Raise a UsageError for a model that cannot run a head of this config."""
    check_layers(model)
    able = model.capabilities
    if model.config.width != config.width or not 1 <= config.exit_layer <= able.num_layers:
        raise UsageError(
            f"the head is a stream of width {config.width} through the first {config.exit_layer} layers of its target, "
            f"but the model {model.name} has {able.num_layers} of width {model.config.width}; use the target that "
            "it was trained for"
        )


def check_layers(model) -> None:
    """Raise a UsageError for a model that cannot run two streams through its layers."""
    check_partial_passes(model, "m2r2")
    if model.config is None:
        raise UsageError(f"{model.name} has no layers for a second stream; use a model of specjax.models")


def of_target(target: LlamaConfig, *, exit_layer: int | None = None, rank: int | None = None, **changes) -> M2R2Config:
    """Return the shapes for a target: a quarter of its layers, and a rank of 1/32 of its width."""
    exit_layer = max(1, target.num_layers // 4) if exit_layer is None else exit_layer
    rank = max(1, target.width // 32) if rank is None else rank
    return M2R2Config(target.width, exit_layer, rank, **{"dtype": target.dtype} | changes)


KIND = HeadKind(METHOD, M2R2, m2r2_head, of_target, ("exit_layer", "rank", "recent"))
