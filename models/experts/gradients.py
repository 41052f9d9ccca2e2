"""Derivatives of a mixture of experts, in forward mode and in reverse mode.

A loop whose number of turns is data cannot be transposed. Both modes are loops over the same blocks of rows, which
compute each expert anew. Only the arrays whose derivatives are wanted take part. Weights of stacked layers have their
derivatives in the part of one layer, so no array of all layers is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from specjax.arrays.linear_maps import apply_linear
from specjax.models.experts.blocks import ExpertRows, blocks_of
from specjax.types import Array


class Changes(NamedTuple):
    """Tangents or cotangents of the inputs of a mixture. None: there are none, or they are not wanted."""

    x: Array | None  # [R, D]
    shares: Array | None  # float32[R, k]
    arrays: list[Array | None]  # leaves of `ExpertWeights.arrays`
    of_layer: list[Array | None]  # leaves of `ExpertWeights.of_layer`; empty without it


def with_gradients(run: Callable[..., Array], num_experts: int, expert: Callable[..., Array]) -> Callable[..., Array]:
    """Return the function `run(x, choice, weights)` with derivatives. The arguments are those of `run_experts`."""

    def rule(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        x, choice, weights = primals
        changes = _changes(*tangents)
        inputs = x, choice, weights._replace(of_layer=None)
        # The transpose does not get the inputs, whose shapes are those of their cotangents.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), changes)
        tangent = apply_linear(
            lambda inputs, changes: _tangent(inputs, changes, num_experts, expert),
            lambda inputs, cotangents: _cotangents(inputs, cotangents, shapes, num_experts, expert),
            inputs,
            changes,
        )
        return run(*primals), tangent

    function = jax.custom_jvp(run)
    function.defjvp(rule, symbolic_zeros=True)
    return function


def _changes(x: Any, choice: Any, weights: Any) -> Changes:
    """Return the tangents that are not known to be zero."""
    is_zero = lambda leaf: isinstance(leaf, SymbolicZero) or leaf.dtype == jax.dtypes.float0
    leaves = lambda tree: [None if is_zero(leaf) else leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_symbolic)]
    (of_x,), (of_shares,) = leaves(x), leaves(choice.weights)
    return Changes(of_x, of_shares, leaves(weights.arrays), leaves(weights.of_layer))


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


def _rows_of(array: Array, block: ExpertRows) -> Array:
    """Return the rows of a block. Rows outside of the input are zeros.

    Another row could overflow in this expert, and 0 times infinity is no number.
    """
    return array.at[block.rows].get(mode="fill", fill_value=0)


def _tangent(inputs: tuple, changes: Changes, num_experts: int, expert: Callable) -> Array:
    """Return the tangents float32[R, D] of the sums."""
    x, choice, weights = inputs
    blocks = blocks_of(choice, num_experts)
    shares = choice.weights.reshape(-1)

    def body(number: Array, total: Array) -> Array:
        block = blocks.at(number)
        part, rows = weights.of(block.expert), _rows_of(x, block)
        leaves, structure = jax.tree.flatten(part)
        moved = [_nothing(leaf) for leaf in leaves]
        for changed, place in ((changes.arrays, weights.first + block.expert), (changes.of_layer, block.expert)):
            if changed:
                moved = [old if leaf is None else leaf[place] for old, leaf in zip(moved, changed, strict=True)]
        of_rows = jnp.zeros_like(rows) if changes.x is None else _rows_of(changes.x, block)
        y, change = jax.jvp(expert, (part, rows), (jax.tree.unflatten(structure, moved), of_rows))
        change = change * shares[block.pairs][:, None]
        if changes.shares is not None:
            change = change + y * changes.shares.reshape(-1)[block.pairs][:, None]
        return total.at[block.rows].add(change, mode="drop")

    return jax.lax.fori_loop(0, blocks.turns, body, jnp.zeros(x.shape, jnp.float32))


def _cotangents(inputs: tuple, cotangents: Array, shapes: Changes, num_experts: int, expert: Callable) -> Changes:
    """Return the cotangents of the inputs in `shapes`, for cotangents float32[R, D] of the sums."""
    x, choice, weights = inputs
    blocks = blocks_of(choice, num_experts)
    shares = choice.weights.reshape(-1)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)

    def body(number: Array, totals: Changes) -> Changes:
        block = blocks.at(number)
        y, pull = jax.vjp(expert, weights.of(block.expert), _rows_of(x, block))
        wanted = _rows_of(cotangents, block)
        of_part, of_rows = pull(wanted * shares[block.pairs][:, None])
        pairs = jnp.where(block.rows < len(x), block.pairs, len(shares))
        parts = jax.tree.leaves(of_part)
        add = lambda leaves, place: [
            None if leaf is None else leaf.at[place].add(part) for leaf, part in zip(leaves, parts, strict=True)
        ]
        of_shares = totals.shares
        if of_shares is not None:
            of_pairs = of_shares.reshape(-1).at[pairs].add(jnp.sum(y * wanted, -1), mode="drop")
            of_shares = of_pairs.reshape(of_shares.shape)
        return Changes(
            None if totals.x is None else totals.x.at[block.rows].add(of_rows, mode="drop"),
            of_shares,
            add(totals.arrays, weights.first + block.expert),
            add(totals.of_layer, block.expert) if totals.of_layer else [],
        )

    totals = jax.lax.fori_loop(0, blocks.turns, body, zeros)
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, shapes)


def _nothing(array: Any) -> Any:
    """Return the tangent of a constant."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.zeros_like(array) if is_float else np.zeros(np.shape(array), jax.dtypes.float0)
