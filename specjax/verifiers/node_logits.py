"""Logits of the target's nodes that are processed and warped when a rule reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specjax.arrays.indexing import take_along
from specjax.types import Array


class NodeLogits(NamedTuple):
    """The target's logits by node, computed when they are read.

    A walk down a tree reads depth + 1 of its N nodes, and penalties and top-p take several passes over the vocabulary
    per node.

    `change(rows[B, R, V], node) -> float32[B, R, V]` processes and warps the rows of `node` int32[B], with R = 1, or of
    all nodes (`node` is None, R = N).
    """

    raw: Array  # float[B, N, V], the target's own logits
    change: Callable[[Array, Array | None], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, N, V)."""
        return self.raw.shape

    def at(self, node: Array) -> Array:
        """Return the logits float32[B, V] of one node per row, int32[B]."""
        return self.change(self.raw if self.raw.shape[1] == 1 else _gather(self.raw, node), node)[:, 0]

    def every(self) -> Array:
        """Return the logits of all nodes, float32[B, N, V]."""
        return self.change(self.raw, None)


def row_of(logits: Array | NodeLogits, node: Array) -> Array:
    """Return row `node` int32[B] of logits [B, N, V]: [B, V]."""
    return logits.at(node) if isinstance(logits, NodeLogits) else _gather(logits, node)[:, 0]


def _gather(logits: Array, node: Array) -> Array:
    """Return rows [B, 1, V] of logits [B, N, V]."""
    return take_along(logits, node[:, None, None], 1)


def all_rows(logits: Array | NodeLogits) -> Array:
    """Return logits [B, N, V] as an array."""
    return logits.every() if isinstance(logits, NodeLogits) else logits
