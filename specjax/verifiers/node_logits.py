"""Logits of the target's nodes that are processed and warped when a rule reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.arrays.logit_rows import LogitRows
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import draw, warp
from specjax.types import Array, Best, Sampling


class UnstoredLogits(NamedTuple):
    """Logits of nodes that are computed when a node is read, and their likeliest tokens."""

    rows: LogitRows  # [B, N, V]
    best: Best  # the likeliest tokens of all nodes, [B, N], at least one of each

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, N, V)."""
        return self.rows.shape


class NodeLogits(NamedTuple):
    """The target's logits by node, computed when they are read.

    A walk down a tree reads depth + 1 of its N nodes, and penalties and top-p take several passes over the vocabulary
    per node.

    `process(rows[B, R, V], node) -> float[B, R, V]` applies the processors to the rows of `node` int32[B], with R = 1,
    or of all nodes (`node` is None, R = N). The results are then warped with `sampling`; None: they are not.
    """

    raw: Array | UnstoredLogits  # float[B, N, V], the target's own logits
    process: Callable[[Array, Array | None], Array]
    sampling: Sampling | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, N, V)."""
        return self.raw.shape

    def at(self, node: Array) -> Array:
        """Return the logits float32[B, V] of one node per row, int32[B]."""
        return self._warped(self._processed(node))

    def draw_at(self, keys: Array, node: Array) -> Array:
        """Draw a token with keys [B] from the logits of one node per row, int32[B]. It is `draw(keys, at(node))`."""
        rows = self._processed(node)
        return draw(keys, rows) if self.sampling is None else draw_warped(keys, rows, self.sampling)

    def every(self) -> Array:
        """Return the logits of all nodes, float32[B, N, V]."""
        rows = self.raw.rows.every() if isinstance(self.raw, UnstoredLogits) else self.raw
        return self._warped(self.process(rows, None))

    def largest_at(self, node: Array) -> Array:
        """Return the likeliest token of one node per row, int32[B]. It needs logits that are not warped."""
        assert self.sampling is None
        if isinstance(self.raw, UnstoredLogits):
            return _gather(self.raw.best.tokens, node)[:, 0, 0]
        return first_largest(self.at(node))

    def is_sound_at(self, node: Array) -> Array:
        """Return bool[B]: no logit of the node is NaN or Inf, and one is finite."""
        if isinstance(self.raw, UnstoredLogits):
            return jnp.isfinite(take_along(self.raw.best.total, node[:, None], 1)[:, 0])
        return jnp.isfinite(jnp.max(self.at(node), -1))  # the maximum is NaN or Inf if any logit is, -Inf if all are

    def _processed(self, node: Array) -> Array:
        raw = self.raw
        if isinstance(raw, UnstoredLogits):
            rows = raw.rows.take(node[:, None]).every()
        else:
            rows = raw if raw.shape[1] == 1 else _gather(raw, node)
        return self.process(rows, node)[:, 0]

    def _warped(self, logits: Array) -> Array:
        return logits if self.sampling is None else warp(logits, self.sampling)


AnyLogits = Array | NodeLogits | LogitRows
"""Logits [B, N, V] that are stored, or that are computed when a node is read."""


def row_of(logits: AnyLogits, node: Array) -> Array:
    """Return row `node` int32[B] of logits [B, N, V]: [B, V]."""
    return logits.at(node) if isinstance(logits, (NodeLogits, LogitRows)) else _gather(logits, node)[:, 0]


def largest_of(logits: Array | NodeLogits, node: Array) -> Array:
    """Return the likeliest token of row `node` int32[B] of logits [B, N, V]: int32[B]."""
    return logits.largest_at(node) if isinstance(logits, NodeLogits) else first_largest(row_of(logits, node))


def draw_of(keys: Array, logits: Array | NodeLogits, node: Array) -> Array:
    """Draw a token with keys [B] from row `node` int32[B] of logits [B, N, V]: int32[B]."""
    return logits.draw_at(keys, node) if isinstance(logits, NodeLogits) else draw(keys, row_of(logits, node))


def _gather(logits: Array, node: Array) -> Array:
    """Return rows [B, 1, X] of an array [B, N, X]."""
    return take_along(logits, node[:, None, None], 1)


def all_rows(logits: AnyLogits) -> Array:
    """Return logits [B, N, V] as an array."""
    return logits.every() if isinstance(logits, (NodeLogits, LogitRows)) else logits


def are_stored(logits: AnyLogits) -> bool:
    """Return True if logits [B, N, V] are stored as an array, so that reading all rows needs no further memory."""
    return not isinstance(logits.raw if isinstance(logits, NodeLogits) else logits, (UnstoredLogits, LogitRows))
