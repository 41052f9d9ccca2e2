"""Static trees given by rank paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, TokenTree


def branching_paths(widths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the rank paths of the tree AxBxC."""
    return tuple(
        path for depth in range(1, len(widths) + 1) for path in itertools.product(*(range(w) for w in widths[:depth]))
    )


class Template:
    """A static tree given by rank paths: `(0, 2)` is the third child of the first child of the root.

    The fields are numpy arrays: `parents` int[N], `ranks` int[N] (rank among the siblings; 0 for the root) and `depths`
    int[N]. `levels` is a list of (start, stop), the slice of nodes of each depth.
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        nodes = [(), *sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))]
        index = {path: i for i, path in enumerate(nodes)}
        orphans = [p for p in nodes[1:] if p[:-1] not in index]
        if orphans:
            raise UsageError(f"the path {orphans[0]} of the tree has no parent; add {orphans[0][:-1]}")
        self.parents = np.array([index[p[:-1]] if p else -1 for p in nodes], np.int32)
        self.ranks = np.array([p[-1] if p else 0 for p in nodes], np.int32)
        depth = [len(p) for p in nodes]
        self.depths = np.array(depth, np.int32)
        self.max_depth = max(depth)
        self.levels = [(depth.index(d), depth.index(d) + depth.count(d)) for d in range(self.max_depth + 1)]
        self.num_nodes = len(nodes)

    def below_root(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the parents' indices in the level above, and the ranks of the nodes, for each level from depth 1 on."""
        for (above, _), (start, stop) in itertools.pairwise(self.levels):
            yield self.parents[start:stop] - above, self.ranks[start:stop]

    def filled(self, tokens: Sequence[Array], limit: Array) -> TokenTree:
        """Return the point-mass tree of tokens int32[B, level], one array per level, -1 for no node.

        The tree is no deeper than `limit` int32[B].
        """
        drawn = jnp.concatenate(tokens, 1)
        parents = jnp.broadcast_to(self.parents, drawn.shape)
        return TokenTree(jnp.maximum(drawn, 0), parents, (drawn >= 0) & (self.depths <= limit[:, None]))
