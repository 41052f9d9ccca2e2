"""Experts on a mesh: each device runs its part of the experts of each row, and one sum follows.

The mesh axis "expert" gives each device some of the experts, and the other axes split the width of each expert. A
device loops over those of its experts that its rows chose. Left to the compiler, the loop would have a sum over devices
in each turn, and would gather experts that are split.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.models.experts.routing import ExpertChoice
from specjax.models.experts.running import Expert, run_experts
from specjax.models.layout import PARAMETER_DIMENSIONS, Layout
from specjax.models.storage.stacks import LayerOfStack, flat_experts
from specjax.numerics.quantized_array import is_quantized
from specjax.types import Array, PyTree

NAMES = ("expert_gate", "weight"), ("expert_gate", "bias"), ("expert_up", "weight"), ("expert_up", "bias"), \
    ("expert_down", "weight"), ("expert_down", "bias")  # fmt: skip


def run_on_mesh(
    layout: Layout, x: Array, choice: ExpertChoice, matrices: PyTree, num_experts: int, expert: Expert
) -> Array:
    """Compute `run_experts` for rows that are split over "data".

    matrices: (weight, bias) of the projections gate, up and down, as the modules have them.
    """
    split = split_experts(layout, matrices)
    if split is None:
        arrays, first, of_layer = flat_experts(matrices)
        return run_experts(x, choice, arrays, num_experts, expert, first=first, of_layer=of_layer)
    specs, expert_axes, width_axes = split
    size = num_experts // _count(layout, expert_axes)

    def run(x: Array, choice: ExpertChoice, matrices: PyTree) -> Array:
        weights = arrays_of_device(matrices, width_axes)
        local = choice_of_device(choice, index_along(expert_axes), size)
        y = run_experts(x, local, num_experts=size, expert=expert, is_part=bool(expert_axes), **weights._asdict())
        axes = (*expert_axes, *width_axes)
        return jax.lax.psum(y, axes) if axes else y

    rows = lambda x: layout.sharding(x.shape, "data", *[None] * (x.ndim - 1)).spec
    inputs = rows(x), jax.tree.map(rows, choice), specs
    return jax.shard_map(run, mesh=layout.mesh, in_specs=inputs, out_specs=rows(x), check_vma=False)(
        x, choice, matrices
    )


class ExpertSplit(NamedTuple):
    """The parts of experts that each device of a mesh has."""

    specs: PyTree  # of the matrices
    expert_axes: tuple[str, ...]  # mesh axes that split the experts
    width_axes: tuple[str, ...]  # those that split the width of each expert; a result is the sum over them


def split_experts(layout: Layout, matrices: PyTree) -> ExpertSplit | None:
    """Return the parts of each device; None if a device cannot multiply by its part alone."""
    specs = _specs(layout, matrices)
    *_, expert_axes, _, width_axes = _of_weights(specs[2][0])
    return ExpertSplit(specs, expert_axes, width_axes) if _fits(matrices, specs, bool(width_axes)) else None


def index_along(axes: tuple[str, ...]) -> Array:
    """Return the place of this device along mesh axes."""
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def choice_of_device(choice: ExpertChoice, device: Array | int, size: int) -> ExpertChoice:
    """Return the choices of the experts of one device, which has `size` of them. Others have the expert `size`.

    That expert does not exist, so `run_experts` drops its pairs.
    """
    numbers = choice.experts - device * size
    is_local = (numbers >= 0) & (numbers < size)
    return ExpertChoice(jnp.where(is_local, numbers, size), jnp.where(is_local, choice.weights, 0.0))


class DeviceExperts(NamedTuple):
    """Arguments of `run_experts` with the weights of one device."""

    weights: PyTree
    first: Array | int
    of_layer: PyTree


def arrays_of_device(matrices: PyTree, width_axes: tuple[str, ...]) -> DeviceExperts:
    """Return the arrays of this device for `run_experts`."""
    arrays, first, of_layer = flat_experts(matrices)

    def on_device(arrays: PyTree) -> PyTree:
        gate, up, (weight, bias) = arrays
        if bias is not None and width_axes:  # the sum over parts of the width has it once
            bias = jnp.where(index_along(width_axes) == 0, bias, 0)
        return _on_one_device((gate, up, (weight, bias)))

    return DeviceExperts(on_device(arrays), first, None if of_layer is None else on_device(of_layer))


def _specs(layout: Layout, matrices: PyTree) -> PyTree:
    """Return the parts of the mesh that have each array, in the form of the matrices."""

    def of_array(name: tuple[str, str], array: Any) -> Any:
        of_leaf = lambda leaf: layout.sharding(leaf.shape, *PARAMETER_DIMENSIONS[name]).spec
        if isinstance(array, LayerOfStack):
            everywhere: Any = PartitionSpec()
            return LayerOfStack(jax.tree.map(of_leaf, array.arrays), everywhere, jax.tree.map(of_leaf, array.part))
        return None if array is None else jax.tree.map(of_leaf, array)

    names = iter(NAMES)
    return tuple(tuple(of_array(next(names), array) for array in pair) for pair in matrices)


def _of_weights(array: Any) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each dimension of a weight array, by its specs."""
    array = array.arrays if isinstance(array, LayerOfStack) else array
    spec = array.values if is_quantized(array) else array
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)


def _fits(matrices: PyTree, specs: PyTree, splits_width: bool) -> bool:
    """Return True if each device can multiply by its part alone. Activations may be rounded by all their numbers."""
    (weight, _), (spec, _) = matrices[2], specs[2]
    weight, spec = (x.arrays if isinstance(x, LayerOfStack) else x for x in (weight, spec))
    if not is_quantized(weight) or not splits_width:
        return True
    has_groups = weight.scales.shape[-1] > 1
    return weight.inputs is None and (not has_groups or spec.scales[-1] == spec.values[-1])


def _count(layout: Layout, axes: tuple[str, ...]) -> int:
    """Return the number of parts along mesh axes."""
    return layout.parts("experts") if axes else 1


def _on_one_device(arrays: PyTree) -> PyTree:
    """Return arrays whose quantised matrices carry no sharding, because a device has them alone."""
    drop = lambda leaf: dataclasses.replace(leaf, sharding=None) if is_quantized(leaf) else leaf
    return jax.tree.map(drop, arrays, is_leaf=is_quantized)
