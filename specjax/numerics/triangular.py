"""Systems with a unit lower triangular matrix, which couple the updates of a gated delta net.

A TPU inverts the matrix by products. These are cycles of the TPU compiler for the solve of 32 heads with 128 right-hand
sides on a v5e chip. XLA's triangular solve substitutes row by row for one head after another, and the compiler's
schedule leaves it out. So its cycles are those of its inner loop (1,975 and 7,717 bundles) times 32, and its products.

    nodes     products here     triangular_solve
    16               14,183               75,000
    64               48,424              262,000

A GPU substitutes in a library call. Each product is a kernel there, and a tree of 16 nodes needs seven. In a pass of
Qwen3.5 0.8B over 16 nodes on an H200, the compiler's program has 323 products with the call and 431 without it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import platforms

Array = jax.Array

BLOCK = 64  # tokens whose inverse is computed at once
UNROLLED = 16  # tokens up to which the steps of an inverse are unrolled
EXACT = "highest"  # precision of products of float32 numbers


def unit_lower_inverse(a: Array) -> Array:
    """Return the inverse of I + a for strictly lower triangular a [..., T, T].

    Inverses of diagonal blocks are joined in pairs: with the block L below and U above, and C between them, the corner
    of the inverse is -L^-1 C U^-1. So 2 log2(T) products suffice, and each is a form of forward substitution. A product
    of I + (-a)^(2^i) is as short, but for T = 64 and ones below the diagonal its terms grow to 1e18.
    """
    count = a.shape[-1]
    sizes = [1 << level for level in range((count - 1).bit_length())]
    blocks = [np.arange(count) // size for size in sizes]
    corners = np.array([(block[:, None] == block + 1) & (block % 2 == 0) for block in blocks])
    identity = jnp.broadcast_to(jnp.eye(count, dtype=a.dtype), a.shape)
    if not sizes:
        return identity
    pairs = identity - jnp.where(corners[0], a, 0)  # blocks of one token have the inverse 1

    def join_blocks(inverse: Array, is_corner: Array) -> tuple[Array, None]:
        corner = jnp.where(is_corner, a, 0)
        product = jnp.matmul(jnp.matmul(inverse, corner, precision=EXACT), inverse, precision=EXACT)
        return inverse - product, None

    # The TPU compiler takes twice as long for 64 tokens if this is unrolled.
    return jax.lax.scan(join_blocks, pairs, jnp.asarray(corners[1:]), unroll=count <= UNROLLED)[0]


def solve_unit_lower(a: Array, right: Array) -> Array:
    """Return the solution x of (I + a) x = right, for strictly lower triangular a [..., T, T] and right [..., T, v].

    On a GPU, a library solves it. Elsewhere, blocks of BLOCK rows are solved one after another. A prompt of 512 tokens
    then costs a tenth of one inverse.
    """
    count = a.shape[-1]
    if platforms.of_program() == "gpu":
        return jax.lax.linalg.triangular_solve(a, right, left_side=True, lower=True, unit_diagonal=True)
    if count <= BLOCK:
        return jnp.matmul(unit_lower_inverse(a), right, precision=EXACT)
    padding = -count % BLOCK
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, padding)] * 2)
    right = jnp.pad(right, [(0, 0)] * (right.ndim - 2) + [(0, padding), (0, 0)])
    starts = range(0, count, BLOCK)
    diagonal = jnp.stack([a[..., i : i + BLOCK, i : i + BLOCK] for i in starts])
    inverses = unit_lower_inverse(diagonal)  # [blocks, ..., BLOCK, BLOCK]
    rows_of = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-2], len(starts), BLOCK, x.shape[-1]), -3, 0)

    def solve_block(solution: Array, block: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        start, inverse, below, values = block
        values = values - jnp.matmul(below, solution, precision=EXACT)  # rows that are not solved yet are zeros
        new = jnp.matmul(inverse, values, precision=EXACT)
        return jax.lax.dynamic_update_slice_in_dim(solution, new, start, solution.ndim - 2), None

    blocks = jnp.array(starts), inverses, rows_of(a), rows_of(right)
    return jax.lax.scan(solve_block, jnp.zeros_like(right), blocks)[0][..., :count, :]
