"""A low-rank output layer that selects candidates, whose exact logits are then computed, for any head with its own one.

EAGLE-4 (2026), with the candidate head of its training recipe; only its description was read.

Rule: with the output layer W [V, D] and a state h, the candidates are the K tokens with the largest U (D h). The
factors U [V, r] and D [r, D] come from the truncated SVD of W minus the mean of its rows. That mean shifts all logits
of a state alike. The logits of the candidates are those of their rows of W, and all other tokens have logits of -inf.
One product costs r (V + D) + K D multiplications instead of V D.
Guarantee: that of the head. q is the softmax over the candidates, from which tokens are drawn, and it is 0 elsewhere.
Deviation: EAGLE-4 trains the factors further, with the divergence of the full head as loss. Here the SVD stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.products.plain import matmul, take_rows
from specjax.numerics.quantized_array import QuantizedArray
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, PyTree

NAME = "candidates"
"""The name of the factors among the parameters of a head."""

_Path = tuple[str | int, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("up", "down"), meta_fields=("paths", "count"))
@dataclass(frozen=True)
class CandidateFactors:
    """The factors of the output layers of a head."""

    up: tuple[Array, ...]  # [V, r], of each output layer
    down: tuple[Array, ...]  # [r, D]
    paths: tuple[_Path, ...] = field(default=())  # the modules of the output layers
    count: int = 1  # K


def with_candidates(head: DraftHead, count: int, rank: int | None = None) -> DraftHead:
    """Return a head whose output layers compute the logits of `count` candidates only.

    Args:
      rank: rank r of the layer that selects them; None: a quarter of the width of its input.

    Raises: UsageError for a head without an output layer of its own, or for a number out of its range.
    """
    tables = _output_layers(head.params)
    kind = head.head.kind
    if not tables or kind == "gemma4_assistant":
        raise UsageError(
            f"candidates need a head with an output layer of its own, and this {kind} head uses the target's or "
            "selects clusters; leave candidates out"
        )
    sizes, widths = zip(*(table.shape for table in tables.values()), strict=True)
    if not 1 <= count <= min(sizes):
        raise UsageError(f"candidates must be from 1 to {min(sizes)}, the tokens that the head drafts, not {count}")
    rank = max(1, min(widths) // 4) if rank is None else rank
    if not 1 <= rank <= min(widths):
        raise UsageError(f"candidate_rank must be from 1 to {min(widths)}, the width of the head, not {rank}")
    factors = functools.partial(factorize, rank=rank)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(head.params))
    run = functools.partial(jax.eval_shape, factors) if is_abstract else factors
    up, down = zip(*map(run, tables.values()), strict=True)
    return head.replace(params=head.params | {NAME: CandidateFactors(up, down, tuple(tables), count)})


@functools.partial(jax.jit, static_argnames="rank")
def factorize(table: Array | QuantizedArray, rank: int) -> tuple[Array, Array]:
    """Return U [V, rank] and D [rank, D] of an output layer [V, D], in its dtype."""
    rows = table.expand() if isinstance(table, QuantizedArray) else table
    centred = rows.astype(jnp.float32) - jnp.mean(rows.astype(jnp.float32), 0)
    # The right singular vectors are eigenvectors of a small matrix. An SVD of all rows would take far longer.
    product = functools.partial(jnp.matmul, precision="highest")
    _, vectors = jnp.linalg.eigh(product(centred.T, centred))  # ascending
    basis = vectors[:, ::-1][:, :rank]
    return product(centred, basis).astype(rows.dtype), basis.T.astype(rows.dtype)


def split_factors(params: PyTree) -> tuple[PyTree, CandidateFactors | None]:
    """Return the parameters of a head's module, and its factors, if any."""
    if not isinstance(params, dict) or NAME not in params:
        return params, None
    return {name: part for name, part in params.items() if name != NAME}, params[NAME]


def attach(module: Any, factors: CandidateFactors) -> Any:
    """Let the output layers of a module compute the logits of candidates only, and return it."""
    for path, up, down in zip(factors.paths, factors.up, factors.down, strict=True):
        layer = module
        for name in path:
            layer = layer[name] if isinstance(name, int) else getattr(layer, name)
        layer.product = _product(up, down, factors.count)
    return module


def _product(up: Array, down: Array, count: int) -> Callable[..., Array]:
    """Return the product of states [..., D] and an output layer [V, D], as `matmul`, for candidates only."""

    def multiply(x: Array, table: Array, dtype=None) -> Array:
        states = x.reshape(-1, x.shape[-1])
        ids, _ = gumbel_topk(None, matmul(matmul(states, down, jnp.float32), up, jnp.float32), count)
        rows = take_rows(table, ids)  # [R, K, D]
        exact = jnp.einsum("rkd,rd->rk", rows, states, preferred_element_type=jnp.float32)
        logits = jnp.full((len(states), table.shape[0]), -jnp.inf, jnp.float32)
        logits = logits.at[jnp.arange(len(states))[:, None], ids].set(exact, unique_indices=True)
        return logits.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)

    return multiply


def _output_layers(params: PyTree, path: _Path = ()) -> dict[_Path, Any]:
    """Return the tables of the output layers by path. All heads call them `head`, or a list `heads`."""
    if not isinstance(params, dict):
        return {}
    tables: dict[_Path, Any] = {}
    for name, part in params.items():
        place = (*path, name)
        is_output = name == "head" or (path and path[-1] == "heads")
        table = part.get("weight") if is_output and isinstance(part, dict) else None
        if isinstance(table, jax.Array | np.ndarray | QuantizedArray | jax.ShapeDtypeStruct):
            tables[place] = table
        else:
            tables |= _output_layers(part, place)
    return tables
