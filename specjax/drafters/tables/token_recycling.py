"""Token Recycling: draft a static tree from the tokens that the target recently predicted after each token.

Luo et al., Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling
(ACL 2025), arXiv 2408.08696.

Rule: a matrix M[V, k] stores the k most likely successors of each token, best first. The child of rank r of a node with
token t is M[t, r]. After each pass every node i of the tree, accepted or not, writes M[token_i] <- top-k of logits_i.
Guarantee: distribution (a point-mass tree).
Deviations: each row has its own matrix, so that a row does not depend on its batch. Unknown successors are left out of
the tree; the authors draft token 0. The matrix has at most SLOTS tokens, which keeps it small enough for every row.
Tokens that are equal modulo SLOTS share a slot, and the latest one counts. Within a tree, accepted nodes win, then
shallower ones, then earlier ones. The authors keep one matrix for all requests. Here `DecodeResult.drafter` contains it
for the next call, which reads the row's own slots first. If several rows wrote a slot, the first row counts.
`read_prompt` fills the matrix from the prompt's outputs too; the authors do not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import gather_at, take_along
from specjax.catalog import Method, Option, TypicalAcceptance, shared
from specjax.errors import UsageError
from specjax.pallas_kernels.gumbel_topk import gumbel_topk, likeliest
from specjax.trees.operations import compact
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, Hooks, Output, TokenTree, Traits, TreeSize

METHOD = Method(
    name="token_recycling",
    kind="drafter",
    guarantee="distribution",
    summary="fills a static tree with the tokens that the target recently predicted after each token",
    paper="Luo et al. 2024, arXiv 2408.08696",
    acceptance=TypicalAcceptance(
        (0.249, 0.047, 0.022, 0.013, 0.010, 0.009, 0.006, 0.006),
        f"{shared.SMOLLM2}: 1.40 tokens per pass of trees of 7 nodes, with the ratios of ACCEPTED_RANKS",
    ),
    options=(
        shared.num_nodes(80),
        shared.PATHS,
        Option("read_prompt", "yes_or_no", False, "learn from the target's outputs for the prompt too"),
        Option("keep_chances", "yes_or_no", False, "store the log-probabilities of the successors too"),
    ),
    cpu_options={"num_nodes": 7},
    arguments=("vocab_size",),
)


RANKS = 8
SLOTS = 1 << 15
"""Maximum number of tokens of a matrix.

One matrix for all rows would take less memory. But eight texts of SmolLM2, from eight Spec-Bench tasks, then took 410
passes instead of 390, because recent tokens of other texts fit a text less.
"""

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
    """Return the 80 rank paths of the authors' tree."""
    return [
        (*map(int, parent), rank)
        for level in _CHILDREN.values()
        for parent, children in level.items()
        for rank in range(children)
    ]


def best_paths(num_nodes: int) -> list[tuple[int, ...]]:
    """Return the `num_nodes` most likely paths of the authors' tree, for machines on which 80 nodes are too slow.

    The score of a path is the product of ACCEPTED_RANKS over its ranks. These are the frequencies with which a rank was
    the next token: SmolLM2-135M-Instruct, greedy, 3,032 tokens after Spec-Bench prompts
    (benchmarks/token_recycling_ranks.py).
    """

    def score(path):
        product = 1.0
        for rank in path:
            product *= ACCEPTED_RANKS[rank]
        return product

    return sorted(paper_tree(), key=lambda path: (-score(path), len(path), path))[:num_nodes]


ACCEPTED_RANKS = (0.506, 0.095, 0.044, 0.026, 0.020, 0.019, 0.013, 0.013)


class Recycled(NamedTuple):
    """The matrix M; token t has slot t mod K. The parameters are a matrix of an earlier call, without the axis B.

    The slots are the last axis, because TPUs pad the last axis of an array to 128.
    """

    owner: Array  # int32[B, K], the token that has the slot; -1: free
    tokens: Array  # int32[B, 8, K], its successors, best first; -1: unknown
    log_p: Array | None  # float32[B, 8, K], log-probabilities of the successors; None: not stored

    def slot(self, token: Array) -> Array:
        """Return the slot of token int32[B, n], whether it is stored or not."""
        return token % self.owner.shape[-1]

    def after(self, token: Array, rank: np.ndarray) -> tuple[Array, Array | None]:
        """Return the successors of token int32[B, n] and their log p; -1 for unknown successors.

        Args:
          rank: int[n], one rank for each token, with results [B, n]; or int[1, r], r ranks, with results [B, n, r].
        """
        token = token.reshape(*token.shape, *[1] * (rank.ndim - 1))
        row, slot = np.arange(len(self.owner)).reshape(-1, *[1] * rank.ndim), self.slot(token)
        log_p = None if self.log_p is None else gather_at(self.log_p, row, rank, slot)
        return jnp.where(self.has(token), gather_at(self.tokens, row, rank, slot), -1), log_p

    def has(self, token: Array) -> Array:
        """Return bool[B, ...], true if the token int32[B, ...] owns its slot. A matrix of one row serves all rows."""
        row = np.arange(len(self.owner)).reshape(-1, *[1] * (token.ndim - 1))
        return gather_at(self.owner, row, self.slot(token)) == token


