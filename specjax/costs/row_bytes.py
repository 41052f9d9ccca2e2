"""Bytes that a pass moves for each row and token, besides the weights.

A recurrent layer reads and writes its whole state in every pass. A pass stores the inputs of its nodes, from which the
commit computes the states of the accepted path. Keys and values are not counted, because they depend on the context.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.hybrid.memory import HybridCache, HybridPending
from specjax.models.storage import num_bytes
from specjax.types import Array, PyTree, Target

NODES = 8  # of the pass whose stored inputs are counted


class RowBytes(NamedTuple):
    """Bytes of the recurrent layers of a target; both are 0 for a model without such layers."""

    states: float  # of a row, read and written once per pass
    updates: float  # of a node, written by the pass and read by its commit

    def moved(self, nodes: float = 1.0) -> float:
        """Return the bytes that a pass over `nodes` nodes of a row and its commit move."""
        return 2 * (self.states + nodes * self.updates)


def row_bytes(target: Target) -> RowBytes:
    """Return the bytes of the recurrent layers of a target. They are counted from shapes."""
    model = target.model
    if model.rewind is not None:  # a recurrent state cannot go back
        return RowBytes(0.0, 0.0)
    rows = 1 if model.mesh is None else dict(model.mesh.shape).get("data", 1)

    def memory(params: PyTree, tokens: Array, mask: Array) -> tuple[PyTree, PyTree]:
        cache = model.init_cache(params, None, rows, NODES)
        return cache, model.forward(params, tokens, cache, positions=tokens, mask=mask)[1]

    tokens, mask = jnp.zeros((rows, NODES), jnp.int32), jnp.ones((rows, NODES, NODES), bool)
    cache, pending = jax.eval_shape(memory, target.params, tokens, mask)
    if not isinstance(cache, HybridCache) or not isinstance(pending, HybridPending):
        return RowBytes(0.0, 0.0)
    return RowBytes(num_bytes(cache.recurrent) / rows, num_bytes(pending.recurrent) / (rows * NODES))
