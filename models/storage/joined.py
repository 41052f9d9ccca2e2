"""Projections of the same input that are stored as one matrix, so that a pass computes them in one product.

Attention then has `qkv` in place of `q`, `k` and `v`, and an MLP `gate_up` in place of `gate` and `up`. The rows of the
joined matrix [N, D] are arranged in equal groups, and each group contains rows of every member. In `qkv` a group is one
key/value head with its query heads. In `gate_up` it is one hidden unit. A mesh that splits the rows therefore gives
every device complete heads and units, and the first units of an MLP are the first rows.

Checkpoints, LoRA and code that reads single projections use the separate form, which `split_projections` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array, PyTree

JOINED: Mapping[str, tuple[str, ...]] = MappingProxyType({"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")})
"""Names of joined modules, and of their members in the order of a group's rows."""


def split_projections(params: PyTree, config: Any) -> PyTree:
    """Return the parameters of a model of `specjax.models` with separate projections.

    Leaves may have leading axes that count layers. Parameters that are already separate are returned unchanged.
    """
    if not getattr(config, "joined", ()):
        return params

    def split(name: str, module: dict) -> dict:
        rows = _group_rows(config, name)
        member_of = lambda member, part, leaf: jax.tree.map(lambda array: _split(array, part, rows)[member], leaf)
        return {member: {part: member_of(member, part, leaf) for part, leaf in module.items()} for member in rows}

    def visit(module: Any) -> Any:
        if not isinstance(module, dict):
            return module
        result: dict[str, Any] = {}
        for name, child in module.items():
            result |= split(name, child) if name in JOINED else {name: visit(child)}
        return result

    return visit(params)


def join_projections(params: PyTree, config: Any) -> PyTree:
    """Reverse `split_projections`: return the parameters in the form of the config, from separate projections."""
    if not getattr(config, "joined", ()):
        return params

    def join(name: str, members: list[dict]) -> dict:
        rows = _group_rows(config, name)
        join_arrays = lambda part: lambda *arrays: _join(list(arrays), part, rows)
        return {part: jax.tree.map(join_arrays(part), *(member[part] for member in members)) for part in members[0]}

    def visit(module: Any) -> Any:
        if not isinstance(module, dict):
            return module
        result = {name: visit(child) for name, child in module.items()}
        for name in config.joined:
            members = JOINED[name]
            if members[0] in module and members[-1] in module:
                result[name] = join(name, [result.pop(member) for member in members])
        return result

    return visit(params)


def rows_in_joined(config: Any, name: str, member: str, total: int) -> np.ndarray:
    """Return the rows int[n] of a joined matrix of `total` rows that belong to one of its members."""
    rows = _group_rows(config, name)
    numbers = np.arange(total).reshape(-1, sum(rows.values()))
    start = _offsets(rows)[member]
    return numbers[:, start : start + rows[member]].reshape(-1)


def split_outputs(y: Array, rows: tuple[int, ...]) -> tuple[Array, ...]:
    """Split the outputs [..., N] of a joined product into those of its members, [..., groups, rows of the member]."""
    grouped = y.reshape(*y.shape[:-1], -1, sum(rows))
    ends = np.cumsum(rows)
    return tuple(grouped[..., end - count : end] for end, count in zip(ends, rows, strict=True))


def _group_rows(config: Any, name: str) -> dict[str, int]:
    """Return the number of rows per group of each member."""
    if name == "gate_up":
        return {"gate": 1, "up": 1}
    queries = config.num_heads // config.num_kv_heads
    return {"q": queries * config.head_dim, "k": config.head_dim, "v": config.head_dim}


def _offsets(rows: Mapping[str, int]) -> dict[str, int]:
    ends = np.cumsum(list(rows.values())).tolist()
    return {member: end - count for end, (member, count) in zip(ends, rows.items(), strict=True)}


def _row_axis(leaf: Array, part: str) -> int:
    return leaf.ndim - (2 if part == "weight" else 1)  # [.., N, D] and biases [.., N]


def _split(leaf: Array, part: str, rows: Mapping[str, int]) -> dict[str, Array]:
    axis, offsets = _row_axis(leaf, part), _offsets(rows)
    leading, trailing = leaf.shape[:axis], leaf.shape[axis + 1 :]
    grouped = leaf.reshape(*leading, -1, sum(rows.values()), *trailing)
    cut = lambda member: jax.lax.slice_in_dim(grouped, offsets[member], offsets[member] + rows[member], axis=axis + 1)
    return {member: cut(member).reshape(*leading, -1, *trailing) for member in rows}


def _join(members: list[Array], part: str, rows: Mapping[str, int]) -> Array:
    axis = _row_axis(members[0], part)
    leading, trailing = members[0].shape[:axis], members[0].shape[axis + 1 :]
    groups = members[0].shape[axis] // next(iter(rows.values()))
    grouped = [leaf.reshape(*leading, groups, -1, *trailing) for leaf in members]
    return jnp.concatenate(grouped, axis + 1).reshape(*leading, groups * sum(rows.values()), *trailing)
