"""Blocks of the rows of one expert. Pairs of a row and an expert are sorted by expert, and each expert fills blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.models.experts.routing import ExpertChoice
from specjax.types import Array

BLOCK_ROWS, BLOCK_ROWS_TPU, BLOCK_ROWS_GPU = 64, 256, 256
"""Largest number of rows of a block. `specjax.models.experts.running` has the times of some sizes."""


class ExpertRows(NamedTuple):
    """Some rows of one expert. A block that its expert does not fill has rows outside of the input."""

    expert: Array  # int32[]
    pairs: Array  # int32[r], places in the flat choice [R * k]
    rows: Array  # int32[r]


class Blocks(NamedTuple):
    """The blocks of all chosen experts, in ascending order of the experts."""

    order: Array  # int32[P], pairs by expert
    counts: Array  # int32[E], pairs of each expert
    starts: Array  # int32[E], place of the first pair of each expert in `order`
    ends: Array  # int32[E], the number of blocks up to each expert
    experts: Array  # int32[blocks], the expert of each block
    size: int  # rows of a block
    num_rows: int
    num_chosen: int

    @property
    def number(self) -> Array:
        """Return the number of blocks int32[]."""
        return self.ends[-1]

    @property
    def turns(self) -> Array | int:
        """Return the number of turns of a loop over the blocks.

        On a GPU it is the largest possible number, because the host reads a number that is data before each turn.
        Further blocks have no rows.
        """
        return len(self.experts) if platforms.of_program() == "gpu" else self.number

    def at(self, block: Array) -> ExpertRows:
        """Return a block."""
        expert = self.experts[block]
        place = (block - jnp.where(expert > 0, self.ends[expert - 1], 0)) * self.size + jnp.arange(self.size)
        pairs = self.order[jnp.minimum(self.starts[expert] + place, len(self.order) - 1)]
        rows = jnp.where(place < self.counts[expert], pairs // self.num_chosen, self.num_rows)
        return ExpertRows(expert, pairs, rows)


def blocks_of(choice: ExpertChoice, num_experts: int) -> Blocks:
    """Return the blocks of a choice. Pairs with the expert `num_experts`, which does not exist, are in none."""
    num_rows, num_chosen = choice.experts.shape
    flat = choice.experts.reshape(-1)
    platform = platforms.of_program()
    size = min({"tpu": BLOCK_ROWS_TPU, "gpu": BLOCK_ROWS_GPU}.get(platform, BLOCK_ROWS), num_rows)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(-(-counts // size))
    max_blocks = min(len(flat), num_experts + len(flat) // size)
    # A search within the loop would be a loop of its own, with a third of a turn's cycles on a TPU.
    experts = jnp.searchsorted(ends, jnp.arange(max_blocks), side="right", method="compare_all").astype(jnp.int32)
    experts = jnp.minimum(experts, num_experts - 1)  # blocks beyond the last one are after those of its rows
    starts = jnp.cumsum(counts) - counts
    return Blocks(jnp.argsort(flat, stable=True), counts, starts, ends, experts, size, num_rows, num_chosen)