class SuccessorLookup(NamedTuple):
    """Look-up in the row's own matrix, then in the matrix of earlier calls for tokens without a slot."""

    own: Recycled
    earlier: Recycled | tuple[()]  # the parameters

    def after(self, token: Array, rank: np.ndarray) -> tuple[Array, Array | None]:
        """Return successors and their log p; see `Recycled.after`."""
        tokens, log_p = self.own.after(token, rank)
        if not self.earlier:
            return tokens, log_p
        earlier_tokens, earlier_log_p = jax.tree.map(lambda x: x[None], self.earlier).after(token, rank)
        is_own = self.own.has(token).reshape(*token.shape, *[1] * (rank.ndim - 1))
        pick = lambda x, y: jnp.where(is_own, x, y)
        return pick(tokens, earlier_tokens), None if log_p is None else pick(log_p, earlier_log_p)


class Successors(NamedTuple):
    """The most likely successors of nodes."""

    tokens: Array  # int32[B, N, 8]; -1: no further successor
    log_p: Array | None  # float32[B, N, 8]


class RecyclingUpdate(NamedTuple):
    """Rows of M to write after a target pass."""

    tokens: Array  # int32[B, N], the tokens of the rows
    valid: Array  # bool[B, N]
    order: Array  # int32[B, N]; of several tokens of one slot, the lowest wins
    best: Successors


@functools.cache
def token_recycling(
    vocab_size: int,
    *,
    num_nodes: int = 80,
    tree: tuple[tuple[int, ...], ...] | None = None,
    read_prompt: bool = False,
    keep_chances: bool = False,
) -> Drafter:
    """Draft a static tree of `num_nodes` tokens (at most 80), or of the rank paths `tree`, from the matrix.

    Args:
      read_prompt: learn from the target's outputs for the prompt; this costs a head and a top-k for each of its tokens.
      keep_chances: store the log-probabilities of the tokens too, for drafters that weigh nodes.

    State: the row's own `Recycled`. It takes 36 bytes per row and token of the vocabulary, or 68 with chances, and at
      most 1.2 or 2.2 MB per row. Params: () or the matrix of earlier calls, shared by all rows.
    Raises: UsageError for a budget outside 1 ... 80 or a rank above 7.
    """
    if tree is None and not 1 <= num_nodes <= 80:
        raise UsageError(f"num_nodes must be from 1 to 80, not {num_nodes}")
    template = Template(best_paths(num_nodes) if tree is None else tree)
    if template.ranks.max() >= RANKS:
        raise UsageError(f"the tree has rank {template.ranks.max()}, but the matrix has ranks 0 to {RANKS - 1}")

    def init(params, context):
        batch = context.tokens.shape[0]
        slots = min(vocab_size, SLOTS)
        shape = (batch, RANKS, slots)
        chances = jnp.full(shape, -jnp.inf, jnp.float32) if keep_chances else None
        return Recycled(jnp.full((batch, slots), -1, jnp.int32), jnp.full(shape, -1, jnp.int32), chances)

    def propose(params, keys, matrix: Recycled, context, limit):
        return compact(recycled_tree(template, SuccessorLookup(matrix, params), context, limit)), matrix

    def observe(params, matrix: Recycled, context: Context, tree, verdict, output) -> RecyclingUpdate:
        width, n = tree.tokens.shape[1], template.num_nodes
        # The tree may come from any drafter.
        fit = lambda x: jnp.pad(x[:, :n], ((0, 0), (0, max(n - width, 0)), *[(0, 0)] * (x.ndim - 2)))
        on_path = jnp.any(verdict.path[:, :, None] == jnp.arange(n), 1)
        order = jnp.arange(n) + jnp.where(on_path, 0, n)  # nodes are in order of depth
        best = jax.tree.map(fit, successors_of(output, n, keep_chances))
        return RecyclingUpdate(fit(tree.tokens), fit(tree.valid), order, best)

    def update(params, matrix: Recycled, rows: RecyclingUpdate, verdict) -> Recycled:
        return _write(matrix, *rows)

    def read(params, matrix: Recycled, context: Context, tokens, count, output) -> Recycled:
        order = jnp.broadcast_to(-jnp.arange(tokens.shape[1]), tokens.shape)  # the latest wins
        valid = jnp.arange(tokens.shape[1]) < count[:, None]
        return _write(matrix, tokens, valid, order, best_tokens(output.logits, keep_chances))

    return Drafter(
        propose=propose,
        size=TreeSize(template.num_nodes, template.max_depth),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(
            widths=tuple(w for w in (1, 8, 16, 32) if w < template.num_nodes), follows_any_tree=True, reads_best=RANKS
        ),
        hooks=Hooks(prefill=read if read_prompt else None, export=_export),
    )


