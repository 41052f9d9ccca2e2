"""Token Recycling: draft a static tree from the tokens the target lately thought likely after each token.

Luo et al., Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling
(ACL 2025), arXiv 2408.08696.

Rule: a matrix M[V, k] holds, best first, the k likeliest tokens seen after each token. The child of rank r of a node
with token t is M[t, r]. After each pass every node i of the tree, accepted or not, writes
M[token_i] <- top-k of logits_i.
Guarantee: distribution (a point-mass tree).
Deviations: one matrix per row, empty at the start of a call (the authors keep one for all requests), so that a row does
not depend on its batch; unknown successors are left out of the tree instead of drafted as token 0. Where a token occurs
twice in a tree, accepted nodes win, then shallower ones, then earlier ones.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.tree import Template, compact
from specjax.types import Array, Drafter, TokenTree

RANKS = 8

# Number of children of each rank path, from the authors' code: 80 nodes at depths 8/21/25/15/8/3.
_CHILDREN = {
    1: {"": 8},
    2: {"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1},
    3: {
        "00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1,
        "10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1,
    },
    4: {"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1},
    5: {"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    6: {"00000": 2, "00010": 1},
}  # fmt: skip


def paper_tree() -> list[tuple[int, ...]]:
    """The 80 rank paths of the authors' tree."""
    return [
        (*map(int, parent), rank)
        for level in _CHILDREN.values()
        for parent, children in level.items()
        for rank in range(children)
    ]


def best_paths(num_nodes: int) -> list[tuple[int, ...]]:
    """The `num_nodes` likeliest paths of the authors' tree, for passes that cannot afford 80.

    A path is scored by the product over its ranks of how often that rank names the next token, ACCEPTED_RANKS: SmolLM2-
    135M-Instruct, greedy, 3,032 tokens after Spec-Bench prompts (benchmarks/token_recycling_ranks.py).
    """

    def score(path):
        product = 1.0
        for rank in path:
            product *= ACCEPTED_RANKS[rank]
        return product

    return sorted(paper_tree(), key=lambda path: (-score(path), len(path), path))[:num_nodes]


ACCEPTED_RANKS = (0.506, 0.095, 0.044, 0.026, 0.020, 0.019, 0.013, 0.013)


@functools.cache
def token_recycling(
    vocab_size: int, *, num_nodes: int = 80, tree: tuple[tuple[int, ...], ...] | None = None
) -> Drafter:
    """A static tree of `num_nodes` drafted tokens (at most 80), or of the rank paths `tree`, over the recycled matrix.

    State: int32[B, V, 8], -1 where unknown; 32 bytes per token of the vocabulary and row.
    Raises: UsageError for a budget outside 1 ... 80 or a rank above 7.
    """
    if tree is None and not 1 <= num_nodes <= 80:
        raise UsageError(f"num_nodes must be from 1 to 80, not {num_nodes}")
    template = Template(best_paths(num_nodes) if tree is None else tree)
    if template.ranks.max() >= RANKS:
        raise UsageError(f"the tree asks for rank {template.ranks.max()}, but the matrix keeps ranks 0 to {RANKS - 1}")

    kept = min(RANKS, vocab_size)

    def init(params, context):
        return jnp.full((context.tokens.shape[0], vocab_size, RANKS), -1, jnp.int32)

    def propose(params, keys, matrix, context, limit):
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
        tokens = jnp.pad(root, ((0, 0), (0, template.num_nodes - 1)))
        valid = jnp.zeros(tokens.shape, bool).at[:, 0].set(True)
        row = jnp.arange(tokens.shape[0])[:, None]
        for depth, (start, stop) in list(enumerate(template.levels))[1:]:
            parents, ranks = template.parents[start:stop], template.ranks[start:stop]
            drafted = matrix[row, tokens[:, parents], ranks]
            known = valid[:, parents] & (drafted >= 0) & (depth <= limit[:, None])
            tokens = tokens.at[:, start:stop].set(jnp.where(known, drafted, 0))
            valid = valid.at[:, start:stop].set(known)
        return compact(TokenTree(tokens, jnp.broadcast_to(template.parents, tokens.shape), valid)), matrix

    def update(params, matrix, tree, verdict, output):
        best, _ = gumbel_topk(None, output.logits, kept)
        best = jnp.pad(best, ((0, 0), (0, 0), (0, RANKS - kept)), constant_values=-1)
        return _write(matrix, tree, verdict.path, best)

    return Drafter(
        init=init,
        propose=propose,
        update=update,
        num_nodes=template.num_nodes,
        max_depth=template.max_depth,
        widths=tuple(w for w in (1, 8, 16, 32) if w < template.num_nodes),
    )


def _write(matrix: Array, tree: TokenTree, path: Array, best: Array) -> Array:
    """Write best int32[B, N, k] to the rows of the tree's tokens.

    Of several writers the winner is chosen beforehand.
    """
    batch, n = tree.tokens.shape
    on_path = jnp.any(path[:, :, None] == jnp.arange(n), 1)
    order = jnp.arange(n) + jnp.where(on_path, 0, n)  # lower wins; nodes stand in order of depth
    same = (tree.tokens[:, :, None] == tree.tokens[:, None, :]) & tree.valid[:, None, :]
    beaten = jnp.any(same & (order[:, None, :] < order[:, :, None]), 2)
    target = jnp.where(tree.valid & ~beaten, tree.tokens, matrix.shape[1])
    return matrix.at[jnp.arange(batch)[:, None], target].set(best, mode="drop")
