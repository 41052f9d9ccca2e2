"""Parameters of stacked layers: those that a scan slices, and those that stay whole.

A scan slices one layer out of each array. An inner loop that reads a few experts would then wait for a copy of all of
them. So parameters of experts stay whole, and the loop slices the expert of a layer. Gradients belong to the slice of
one layer, which no pass reads. The gradient of the scan then fills that slice, and adds nothing to other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from specjax.types import Array, PyTree


class WholeParam(nnx.Param):
    """A parameter that stays whole if layers are stacked. A layer then has a `LayerOfStack` in its place."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOfStack:
    """Arrays with a layer axis, and the number of one layer."""

    arrays: PyTree  # [layers, E, ...], without gradients
    layer: Array | int
    part: PyTree  # [E, ...], the arrays of that layer, for gradients alone: compilers remove the slice

    def __getitem__(self, index) -> LayerOfStack:
        """Return the object itself, because modules read their parameters as `weight[...]`."""
        return self

    def flat(self) -> tuple[PyTree, Array | int]:
        """Return the arrays [layers * E, ...], and the place of the layer's first entry."""
        size = jax.tree.leaves(self.arrays)[0].shape[1]
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self.arrays), self.layer * size


def flat_experts(tree: PyTree) -> tuple[PyTree, Array | int, PyTree | None]:
    """Return a tree with the experts of all layers in place of each `LayerOfStack`, and the place of the first one.

    The third value is the tree with the experts of the layer alone, for gradients. It is None for separate layers.
    """
    is_layer = lambda leaf: isinstance(leaf, LayerOfStack)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_layer)
    layers = [leaf.flat() for leaf in leaves if is_layer(leaf)]
    if not layers:
        return tree, 0, None
    assert len(layers) == len(leaves), "the arrays of all experts are parameters of one layer"
    of_layer = jax.tree.unflatten(structure, [leaf.part for leaf in leaves])
    return jax.tree.unflatten(structure, [arrays for arrays, _ in layers]), layers[0][1], of_layer


def whole_params(state: PyTree) -> PyTree:
    """Return the parameters of stacked layers that stay whole, without gradients.

    A scan slices them too, because the slice of a layer has the gradients of its parameters.
    """
    return jax.lax.stop_gradient(nnx.split_state(state, WholeParam, ...)[0])


def layer_state(state: PyTree, layer: Array | int) -> PyTree:
    """Return the state of one layer of stacked layers."""
    return jax.tree.map(lambda leaf: _at_layer(leaf, layer), state, is_leaf=_is_whole)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, WholeParam)


def _at_layer(leaf: Any, layer: Array | int) -> Any:
    if not _is_whole(leaf):
        return slice_layer(leaf, layer)
    part = jax.tree.map(lambda array: slice_layer(array, layer), leaf[...])
    return leaf.replace(LayerOfStack(jax.lax.stop_gradient(leaf[...]), layer, part))


def slice_layer(leaf: Array, layer: Array | int, axis: int = 0) -> Array:
    """Slice one layer out of an array whose axis `axis` counts layers."""
    if isinstance(layer, int):
        return jax.lax.index_in_dim(leaf, layer, axis, keepdims=False)
    return jax.lax.dynamic_index_in_dim(leaf, layer, axis, keepdims=False, allow_negative_indices=False)


def merge_whole(slices: PyTree, stacks: PyTree, layer: Array | int) -> PyTree:
    """Return the state of one layer from its slices and the whole parameters of all layers."""
    if not jax.tree.leaves(stacks):
        return slices
    parts, remaining = nnx.split_state(slices, WholeParam, ...)
    both = lambda part, stack: part.replace(LayerOfStack(stack[...], layer, part[...]))
    return nnx.merge_state(remaining, jax.tree.map(both, parts, stacks, is_leaf=_is_whole))
