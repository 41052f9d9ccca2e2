"""Token shuffling: each device runs the rows that a table sends to it, and exchanges the few that need other devices.

Speculative MoE, arXiv 2503.04398. A table predicts which device of the mesh axis "expert" has the experts of a row, by
the token id. The ids of drafts are input of the pass, so the prediction covers all nodes.

A device takes its part of the rows and routes these only. Pairs of its rows and its own experts stay. For experts of
another device, it sends the row to that device once, in buffers of a fixed capacity (`all_to_all`). If any buffer of
the mesh is too small, all devices use buffers for all rows instead (`lax.cond`). One `all_gather` then gives each
device the results of all rows.

Guarantee: exact. Tables and capacity only choose where a row is computed. The result of a row is the sum over devices
in ascending order, and within a device over its experts in ascending order, in float32. That order does not depend on
where the row is. `on_mesh` leaves the order over devices to the collective, so results agree up to rounding in float32.
Deviations: rows are replicated before the block, so that each device slices its rows. The paper fuses the permutation
into the reduce-scatter after attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from specjax.models.experts.on_mesh import arrays_of_device, choice_of_device, split_experts
from specjax.models.experts.routing import ExpertChoice
from specjax.models.experts.running import Expert, run_experts
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.layout import Layout
from specjax.types import Array, PyTree

AXIS = "expert"


class DevicePrediction(NamedTuple):
    """The device that probably has most experts of each row."""

    device: Array  # int32[R]
    confidence: Array  # float[R], 0 to 1


class RowHistory(NamedTuple):
    """Inputs of the tables that predict the device of each row of a pass."""

    tokens: Array  # int32[B, T]
    devices: (
        Array  # int32[2, B, T], with most experts of the row in the mixture before the last one, and the last; or -1
    )

    @classmethod
    def start(cls, tokens: Array | np.ndarray) -> RowHistory:
        """Return the history of tokens int32[B, T] before the first layer."""
        return cls(jnp.asarray(tokens), jnp.full((2, *tokens.shape), -1, jnp.int32))

    def after(self, device: Array) -> RowHistory:
        """Return the history after a layer where most experts of each row are on `device` int32[B, T]."""
        return self._replace(devices=jnp.stack([self.devices[1], device]))


class Slots(NamedTuple):
    """The place of each row. Each of G devices has S = ceil(R / G) slots."""

    rows: Array  # int32[G S], the row of each slot; R: the slot is empty
    of_rows: Array  # int32[R], the slot of each row


def surer(first: DevicePrediction, second: DevicePrediction) -> DevicePrediction:
    """Return the prediction with the higher confidence for each row, and the first one if both have the same."""
    is_second = second.confidence > first.confidence
    return DevicePrediction(*(jnp.where(is_second, b, a) for a, b in zip(first, second, strict=True)))


def place_rows(prediction: DevicePrediction, devices: int) -> Slots:
    """Place each row on its predicted device. If a device has no slot left, its least certain rows go elsewhere."""
    device, confidence = prediction.device.astype(jnp.int32), prediction.confidence.astype(jnp.float32)
    count = len(device)
    size = -(-count // devices)
    order = jnp.argsort(-confidence, stable=True)
    is_on = device[order, None] == jnp.arange(devices)
    rank = jnp.take_along_axis(jnp.cumsum(is_on, 0), device[order, None], 1)[:, 0] - 1
    fits = rank < size
    slot = jnp.where(fits, device[order] * size + rank, devices * size)
    is_empty = jnp.ones(devices * size, bool).at[slot].set(False, mode="drop")
    empty = jnp.argsort(~is_empty, stable=True)
    slot = jnp.where(fits, slot, empty[jnp.maximum(jnp.cumsum(~fits) - 1, 0)])
    rows = jnp.full(devices * size, count, jnp.int32).at[slot].set(order.astype(jnp.int32))
    return Slots(rows, jnp.zeros(count, jnp.int32).at[order].set(slot.astype(jnp.int32)))


def exchange_capacity(slots: int, devices: int, remote: float) -> int:
    """Return the number of rows that a device can send to each other one: the mean and two standard deviations.

    Args:
      slots: rows of a device.
      devices: G, more than 1.
      remote: mean number of other devices that have an expert of a row, see `TokenShuffling`.
    """
    mean = slots * remote / (devices - 1)
    return min(slots, max(1, math.ceil(mean + 2 * math.sqrt(mean))))


def can_shuffle(layout: Layout, matrices: PyTree, sizes: MixtureSizes) -> bool:
    """Return True if the mesh splits the experts over as many devices as the tables are for."""
    split = split_experts(layout, matrices)
    parts = layout.mesh.shape.get(AXIS, 1)
    is_split = split is not None and split.expert_axes == (AXIS,)
    return is_split and sizes.shuffling is not None and sizes.shuffling.devices == parts


def run_shuffled(
    layout: Layout, x: Array, prediction: DevicePrediction, router: tuple[Callable, PyTree], matrices: PyTree,
    sizes: MixtureSizes, expert: Expert,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the weighted sums [R, D] of the outputs of each row's experts, and the device int32[R] with most of them.

    The sums have the dtype of x.

    Args:
      x: [R, D], which "data" may split.
      prediction: the device of each row.
      router: a function from arrays and rows to an `ExpertChoice`, and the arrays.
      matrices: those of `run_on_mesh`, for which `can_shuffle` is true.
    """
    shuffling, split = sizes.shuffling, split_experts(layout, matrices)
    assert shuffling is not None and split is not None
    devices, size = shuffling.devices, sizes.num_experts // shuffling.devices
    route, router_arrays = router

    def run(
        x: Array, prediction: DevicePrediction, router_arrays: PyTree, matrices: PyTree
    ) -> tuple[Array, Array]:  # fmt: skip
        weights = arrays_of_device(matrices, split.width_axes)._asdict()
        slots = place_rows(prediction, devices)
        per_device = len(slots.rows) // devices
        device = jax.lax.axis_index(AXIS)
        rows = jax.lax.dynamic_slice_in_dim(slots.rows, device * per_device, per_device)
        local = x[jnp.minimum(rows, len(x) - 1)]
        choice = route(router_arrays, local)
        choice = ExpertChoice(jnp.where(rows[:, None] < len(x), choice.experts, sizes.num_experts), choice.weights)
        compute = lambda x, choice: run_experts(
            x, choice, num_experts=size, expert=expert, is_part=True, **weights
        )  # fmt: skip
        capacity = exchange_capacity(per_device, devices, shuffling.remote)
        counts = jnp.sum(choice.experts[..., None] // size == jnp.arange(devices), 1)  # int32[S, G], experts of a row
        is_needed = (counts > 0) & (jnp.arange(devices) != device)
        exchange = lambda capacity: _exchange(local, choice, is_needed, capacity, size, compute)
        overflows = jnp.max(jnp.sum(is_needed, 0)) > capacity
        # Devices of all data parts take the same branch, because its collectives wait for each other.
        overflows = jax.lax.pmax(overflows.astype(jnp.int32), (AXIS, *layout.axes("data")))
        y = (
            exchange(per_device)
            if capacity == per_device
            else jax.lax.cond(overflows > 0, lambda: exchange(per_device), lambda: exchange(capacity))
        )
        y = jax.lax.psum(y, split.width_axes) if split.width_axes else y
        of_all = jax.lax.all_gather((y.astype(x.dtype), jnp.argmax(counts, -1)), AXIS, tiled=True)
        return jax.tree.map(lambda leaf: leaf[slots.of_rows], of_all)

    rows = lambda x: layout.sharding(x.shape, "data", *[None] * (x.ndim - 1)).spec
    everywhere = jax.tree.map(lambda _: PartitionSpec(), router_arrays)
    outputs = rows(x), rows(prediction.device)
    inputs = rows(x), jax.tree.map(rows, prediction), everywhere, split.specs
    return jax.shard_map(run, mesh=layout.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)(
        x, prediction, router_arrays, matrices
    )


def _exchange(
    x: Array, choice: ExpertChoice, is_needed: Array, capacity: int, size: int,
    compute: Callable[[Array, ExpertChoice], Array],
) -> Array:  # fmt: skip
    """Return float32[S, D], the sums of all experts of this device's rows, with buffers for `capacity` rows per pair.

    Rows from other devices and own ones go through the experts together, so that each expert is read once.

    Args:
      x: [S, D], the rows of this device.
      is_needed: bool[S, G], the other devices that have experts of a row.
      compute: from rows and their choice of the experts of this device to float32[rows, D].
    """
    count, devices = is_needed.shape
    device = jax.lax.axis_index(AXIS)
    rank = jnp.cumsum(is_needed, 0) - 1  # int32[S, G], place of a row in the buffer for a device
    place = jnp.where(is_needed & (rank < capacity), jnp.arange(devices) * capacity + rank, devices * capacity)
    source = jnp.full(devices * capacity, count).at[place].set(jnp.arange(count)[:, None], mode="drop")
    choices = jax.vmap(lambda other: choice_of_device(choice, other, size))(jnp.arange(devices))  # [G, S, k]
    # An empty place of a buffer has experts that do not exist. Numbers of experts are exact in float32.
    numbers = jnp.pad(choices.experts, ((0, 0), (0, 1), (0, 0)), constant_values=size).astype(jnp.float32)
    weights = jnp.pad(choices.weights, ((0, 0), (0, 1), (0, 0)))
    by_place = source.reshape(devices, capacity)
    of_device = jnp.arange(devices)[:, None]
    routes = jnp.concatenate([numbers[of_device, by_place], weights[of_device, by_place]], -1)
    swap = lambda x: jax.lax.all_to_all(x, AXIS, 0, 0)
    rows = swap(x[jnp.minimum(by_place, count - 1)])  # [G, C, D], from each device
    experts, shares = jnp.split(swap(routes), 2, -1)
    local = choice_of_device(choice, device, size)
    join = lambda first, second: jnp.concatenate([first, second.reshape(-1, second.shape[-1])])
    joined = ExpertChoice(join(local.experts, experts.astype(jnp.int32)), join(local.weights, shares))
    y = compute(join(x, rows), joined)
    back = swap(y[count:].reshape(devices, capacity, -1)).reshape(devices * capacity, -1)
    back = jnp.concatenate([back, jnp.zeros((1, back.shape[-1]))])
    total = jnp.zeros((count, back.shape[-1]), jnp.float32)
    for other in range(devices):
        total = total + jnp.where(other == device, y[:count], back[place[:, other]])
    return total
