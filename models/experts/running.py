"""Products of rows with their experts, without a copy of all weights.

Few rows: a loop over the distinct experts of all rows. Each turn multiplies all rows by one expert. The number of turns
is data, so a pass costs what the experts cost that it touches. Many rows: the pairs of row and expert are sorted, and
each turn multiplies a block of rows of one expert. On a TPU a kernel multiplies by quantised experts. On a GPU a turn
copies weights, and a loop whose number of turns is data costs a round trip to the host per turn. There, the weights of
few pairs are read within the products, and more rows are multiplied by all experts at once.

Every form adds the outputs of a row's experts in ascending order of the experts, in float32. `gradients` has the
backward pass of all forms.

`jax.lax.ragged_dot` is not used. On CPU it computes every expert: one row and 64 experts of 512 x 256 take 69.9 ms, and
the loop takes 0.3 (jax 0.10). On TPU the compiler copies all experts to another layout before it. On GPU it computes
every expert for every pair, in copies of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms, scopes
from specjax.models.experts.blocks import blocks_of
from specjax.models.experts.gradients import with_gradients
from specjax.models.experts.routing import ExpertChoice
from specjax.models.products.from_stack import QuantizedStack, stack_of
from specjax.models.products.grouped import GroupedMatrix
from specjax.models.products.transposed import by_columns, is_stored_by_columns
from specjax.models.storage.stacks import slice_layer
from specjax.numerics.quantized_array import is_quantized
from specjax.types import Array, PyTree

Form = Literal["loop", "blocks", "gather", "pairs", "dense", "grouped"]
Expert = Callable[[PyTree, Array], Array]
"""Function from the weights of one expert and rows [r, D] to float32[r, D]."""

MAX_LOOP_ROWS = 16
"""Largest number of rows of the form "loop".

Times of the loop and of blocks of 32 and 64 rows, in ms, for 4 of 64 experts of 512 x 256 in float32. 1 row: 1.4, 1.3,
1.4. 16 rows: 21, 29, 26. 64 rows: 144, 128, 91. 256 rows: 762, 177, 93. 1,024 rows: 2,252, 124, 118. Gathered weights
take 2.0 for 1 row and 121 for 8 (two busy cores with AVX2, jax 0.10). Scratch memory is one expert's weights.
"""

MAX_DENSE_BYTES = 1 << 30
"""Largest size of the outputs of all experts for a block of rows, in the form "dense" of a GPU.

Milliseconds of the experts of a layer of Qwen3-30B-A3B on an H200, by the planner's schedule of the program of the CUDA
compiler (jax 0.11, `benchmarks/expert_forms.py --chip h200:1`, not measured). Pairs: 0.028 for 1 row, 0.16 for 8, 1.22
for 64. Dense: 0.32, 0.32 and 0.35, and 2.5 for 2,048. Loop: 0.21, 1.5, 4.0 and 6.9. Blocks of 256: 0.08, 0.97, 2.4 and
5.6. `ragged_dot`: 0.54, 0.99, 1.2 and 20, with 9.0 GB of temporaries. gpt-oss-20b: pairs 0.060, 0.42, 3.2; dense 0.41,
0.42, 0.44 and 3.3; loop 0.16, 1.3, 2.1 and 4.0. docs/devices.md has the table.
"""

MAX_LOOP_ROWS_TPU = 256
"""The same on a TPU, where a turn reads one expert for all rows, and more rows of a block cost little.

Milliseconds of the experts of a layer of Qwen3-30B-A3B on a v5e chip, by the schedule of the TPU compiler for the
expected number of turns (libtpu with jax 0.10, `benchmarks/expert_forms.py`, not measured). Loop: 0.26 for 1 row, 1.32
for 8, 3.55 for 64, 4.48 for 256. Gather: 0.21 for 1 row, 5.9 for 8. Blocks of 64, 128 and 256 of 2,048 rows: 10.7, 7.1
and 5.6. `ragged_dot` takes 10 or more for any number of rows, because it copies the experts.
The kernel of the form "grouped" has no schedule. By its roofline, a lower bound, and the schedule of the rest, 2,048
rows take 2.9. The blocks are faster if the kernel reaches less than 41 % of its roofline. gpt-oss-20b: loop 0.40 for
1 row, 2.07 for 8, 3.39 for 64; gather 0.37 for 1 row, 37.8 for 8; 2,048 rows in blocks of 256 6.5, grouped 4.4 (less
than 60 %). Fewer rows stay with the loop, which reads the same bytes. Its schedule and a roofline do not compare. The
kernel compiles in a whole prefill, but there it copies experts that are stored by columns (2.4 GB of Qwen3-30B-A3B on
eight chips). So "grouped" runs only where it is named.
"""


MAX_PAIRS_GROUPED_GPU = 4
"""Largest number of pairs per expert of the form "pairs" on a GPU, for quantised experts with groups of inputs.

