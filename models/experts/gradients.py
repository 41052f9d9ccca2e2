"""Gradients of a mixture of experts.

A loop whose number of turns is data cannot be transposed. The backward pass is a loop over the same blocks of rows, and
computes each expert anew. The gradients of weights that are not trained are removed by the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.experts.blocks import blocks_of
from specjax.models.experts.routing import ExpertChoice
from specjax.types import Array, PyTree


def with_gradients(run: Callable[..., Array], num_experts: int, expert: Callable[..., Array]) -> Callable[..., Array]:
    """Return the function `run(x, choice, weights)` with a backward pass. The arguments are those of `run_experts`."""
    function = jax.custom_vjp(run)
    function.defvjp(
        lambda *inputs: (run(*inputs), inputs),
        lambda inputs, cotangents: _backward(inputs, cotangents, num_experts, expert),
    )
    return function


def _backward(inputs: tuple, cotangents: Array, num_experts: int, expert: Callable[..., Array]) -> tuple:
    """Return the gradients of x [R, D], of the choice and of the `ExpertWeights`, for cotangents float32[R, D]."""
    x, choice, weights = inputs
    blocks = blocks_of(choice, num_experts)
    shares = choice.weights.reshape(-1)
    leaves, structure = jax.tree.flatten(weights.arrays)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf, wanted in zip(leaves, is_float, strict=True) if wanted]

    def body(number: Array, totals: tuple) -> tuple:
        of_x, of_shares, of_leaves = totals
        block = blocks.at(number)
        # Rows outside of x are zeros: another row could overflow in this expert, and 0 times infinity is no number.
        y, pull = jax.vjp(expert, weights.of(block.expert), x.at[block.rows].get(mode="fill", fill_value=0))
        wanted = cotangents.at[block.rows].get(mode="fill", fill_value=0)
        of_part, of_rows = pull(wanted * shares[block.pairs][:, None])
        pairs = jnp.where(block.rows < len(x), block.pairs, len(shares))
        parts = [part for part, is_wanted in zip(jax.tree.leaves(of_part), is_float, strict=True) if is_wanted]
        place = weights.first + block.expert
        return (
            of_x.at[block.rows].add(of_rows, mode="drop"),
            of_shares.at[pairs].add(jnp.sum(y * wanted, -1), mode="drop"),
            [total.at[place].add(part) for total, part in zip(of_leaves, parts, strict=True)],
        )

    start = jnp.zeros(x.shape, jnp.float32), jnp.zeros(shares.shape, jnp.float32), zeros
    of_x, of_shares, of_leaves = jax.lax.fori_loop(0, blocks.number, body, start)
    totals = iter(of_leaves)
    of_leaf = lambda leaf, wanted: next(totals).astype(leaf.dtype) if wanted else _nothing(leaf)
    of_arrays: PyTree = jax.tree.unflatten(structure, map(of_leaf, leaves, is_float))
    of_choice = ExpertChoice(_nothing(choice.experts), of_shares.reshape(choice.weights.shape))
    return of_x.astype(x.dtype), of_choice, type(weights)(of_arrays, _nothing(weights.first))


def _nothing(array: Any) -> Any:
    """Return the cotangent of whole numbers."""
    return np.zeros(np.shape(array), jax.dtypes.float0)
