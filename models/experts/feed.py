"""A feed-forward block with a mixture of experts, for attention decoders and hybrid ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.experts.counting import PassHistory
from specjax.models.experts.on_mesh import run_on_mesh
from specjax.models.experts.routing import ExpertChoice, choose
from specjax.models.experts.running import run_experts
from specjax.models.experts.shuffling import DevicePrediction, RowHistory, can_shuffle, run_shuffled, surer
from specjax.models.experts.sizes import MixtureSizes, TokenShuffling
from specjax.models.layers import GatedMLP, Linear
from specjax.models.layout import Layout
from specjax.models.products import matmul
from specjax.models.storage.stacks import LayerOfStack, WholeParam, flat_experts
from specjax.numerics.quantized_array import is_quantized
from specjax.types import Array

STEEPNESS = 1.702  # of the sigmoid in the activation of gpt-oss


class ExpertMatrices(nnx.Module):
    """A matrix, and possibly a bias, of each expert: weight [E, O, I] and bias [E, O]."""

    def __init__(self, count: int, fan_in: int, fan_out: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        shape = count, fan_out, fan_in
        self.weight = WholeParam(jax.random.normal(rngs.params(), shape, dtype) * fan_in**-0.5)
        self.bias = WholeParam(jnp.zeros(shape[:2], dtype)) if bias else None

    def arrays(self) -> tuple[Any, Any]:
        """Return the weights and the biases, or None for missing ones. Stacked layers have a `LayerOfStack` each."""
        return _with_matrix_sharding(self.weight[...]), None if self.bias is None else self.bias[...]


def _with_matrix_sharding(weights: Any) -> Any:
    """Return weights [E, O, I] whose sharding, if they have one, is that of the matrix of one expert."""
    if isinstance(weights, LayerOfStack):
        arrays, part = (_with_matrix_sharding(leaf) for leaf in (weights.arrays, weights.part))
        return dataclasses.replace(weights, arrays=arrays, part=part)
    if not is_quantized(weights) or weights.sharding is None:
        return weights
    mesh, spec = weights.sharding.mesh, weights.sharding.spec
    return dataclasses.replace(weights, sharding=NamedSharding(mesh, PartitionSpec(*spec[-2:])))


class ExpertRouter(nnx.Module):
    """The projection of rows to router logits, in float32 whatever the dtype of the model."""

    def __init__(self, width: int, sizes: MixtureSizes, *, dtype, rngs: nnx.Rngs):
        count = sizes.num_experts
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (count, width), dtype) * width**-0.5)
        self.bias = nnx.Param(jnp.zeros((count,), dtype)) if sizes.router_bias else None
        self.correction = nnx.Param(jnp.zeros((count,), jnp.float32)) if sizes.correction else None
        is_permuted = sizes.shuffling is not None and sizes.routing.num_groups > 1
        self.order = nnx.Param(jnp.arange(count, dtype=jnp.int32)) if is_permuted else None
        self.routing = sizes.routing

    def __call__(self, x: Array) -> ExpertChoice:
        """Return the experts of rows [R, D]."""
        return self.route(self.arrays(), x)

    def arrays(self) -> tuple[Array | None, ...]:
        """Return the weight, the bias, the correction and the order of the experts, or None for missing ones."""
        parts = self.weight, self.bias, self.correction, self.order
        return tuple(None if part is None else part[...] for part in parts)

    def route(self, arrays: tuple, x: Array) -> ExpertChoice:
        """Return the experts of rows [R, D] with `arrays` in place of the parameters."""
        weight, bias, correction, order = arrays
        logits = jnp.dot(x.astype(jnp.float32), weight.astype(jnp.float32).T, precision="highest")
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        return choose(logits, self.routing, correction, order)


class DeviceTables(nnx.Module):
    """The predicted device of a row by its token id, and by its devices in the last two layers."""

    def __init__(self, shuffling: TokenShuffling):
        by_token, by_devices = (shuffling.vocab_size,), (shuffling.devices,) * 2
        self.token_device = nnx.Param(jnp.zeros(by_token, jnp.int8))
        self.token_confidence = nnx.Param(jnp.zeros(by_token, jnp.float16))
        self.device = nnx.Param(jnp.zeros(by_devices, jnp.int8))
        self.confidence = nnx.Param(jnp.zeros(by_devices, jnp.float16))

    def __call__(self, history: RowHistory) -> DevicePrediction:
        """Return the predictions [B, T] of the surer table for each row."""
        tokens, devices = history.tokens, tuple(jnp.maximum(history.devices, 0))
        has_history = jnp.all(history.devices >= 0, 0)
        return surer(
            DevicePrediction(self.token_device[...][tokens], self.token_confidence[...][tokens]),
            DevicePrediction(self.device[...][devices], jnp.where(has_history, self.confidence[...][devices], 0)),
        )


class MixtureFeed(nnx.Module):
    """A mixture of gated MLPs, and possibly a shared one that reads every row.

    The parameters of all experts are arrays with a leading axis of experts, from which a pass slices one expert at a
    time.
    """

    def __init__(
        self, width: int, sizes: MixtureSizes, act: Callable[[Array], Array], *, joined: bool = False, dtype,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """Create the router, the experts and the shared MLP. `joined` is that of `GatedMLP`."""
        experts = lambda fan_in, fan_out: ExpertMatrices(
            sizes.num_experts, fan_in, fan_out, bias=sizes.bias, dtype=dtype, rngs=rngs
        )
        self.router = ExpertRouter(width, sizes, dtype=dtype, rngs=rngs)
        self.expert_gate, self.expert_up = experts(width, sizes.width), experts(width, sizes.width)
        self.expert_down = experts(sizes.width, width)
        shared = sizes.shared_width
        self.shared = GatedMLP(width, shared, act, joined=joined, dtype=dtype, rngs=rngs) if shared else None
        self.shared_gate = Linear(width, 1, dtype=dtype, rngs=rngs) if shared and sizes.shared_gate else None
        self.tables = DeviceTables(sizes.shuffling) if sizes.shuffling else None
        self.sizes, self.act = sizes, act

    def __call__(self, x: Array, layout: Layout | None = None) -> Array:
        """Return the output of rows [B, T, D]. `layout` is that of a mesh."""
        return self.with_history(x, layout, None)[0]

    def with_history(
        self, x: Array, layout: Layout | None, history: PassHistory | None
    ) -> tuple[Array, PassHistory | None]:
        """Return the output of rows [B, T, D], and the history of the pass after this layer.

        history: with rows, tables predict the device of each row; otherwise rows stay on all devices.
        """
        rows = x.reshape(-1, x.shape[-1])
        matrices = tuple(part.arrays() for part in (self.expert_gate, self.expert_up, self.expert_down))
        count = self.sizes.num_experts
        places = None if history is None else history.rows
        if layout is None:
            choice = self.router(rows)
            arrays, first, of_layer = flat_experts(matrices)
            y = run_experts(rows, choice, arrays, count, self._expert, first=first, of_layer=of_layer)
        elif self.tables is not None and places is not None and can_shuffle(layout, matrices, self.sizes):
            choice = None  # made on each device for its rows
            router = self.router.route, self.router.arrays()
            prediction = DevicePrediction(*(part.reshape(-1) for part in self.tables(places)))
            y, device = run_shuffled(layout, rows, prediction, router, matrices, self.sizes, self._expert)
            history = PassHistory(places.after(device.reshape(x.shape[:2])))
        else:
            choice = self.router(rows)
            y = run_on_mesh(layout, rows, choice, matrices, count, self._expert)
        if history is not None and choice is not None:
            history = history.after(choice, count)
        return self._with_shared(y.astype(x.dtype).reshape(x.shape), x), history

    def _with_shared(self, y: Array, x: Array) -> Array:
        """Add the output of the shared MLP, if there is one, to that of the experts."""
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def _expert(self, matrices: tuple, x: Array) -> Array:
        """Return the output float32[R, D] of one expert."""
        gate, up = (_project(x, *part) for part in matrices[:2])
        limit = self.sizes.limit
        hidden = self.act(gate) * up if limit is None else clamped_product(gate, up, limit)
        weight, bias = matrices[2]
        return _project(hidden.astype(x.dtype), weight, bias, jnp.float32)


def clamped_product(gate: Array, up: Array, limit: float) -> Array:
    """Return (up + 1) * gate * sigmoid(1.702 * gate) of clamped inputs, the activation of gpt-oss."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(STEEPNESS * gate)


def _project(x: Array, weight: Any, bias: Array | None, dtype: Any = None) -> Array:
    y = matmul(x, weight, dtype)
    return y if bias is None else y + bias