Other experts have 1. Products of all experts first expand weights with groups to bfloat16, so they read and write 4.5
times the bytes of the experts. By the same schedule, experts of gpt-oss-20b in MXFP4 take 0.046 ms in pairs for 1 row,
0.24 for 8 and 1.81 for 64; dense 0.77, 1.05, 1.07, and 3.3 for 2,048; loop 0.15, 1.23, 2.04 and 4.1; blocks of 256
0.078, 1.38, 1.77 and 4.4. Those of Qwen3-30B-A3B in int8 with a scale per row: pairs 0.020, 0.087 and 0.62; dense 0.16,
0.17, 0.21 and 2.5; loop 0.21, 1.34, 3.6 and 6.8; blocks 0.077, 0.74, 1.9 and 4.9.
"""


def form_for(
    rows: int, sizes: tuple[int, int], platform: str, *, is_plain: bool = True, is_part: bool = False,
    is_whole: bool = True, has_groups: bool = False,
) -> Form:  # fmt: skip
    """Return the form for a number of rows on "cpu", "gpu" or "tpu".

    Args:
      sizes: the number of experts that a row chooses, and of those on this device.
      is_plain: rows and weights are bfloat16.
      is_part: some experts of a row may be on other devices.
      is_whole: the weights are arrays of one layer, so one product can have all experts.
      has_groups: the weights are quantised, and groups of inputs share a scale.
    """
    num_chosen, num_experts = sizes
    if platform == "tpu":
        if rows == 1 and is_plain and not is_part:  # a gather reads an expert in place of each one that is elsewhere
            return "gather"
        return "loop" if rows <= MAX_LOOP_ROWS_TPU else "blocks"
    if platform == "gpu":
        if rows * num_chosen <= num_experts * (MAX_PAIRS_GROUPED_GPU if has_groups else 1):
            return "pairs"  # they read no more than all experts, also where those are expanded first
        return "dense" if is_whole else "blocks"
    return "loop" if rows <= MAX_LOOP_ROWS else "blocks"


def run_experts(
    x: Array, choice: ExpertChoice, weights: PyTree, num_experts: int, expert: Expert,
    form: Form | None = None, first: Array | int = 0, is_part: bool = False, of_layer: PyTree = None,
) -> Array:  # fmt: skip
    """Return the weighted sum float32[R, D] of the outputs of each row's experts.

    Args:
      x: [R, D].
      choice: pairs with the expert `num_experts`, which does not exist, and weight 0 add nothing. A row that names an
        expert twice has it with the sum of both weights.
      weights: arrays [E, ...], or `QuantizedArray`s. Those of stacked layers have the experts of all layers.
      form: None: that of `form_for`.
      first: place of the layer's first expert in `weights`.
      is_part: `weights` are a part of the experts, and the pairs of the others have the expert `num_experts`.
      of_layer: the same weights as arrays [E, ...] of the layer alone, which get the gradients. No pass reads them.
        None: `weights` get the gradients.
    """
    if len(x) == 0:
        return jnp.zeros(x.shape, jnp.float32)
    if form is None:
        leaves = jax.tree.leaves(weights, is_leaf=is_quantized)
        is_plain = all(leaf.dtype == jnp.bfloat16 for leaf in (x, *jax.tree.leaves(weights)))
        has_groups = any(is_quantized(leaf) and leaf.scales.shape[-1] > 1 for leaf in leaves)
        form = form_for(
            len(x), (choice.experts.shape[-1], num_experts), platforms.of_program(),
            is_plain=is_plain, is_part=is_part, is_whole=isinstance(first, int), has_groups=has_groups,
        )  # fmt: skip
    run: Any = {
        "loop": _loop, "blocks": _blocks, "gather": _gather, "pairs": _pairs, "dense": _dense, "grouped": _grouped,
    }[form]  # fmt: skip
    if form != "grouped" and platforms.of_program() == "tpu":
        weights = _as_stored(weights)
        of_layer = None if of_layer is None else _as_stored(of_layer)
    run = functools.partial(run, num_experts=num_experts, expert=expert)
    return with_gradients(run, num_experts, expert)(x, choice, ExpertWeights(weights, first, of_layer))


def _as_stored(weights: PyTree) -> PyTree:
    """Return the weights with a `TransposedMatrix` in place of the matrices that a TPU stores by columns.

    In loops the compiler reads matrices in the order of their axes, so it would copy all experts of all layers to that
    order. Qwen3-30B-A3B over eight devices has matrices of 2,048 x 96 numbers, a copy of which takes 3.2 GB.
    """
    is_matrix = lambda leaf: not is_quantized(leaf) and leaf.ndim == 3 and is_stored_by_columns(leaf.shape)
    change = lambda leaf: by_columns(leaf) if is_matrix(leaf) else leaf
    return jax.tree.map(change, weights, is_leaf=is_quantized)


def distinct_experts(choice: ExpertChoice, num_experts: int) -> tuple[Array, Array]:
    """Return the distinct experts of all rows, which come first in int32[E] in ascending order, and their number."""
    is_chosen = jnp.zeros(num_experts, bool).at[choice.experts].set(True)
    return jnp.argsort(~is_chosen, stable=True), jnp.sum(is_chosen, dtype=jnp.int32)


class ExpertWeights(NamedTuple):
    """Weights of the experts of a layer."""

    arrays: PyTree
    first: Array | int  # place of the layer's first expert in the arrays
    of_layer: PyTree = None  # the weights of the layer alone, for gradients

    def of(self, expert: Array) -> PyTree:
        """Return the weights of one expert."""
        return jax.tree.map(lambda leaf: slice_layer(leaf, self.first + expert), self.arrays)

    def for_loop(self, num_experts: int, rows: int) -> ExpertWeights:
        """Return the weights in the form in which a loop reads them, for `operand` and so many rows per turn.

        The kernel of `QuantizedStack` has no derivative, so `of` serves the backward pass. Scales of groups of several
        layers would be transposed in each layer.
        """
        if platforms.of_program() != "tpu":
            return self
        can_change = lambda leaf: is_quantized(leaf) and (leaf.scales.shape[-1] == 1 or len(leaf) == num_experts)
        change = lambda leaf: (stack_of(leaf, rows) if can_change(leaf) else None) or leaf
        return ExpertWeights(jax.tree.map(change, self.arrays, is_leaf=is_quantized), self.first)

    def operand(self, expert: Array) -> PyTree:
        """Return the weights of one expert for `matmul`."""
        place = self.first + expert
        read = lambda leaf: leaf.at(place) if isinstance(leaf, QuantizedStack) else slice_layer(leaf, place)
        return jax.tree.map(read, self.arrays, is_leaf=lambda leaf: isinstance(leaf, QuantizedStack))

    def gathered(self, experts: Array) -> PyTree:
        """Return the weights of experts int32[R], with an axis of rows."""
        return jax.tree.map(lambda leaf: leaf[self.first + experts], self.arrays)


def _loop(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply all rows by each distinct expert in turn."""
    order, count = distinct_experts(choice, num_experts)
    weights = weights.for_loop(num_experts, len(x))
    shares = jnp.zeros((num_experts, len(x)), jnp.float32)
    shares = shares.at[choice.experts, jnp.arange(len(x))[:, None]].add(choice.weights)
    is_chosen = jnp.zeros((num_experts, len(x)), bool).at[choice.experts, jnp.arange(len(x))[:, None]].set(True)

    def body(turn, total):
        number = order[turn]
        y = expert(weights.operand(number), x) * shares[number][:, None]
        return total + jnp.where(is_chosen[number][:, None], y, 0.0)  # a row without this expert may overflow in it

    with jax.named_scope(scopes.EXPERTS):
        return jax.lax.fori_loop(0, count, body, jnp.zeros(x.shape, jnp.float32))