def recycled_tree(template: Template, successors: SuccessorLookup, context: Context, limit: Array) -> TokenTree:
    """Fill the template below the root; nodes are valid if they are known and no deeper than `limit` int32[B]."""
    level = context.root  # tokens; -1: unknown
    tokens = [level]
    for place, ranks in template.below_root():
        parent = level[:, place]
        level = jnp.where(parent >= 0, successors.after(jnp.maximum(parent, 0), ranks)[0], -1)
        tokens.append(level)
    return template.filled(tokens, limit)


def successors_of(output: Output, count: int, keep_chances: bool) -> Successors:
    """Return the best tokens of the first `count` nodes of a pass."""
    if output.best is None:
        return best_tokens(output.logits[:, :count], keep_chances)
    tokens, logits, total = (x[:, :count] for x in output.best)
    score = logits - total[..., None]
    return _padded(tokens[..., :RANKS], score[..., :RANKS], keep_chances)


def best_tokens(logits: Array, keep_chances: bool) -> Successors:
    """Return the best tokens of each row of logits [B, N, V]; -1 if no further token has probability."""
    count = min(RANKS, logits.shape[-1])
    best, score = likeliest(logits, count) if keep_chances else gumbel_topk(None, logits, count)
    return _padded(best, score, keep_chances)


def _padded(best: Array, score: Array, keep_chances: bool) -> Successors:
    """Return RANKS successors, -1 for tokens without probability, of at most as many tokens and scores [B, N, k]."""
    filled = lambda x, value: jnp.pad(x, ((0, 0), (0, 0), (0, RANKS - x.shape[2])), constant_values=value)
    best = filled(jnp.where(score > -jnp.inf, best, -1), -1)
    return Successors(best, filled(score, -jnp.inf) if keep_chances else None)


def _write(matrix: Recycled, tokens: Array, valid: Array, order: Array, best: Successors) -> Recycled:
    """Write `best` to the slots of `tokens` int32[B, N]; of several tokens of one slot, the lowest order wins.

    The winner is computed first, because the result of several writes to one slot is undefined.
    """
    batch, n = tokens.shape
    place, slot = jnp.broadcast_to(order, (batch, n)), matrix.slot(tokens)
    same = (slot[:, :, None] == slot[:, None, :]) & valid[:, None, :]
    beaten = jnp.any(same & (place[:, None, :] < place[:, :, None]), 2)
    target = jnp.where(valid & ~beaten, slot, matrix.owner.shape[1])
    rows = np.arange(batch)[:, None]
    write = lambda old, new: old.at[rows, :, target].set(new, mode="drop")
    written = jax.tree.map(write, Successors(matrix.tokens, matrix.log_p), best)
    return Recycled(matrix.owner.at[rows, target].set(tokens, mode="drop"), *written)


def _export(params, matrix: Recycled) -> Recycled:
    """Merge the rows into one matrix: per slot the first row that wrote it, else the matrix of earlier calls."""
    is_written = matrix.owner >= 0  # [B, K]
    row = jnp.argmax(is_written, 0)
    take = lambda x: take_along(x, row.reshape(1, *[1] * (x.ndim - 2), -1), 0)[0]
    merged = jax.tree.map(take, matrix)
    if not params:
        return merged
    return jax.tree.map(lambda new, old: jnp.where(jnp.any(is_written, 0), new, old), merged, params)
