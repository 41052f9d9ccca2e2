"""Rows of logits that are computed when they are read.

A row of logits has one float32 per token of the vocabulary: 64 rows of 262,144 tokens take 64 MiB. The states that the
output layer reads are hundreds of times smaller. A step of a large batch therefore stores states. It computes the rows
of single nodes, or of groups of nodes, where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along

LARGE_LOGITS = 1 << 28
"""Size in bytes from which the float32 logits of several nodes are not stored."""
GROUP_BYTES = 1 << 27
"""Maximum size of the float32 logits of a group, if it has more than one node per row."""


def by_index(rows: jax.Array, index: jax.Array) -> LogitRows:
    """Return rows [B, N, V] of which several are equal: row i is rows float[B, R, V] at index int32[B, N]."""
    return LogitRows(index, _at_index, rows)


def _at_index(index: jax.Array, rows: jax.Array) -> jax.Array:
    return take_along(rows, index[:, :, None], 1)


def are_large(batch: int, nodes: int, vocab: int) -> bool:
    """Return True if the logits of `nodes` nodes in each of `batch` rows are too large to be stored.

    On a mesh they are always stored, because each device has a part of them.
    """
    return nodes > 1 and 4 * batch * nodes * vocab >= LARGE_LOGITS and jax.sharding.get_abstract_mesh().size <= 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRows:
    """Rows of logits [B, N, V] as a function of states."""

    states: Any  # arrays [B, N, ...]
    # (states of any R nodes) -> float[B, R, V], or (states, common) -> ... if there are common arrays; None: `states`
    # are the rows
    compute: Callable[..., jax.Array] | None = field(default=None, metadata={"static": True})
    common: Any = None  # arrays [B, ...] that all nodes of a row of the batch read; None: none

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, N, V)."""
        return jax.eval_shape(self.every).shape

    def at(self, node: jax.Array) -> jax.Array:
        """Return the rows float[B, V] of one node per row, int32[B]."""
        return self.take(node[:, None]).every()[:, 0]

    def take(self, nodes: jax.Array) -> LogitRows:
        """Return the rows of nodes int32[B, R]."""
        index = lambda x: nodes.reshape(*nodes.shape, *[1] * (x.ndim - 2))
        return replace(self, states=jax.tree.map(lambda x: take_along(x, index(x), 1), self.states))

    def cut(self, width: int) -> LogitRows:
        """Return the rows of the first `width` nodes."""
        return replace(self, states=jax.tree.map(lambda x: x[:, :width], self.states))

    def every(self) -> jax.Array:
        """Return all rows as an array."""
        return self._compute(self.states)

    def _compute(self, states: Any) -> Any:
        if self.compute is None:
            return states
        return self.compute(states) if self.common is None else self.compute(states, self.common)

    def reduce(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Return `function(rows float[B, N, V], *arrays)`, a pytree of arrays [B, N, ...] that is evaluated by groups.

        A group has as many nodes as fit into GROUP_BYTES, so `function` is called with all R of any N nodes. It must
        treat the nodes independently.

        Args:
          arrays: pytrees of arrays [B, N, ...], of which `function` receives the same nodes.
        """
        if self.compute is None:
            return function(self.states, *arrays)
        batch, nodes, vocab = self.shape
        size = max(1, GROUP_BYTES // (4 * batch * vocab))
        if size >= nodes:
            return function(self.every(), *arrays)
        count = -(-nodes // size)
        index = np.minimum(np.arange(count * size), nodes - 1)
        split = lambda x: jnp.moveaxis(x[:, index].reshape(batch, count, size, *x.shape[2:]), 1, 0)
        join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :nodes]
        group = lambda parts: function(self._compute(parts[0]), *parts[1])
        return jax.tree.map(join, jax.lax.map(group, jax.tree.map(split, (self.states, arrays))))
