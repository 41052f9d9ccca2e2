"""Passes of attention over random trees, and the same passes after some of their tokens were committed."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.pallas_kernels.tree_attention.reference import tree_attention as reference

SCALE = 0.3


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    slots: int


def random_parents(seed: int, nodes: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, nodes))]


def tree_pass(seed: int, sizes: Sizes, lengths, parents: list[int]) -> tuple:
    """Arguments of `tree_attention` in bfloat16: a row per length, all with the tree of these parents."""
    rng, batch, nodes = np.random.default_rng(seed), len(lengths), len(parents)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    mask, depth = np.eye(nodes, dtype=bool), np.zeros(nodes, int)
    for i in range(1, nodes):
        mask[i] |= mask[parents[i]]
        depth[i] = depth[parents[i]] + 1
    length = np.array(lengths, np.int32)
    heads, kv_heads, dim, slots = sizes
    return (
        normal(batch, nodes, heads, dim), normal(batch, kv_heads, nodes, dim), normal(batch, kv_heads, nodes, dim),
        normal(batch, kv_heads, slots, dim), normal(batch, kv_heads, slots, dim), jnp.asarray(length),
        jnp.asarray(length[:, None] + depth, jnp.int32), jnp.asarray(np.broadcast_to(mask, (batch, nodes, nodes))),
    )  # fmt: skip


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def committed(arrays: tuple, path: list[int]) -> tuple:
    """The same pass after the first nodes of a path were committed, over the last one alone."""
    q, k, v, prefix_k, prefix_v, length, positions, _ = arrays
    prefix_k, prefix_v = np.array(prefix_k), np.array(prefix_v)
    for row, start in enumerate(np.asarray(length)):
        for place, node in enumerate(path[:-1]):
            prefix_k[row, :, start + place] = k[row, :, node]
            prefix_v[row, :, start + place] = v[row, :, node]
    last = path[-1:]
    return (
        q[:, last], k[:, :, last], v[:, :, last], jnp.asarray(prefix_k), jnp.asarray(prefix_v), length + len(path) - 1,
        positions[:, last], jnp.ones((len(q), 1, 1), bool),
    )  # fmt: skip


def differing(run, arrays: tuple, parents: list[int], nodes=None) -> int:
    """Numbers of a tree's output, [B, T, ...], that are not those of its nodes after their ancestors were committed."""
    tree, count = np.asarray(run(*arrays), np.float32), 0
    for node in range(len(parents)) if nodes is None else nodes:
        alone = np.asarray(run(*committed(arrays, path_to(node, parents))), np.float32)
        count += int((alone[:, 0] != tree[:, node]).sum())
    return count


def exact(arrays: tuple, **options) -> np.ndarray:
    """The specification, in float32."""
    wide = [x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x for x in arrays]
    return np.asarray(reference(*wide, scale=SCALE, **options))
