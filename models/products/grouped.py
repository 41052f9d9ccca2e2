"""Products of sorted rows with the matrices of their groups, by the megablox kernel of JAX, for many rows on a TPU.

No model uses it by default, see `MAX_LOOP_ROWS_TPU` in `specjax.models.experts.running`.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.types import Array

TILE_ROWS, MAX_TILE_BYTES = 128, 4 << 20
"""Rows of a tile, and bytes of a tile of weights. The kernel holds two of them in 16 MiB of on-chip memory."""


class GroupedMatrix(NamedTuple):
    """Matrices [G, O, I] of groups of rows."""

    matrices: Array
    group_sizes: Array  # int32[G], rows of each group; further rows belong to no group

    def product(self, x: Array, dtype: Any = None) -> Array:
        """Return [P, O] in `dtype`, by default that of x, for rows [P, I] in the order of the groups.

        Rows without a group have arbitrary values. All inputs are one tile, so a row's sum does not depend on the other
        rows. Elsewhere than on a TPU the kernel is interpreted, which is slow and serves tests.
        """
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        fan_out, fan_in = self.matrices.shape[1:]
        tiling = tile_rows(len(x)), fan_in, tile_outputs(fan_in, fan_out)
        rows = jnp.pad(x, ((0, -len(x) % tiling[0]), (0, 0)))
        is_interpreted = platforms.of_program() != "tpu"
        # The kernel's products have the precision of the program (`arrays.modes`), and the compiler of TPU kernels has
        # no products of bfloat16 with another one than the default. Its error is "Bad lhs type".
        is_bfloat16 = x.dtype == self.matrices.dtype == jnp.bfloat16
        with jax.default_matmul_precision("default") if is_bfloat16 else contextlib.nullcontext():
            y = gmm(
                rows,
                self.matrices,
                self.group_sizes,
                dtype or x.dtype,
                tiling,
                transpose_rhs=True,
                interpret=is_interpreted,
            )
        return y[: len(x)]


def tile_rows(rows: int) -> int:
    """Return the rows of a tile, a multiple of the 16 rows of a register of bfloat16."""
    return min(TILE_ROWS, -(-rows // 16) * 16)


def tile_outputs(fan_in: int, fan_out: int) -> int:
    """Return the outputs of a tile: all, or the largest multiple of 128 within MAX_TILE_BYTES of bfloat16."""
    max_outputs = MAX_TILE_BYTES // (2 * fan_in)
    return fan_out if fan_out <= max_outputs else max(128, max_outputs // 128 * 128)
