"""M2R2: a second, faster stream through the target's first layers, which is there what the target's own is above.

Bhendawade, Najibi, Naik, Belousova: M2R2: Mixture of Multi-Rate Residuals for Efficient Transformer Inference (2025),
arXiv 2502.02040. The equations are our own, of its outline. Both streams begin with the embedding; behind layer l

    h_{l+1} = h_l + S_l(h_l)                                   the target's own
    a_{l+1} = a_l + S_l(a_l; keys and values of h) + B_l SiLU(A_l a_l)

logits = head(norm(a_E)). A router says how likely the fast stream names the target's token, by the last few a_l of it:
sigmoid(sum_l softmax(s)_l s_l + b), s_l = query . W_k (a_l / |a_l| sqrt(D)) / sqrt(dq).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.errors import UsageError
from specjax.models.heads.blocks import among_drafted, bind, root_of, target_of, with_root
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.models.variants.m2r2_streams import AccelerationWeights, TwoStreamLayers
from specjax.types import Array, Context, DraftOutput, PyTree, Sublayers


@dataclass(frozen=True)
class M2R2Config:
    """Shapes of a fast stream. No checkpoints are published."""

    width: int
    exit_layer: int  # E, how many layers of the target draft
    rank: int  # r of the accelerators
    rate: float = 2.0  # R: a_l is trained to be h of layer R l
    recent: int = 4  # of how many last layers the router reads a
    router_width: int = 16  # dq
    dtype: str = "float32"

    confidence = "router"
    """Heads that say how sure they are have one (`specjax.training.objectives.head_objective`)."""

    @property
    def watched(self) -> tuple[int, ...]:
        """The layers, from 1, that the router reads."""
        return tuple(range(max(1, self.exit_layer - self.recent + 1), self.exit_layer + 1))


class M2R2(nnx.Module):
    """Accelerators and router. New ones add nothing, and are sure of half."""

    def __init__(self, config: M2R2Config, *, rngs: nnx.Rngs):
        c = config
        normal = lambda *shape: jax.random.normal(rngs.params(), shape, c.dtype) * c.width**-0.5
        self.config = config
        self.down = nnx.Param(normal(c.exit_layer, c.rank, c.width))
        self.up = nnx.Param(jnp.zeros((c.exit_layer, c.width, c.rank), c.dtype))
        self.key = nnx.Param(normal(c.router_width, c.width))
        self.query = nnx.Param(jnp.zeros((c.router_width,), c.dtype))
        self.bias = nnx.Param(jnp.zeros((1,), c.dtype))

    def accelerated(self) -> TwoStreamLayers:
        """The loop over layers."""
        return TwoStreamLayers(AccelerationWeights(self.down[...], self.up[...]))

    def sure(self, streams: tuple[Array, ...]) -> Array:
        """float32[B, T]: the router's chance that the fast stream is right, by `streams` [B, T, D] behind `watched`."""
        x = jax.lax.stop_gradient(jnp.stack(streams, 2).astype(jnp.float32))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        score = (x @ self.key[...].T) @ self.query[...] * self.config.router_width**-0.5
        return jax.nn.sigmoid(jnp.sum(jax.nn.softmax(score, -1) * score, -1) + self.bias[...])


class M2R2Scratch(NamedTuple):
    streams: PyTree  # what is pending of the target's first layers, by place, the root's at 0


@functools.cache
def m2r2_head(config: M2R2Config) -> Head:
    """The functions of a fast stream. Memory: none, the keys and values are the target's own.

    Raises (`init_memory`): UsageError for a target that is not of `specjax.models`, or has another width or fewer layers.
    """
    module_of = bind(M2R2, config)

    def init_memory(params, context: Context, batch: int, capacity: int) -> tuple[()]:
        check_target(config, target_of(context).model)
        return ()

    def read(params, memory: tuple[()], pairs: FeaturePairs, context: Context) -> tuple[()]:
        return memory

    def start(params, memory: tuple[()], context: Context, places: int) -> tuple[M2R2Scratch, DraftOutput]:
        root = root_of(context, places)
        said, pending = through(params, context, root, jnp.ones((*root.tokens.shape, 1), bool))
        return M2R2Scratch(target_of(context).model.widen(pending, places)), jax.tree.map(lambda x: x[:, 0], said)

    def follow(params, scratch: M2R2Scratch, drafted: DraftedNodes, context: Context) -> tuple[M2R2Scratch, DraftOutput]:
        drafted = with_root(drafted)
        said, new = through(params, context, drafted, among_drafted(drafted), earlier=scratch.streams)
        return M2R2Scratch(target_of(context).model.insert(scratch.streams, new, drafted.place)), said

    def through(params, context: Context, drafted: DraftedNodes, mask: Array, **earlier) -> tuple[DraftOutput, PyTree]:
        target, module = target_of(context), module_of(params)
        runs = jnp.ones((len(context.length), target.model.capabilities.num_layers), bool)
        output, pending = target.model.forward(
            target.params, drafted.tokens, context.cache, positions=context.length[:, None] - 1 + drafted.depth,
            mask=mask, layers=Sublayers(runs, runs), taps=config.watched, run=module.accelerated(), **earlier,
        )  # fmt: skip
        return DraftOutput(output.logits, module.sure(output.taps)), pending

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
    """Raises: UsageError for a model that two streams cannot run through."""
    check_layers(model)
    able = model.capabilities
    if model.config.width != config.width or not 1 <= config.exit_layer <= able.num_layers:
        raise UsageError(
            f"the head is a stream of width {config.width} through the first {config.exit_layer} layers of its target, "
            f"but the model {model.name} has {able.num_layers} of width {model.config.width}; give it the target that "
            "it was trained for"
        )


def check_layers(model) -> None:
    """Raises: UsageError for a model without layers that two streams can run through."""
    if model.config is None or not model.capabilities.layer_skipping:
        raise UsageError(f"{model.name} has no layers for a second stream; give a model of specjax.models")


def of_target(target: LlamaConfig, *, exit_layer: int | None = None, rank: int | None = None, **changes) -> M2R2Config:
    """A stream for a target: through a quarter of its layers, by accelerators of a rank of a thirty-second of its
    width."""
    exit_layer = max(1, target.num_layers // 4) if exit_layer is None else exit_layer
    rank = max(1, target.width // 32) if rank is None else rank
    return M2R2Config(target.width, exit_layer, rank, **{"dtype": target.dtype} | changes)