def _blocks(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply blocks of the rows of one expert, in ascending order of the experts."""
    blocks, shares = blocks_of(choice, num_experts), choice.weights.reshape(-1)
    weights = weights.for_loop(num_experts, blocks.size)

    def body(number, total):
        block = blocks.at(number)
        y = expert(weights.operand(block.expert), x[jnp.minimum(block.rows, len(x) - 1)])
        return total.at[block.rows].add(y * shares[block.pairs][:, None], mode="drop")  # rows outside of x are dropped

    with jax.named_scope(scopes.EXPERTS):
        return jax.lax.fori_loop(0, blocks.turns, body, jnp.zeros(x.shape, jnp.float32))


def _grouped(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply the pairs of a row and an expert, sorted by expert. The expert multiplies by `matmul` alone."""
    flat, num_chosen = choice.experts.reshape(-1), choice.experts.shape[-1]
    order = jnp.argsort(flat, stable=True)
    experts = flat[order]
    exists = experts < num_experts

    def of_pairs(leaf: Array) -> Any:
        if leaf.ndim == 2:  # biases
            return leaf[weights.first + jnp.minimum(experts, num_experts - 1)]
        place = jnp.where(flat < num_experts, weights.first + flat, len(leaf))  # outside: dropped
        return GroupedMatrix(leaf, jnp.zeros(len(leaf), jnp.int32).at[place].add(1, mode="drop"))

    y = expert(jax.tree.map(of_pairs, weights.arrays), x[order // num_chosen])
    y = jnp.where(exists[:, None], y * choice.weights.reshape(-1)[order][:, None], 0.0)
    of_pair = jnp.argsort(order).reshape(choice.experts.shape)  # int32[R, k], the place of each pair
    total = jnp.zeros(x.shape, jnp.float32)
    for place in range(num_chosen):
        total = total + y[of_pair[:, place]]
    return total


def _gather(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply each row by the gathered weights of its experts, one after another."""
    total = jnp.zeros(x.shape, jnp.float32)
    for place in range(choice.experts.shape[-1]):
        gathered = weights.gathered(choice.experts[:, place])
        y = jax.vmap(lambda part, row: expert(part, row[None])[0])(gathered, x)
        share = choice.weights[:, place, None]
        total = total + jnp.where(share == 0, 0.0, y * share)  # an expert that does not exist is read as another one
    return total


def _pairs(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply all pairs of a row and an expert at once. XLA on GPU reads the weights within the products.

    One after another, XLA joins the products, and compiles a layer of 64 pairs in 16 s instead of 4.
    """
    num_chosen = choice.experts.shape[-1]
    parts, rows = weights.gathered(choice.experts.reshape(-1)), jnp.repeat(x, num_chosen, axis=0)
    y = jax.vmap(lambda part, row: expert(part, row[None])[0])(parts, rows)
    return _sum_of(y.reshape(*choice.experts.shape, -1), choice)


def _dense(x: Array, choice: ExpertChoice, weights: ExpertWeights, num_experts: int, expert) -> Array:
    """Multiply blocks of rows by all experts."""
    size = max(1, MAX_DENSE_BYTES // (4 * num_experts * x.shape[-1]))

    def run(x: Array, choice: ExpertChoice) -> Array:
        y = jax.vmap(expert, in_axes=(0, None))(weights.arrays, x)  # float32[E, R, D]
        return _sum_of(y[jnp.minimum(choice.experts, num_experts - 1), jnp.arange(len(x))[:, None]], choice)

    if len(x) <= size:
        return run(x, choice)
    blocks = jax.tree.map(lambda leaf: _in_blocks(leaf, size), (x, choice))
    return jax.lax.map(lambda block: run(*block), blocks).reshape(-1, x.shape[-1])[: len(x)]


def _in_blocks(rows: Array, size: int) -> Array:
    """Return rows [R, ...] as blocks of `size` rows, the last of which is padded with zeros."""
    return jnp.pad(rows, ((0, -len(rows) % size), *[(0, 0)] * (rows.ndim - 1))).reshape(-1, size, *rows.shape[1:])


def _sum_of(y: Array, choice: ExpertChoice) -> Array:
    """Return the weighted sums float32[R, D] of the outputs [R, k, D] of each row's experts, in their order."""
    total = jnp.zeros((len(y), y.shape[-1]), jnp.float32)
    for place in range(y.shape[1]):
        share = choice.weights[:, place, None]
        total = total + jnp.where(share == 0, 0.0, y[:, place] * share)  # as in `_gather`
    return total
