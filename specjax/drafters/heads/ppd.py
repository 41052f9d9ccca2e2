"""Parallel Prompt Decoding (PPD): the target pass reads prompts below its nodes, and predicts the next draft there.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628.

Rule: `specjax.models.heads.ppd` defines the prompts. Node (i_1, ..., i_j) of the tree is the guess of rank i_j at
distance j. A row with guesses for s distances verifies the tree of state s. Its node v has c(v) prompts below it, and
if the accepted path ends at v, the next state is c(v). A row starts without guesses in state 0: the root and the
prompts below it. `specjax.trees.shape_search.dynamic_sparse` chooses trees and prompts for the most tokens per cost,
with the costs of `specjax.costs`. The head has no pass of its own.
Guarantee: distribution (a point-mass tree, q = 1 for each guess). The paper's typical acceptance is
`verifiers.typical`, lossy. Prompts are not nodes of the tree (`specjax.types.SoftPrompts`), so neither the rule nor any
node reads them.
Deviations: the root and every node may have prompts or none, whichever is worth more. The authors give each candidate
at least one and the root none. The pass of a state is compiled with the width of its own tree; the authors pad all
passes to one width. In a batch, the largest tree sets the width for all rows, which the costs do not model.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs as costs_of
from specjax.arrays.indexing import gather_at, take_along
from specjax.costs.tokens import rank_acceptance
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead, Head
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.trees.shape_search.dynamic_sparse import Accuracy, Rates, SparseTree, dynamic_sparse
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, Hooks, Output, SoftPrompts, TokenTree, Traits, TreeSize, Verdict

MAX_NODES = 256
CPU_NODES, NODES = 16, 64
"""Most tokens of a pass, as in `auto`: wide passes are expensive on CPUs."""
RATES = 0.5, 0.35, 0.25
"""Assumed probability, by distance, that a guess is right if all better ranks are wrong; the last one repeats.

It is used for heads without measured accuracies."""
RANKS = 10


class State(NamedTuple):
    """The guesses from the last target pass."""

    guesses: Array  # int32[B, m, R], the most likely tokens at each distance, best first
    num_distances: Array  # int32[B], number of distances with guesses: the state of the row


def ppd(
    head: DraftHead,
    num_nodes: int | None = None,
    *,
    accuracy: Accuracy | None = None,
    costs: costs_of.Costs = None,
    platform: str | None = None,
) -> Drafter:
    """Draft the trees with the most tokens per cost, in passes of at most `num_nodes` tokens.

    Args:
      num_nodes: tokens of a pass, including root and prompts; default: CPU_NODES or NODES, by the platform.
      accuracy: [distance][rank], fraction of correct guesses, as measured by `models.heads.ppd.rank_accuracy`;
        default: assumed from RATES.
      costs: costs from `specjax.costs`, or numbers, of passes over 1, 2, ..., `num_nodes` tokens; None:
        `costs.estimated` for one row and the dtype of the head.
      platform: "cpu", "gpu" or "tpu", where the program will run; None: JAX's default backend.

    State: m R token ids per row.
    Raises: UsageError for invalid probabilities, more distances than the head has, costs of another length, or too few
      nodes for a candidate and a prompt.
    """
    _, shapes = plan_trees(head.head, num_nodes, accuracy, costs, platform)
    return _functions(head.head, shapes).replace(params=head.params)


def plan_trees(
    head: Head,
    num_nodes: int | None = None,
    accuracy: Accuracy | None = None,
    costs: costs_of.Costs = None,
    platform: str | None = None,
) -> tuple[Rates, tuple[SparseTree, ...]]:
    """Return the rates and the trees by state. Args: see `ppd`."""
    c = head.config
    if num_nodes is None:
        num_nodes = CPU_NODES if (platform or jax.default_backend()) == "cpu" else NODES
    accuracy = assumed_accuracy(c.num_prompts) if accuracy is None else tuple(map(tuple, accuracy))
    if len(accuracy) > c.num_prompts:
        raise UsageError(f"accuracy has {len(accuracy)} distances, but the head has prompts for {c.num_prompts}")
    if num_nodes < 2 + c.copies:
        raise UsageError(
            f"num_nodes must be at least {2 + c.copies} (root, candidate, a prompt of {c.copies}), not {num_nodes}"
        )
    if num_nodes > MAX_NODES:
        raise UsageError(f"num_nodes must be at most {MAX_NODES}, since planning takes seconds there, not {num_nodes}")
    costs_of.check(costs, num_nodes, "token of a pass")
    curve = costs_of.evaluate(costs, range(1, num_nodes + 1), 1, c.dtype, platform)
    return dynamic_sparse(accuracy, tuple(map(float, curve)), c.copies)


def assumed_accuracy(distances: int) -> Accuracy:
    """Return RATES as a table [distance][rank]."""
    return tuple(rank_acceptance(RATES[min(i, len(RATES) - 1)], RANKS) for i in range(distances))


class _PromptTables(NamedTuple):
    """The trees of all states, one row each, padded to N nodes and P prompts."""

    parents: np.ndarray  # int32[S, N]
    depths: np.ndarray
    ranks: np.ndarray
    is_node: np.ndarray  # bool[S, N]
    prompts: np.ndarray  # int32[S, N], prompts of each node
    first: np.ndarray  # int32[S, N], first prompt of each node
    owner: np.ndarray  # int32[S, P], the node above each prompt; -1: none
    distance: np.ndarray  # int32[S, P], distance of the prompt; 0: the first
    room: np.ndarray  # int32[N + 1], prompts that a pass has room for, by the nodes of its tree
    widths: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.max()) + 1


def _make_tables(shapes: tuple[SparseTree, ...]) -> _PromptTables:
    """Build the tables of the trees by state."""
    templates = [Template(shape.paths) for shape in shapes]
    sizes = [template.num_nodes for template in templates]
    n, num_prompts = max(sizes), max(sum(shape.prompts) for shape in shapes)
    fill = lambda rows, size, value: np.array([[*row, *[value] * (size - len(row))] for row in rows], np.int32)
    rows = lambda name: fill([getattr(template, name) for template in templates], n, 0)
    counts = [list(shape.prompts) for shape in shapes]
    widths = sorted(set(sizes))
    room_of = {width: max(sum(c) for c, size in zip(counts, sizes, strict=True) if size <= width) for width in widths}
    return _PromptTables(
        parents=rows("parents"),
        depths=rows("depths"),
        ranks=rows("ranks"),
        is_node=fill([[1] * size for size in sizes], n, 0).astype(bool),
        prompts=fill(counts, n, 0),
        first=fill([[*itertools.accumulate([0, *row[:-1]])] for row in counts], n, 0),
        owner=fill([[node for node, c in enumerate(row) for _ in range(c)] for row in counts], num_prompts, -1),
        distance=fill([[i for c in row for i in range(c)] for row in counts], num_prompts, 0),
        room=np.array([room_of[next(w for w in widths if w >= max(size, 1))] for size in range(n + 1)], np.int32),
        widths=tuple(widths),
    )


@functools.cache
def _functions(head: Head, shapes: tuple[SparseTree, ...]) -> Drafter:
    """Return the drafter without its parameters."""
    tables, c, vectors_of = _make_tables(shapes), head.config, head.soft_prompts
    assert vectors_of is not None
    max_distance, copies, n = len(shapes) - 1, c.copies, tables.parents.shape[1]

    def init(params, context: Context) -> State:
        assert context.target is not None
        batch, vocab = len(context.length), context.target.model.vocab_size
        if tables.num_ranks > vocab:
            raise UsageError(f"accuracy has {tables.num_ranks} or more ranks, but the vocabulary has {vocab} tokens")
        return State(jnp.zeros((batch, max_distance, tables.num_ranks), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def select(table: np.ndarray, state: State) -> Array:
        """Return the table's rows [B, ...] for the states of the batch."""
        return gather_at(jnp.asarray(table), state.num_distances)

    def propose(params, keys, state: State, context: Context, limit) -> tuple[TokenTree, State]:
        depth, rank = select(tables.depths, state), select(tables.ranks, state)
        place = jnp.maximum(depth - 1, 0) * tables.num_ranks + rank
        guesses = take_along(state.guesses.reshape(len(depth), -1), place, 1)
        tokens = jnp.where(depth == 0, context.root, guesses)
        # Nodes are sorted by depth, so the valid ones come first.
        valid = select(tables.is_node, state) & (depth <= limit[:, None])
        return TokenTree(tokens, select(tables.parents, state), valid), state

    def soft_prompts(params, state: State, context: Context, tree: TokenTree) -> SoftPrompts:
        width = tree.tokens.shape[1]
        room = int(tables.room[width])
        owner, distance = (select(table[:, :room], state) for table in (tables.owner, tables.distance))
        is_valid = (owner >= 0) & (owner < width)
        is_valid &= take_along(tree.valid, jnp.clip(owner, 0, width - 1), 1)
        each = lambda x: jnp.repeat(x, copies, 1)  # [B, room copies]
        previous = width + jnp.arange(room * copies) - copies
        parents = jnp.where(each(distance) == 0, jnp.clip(each(owner), 0, width - 1), previous)
        vectors = vectors_of(params)[distance]  # [B, room, copies, D]
        return SoftPrompts(vectors.reshape(*parents.shape, -1), parents, each(is_valid))

    def observe(params, state: State, context: Context, tree: TokenTree, verdict: Verdict, output: Output) -> State:
        width = tree.tokens.shape[1]
        last = jnp.maximum(take_along(verdict.path, jnp.maximum(verdict.num_nodes - 1, 0)[:, None], 1), 0)  # [B, 1]
        first, count = (take_along(select(table, state), last, 1)[:, 0] for table in (tables.first, tables.prompts))
        # Use the room of a batch of this row alone: other rows may have made the pass wider.
        room = gather_at(jnp.asarray(tables.room), jnp.sum(tree.valid, 1, dtype=jnp.int32))
        place = jnp.minimum(first[:, None] + jnp.arange(max_distance), int(tables.room[width]) - 1)  # [B, m]
        place = width + place[:, :, None] * copies + jnp.arange(copies)
        logits = take_along(output.logits, place.reshape(len(place), -1, 1), 1)
        logits = jnp.mean(logits.reshape(*place.shape, -1), 2)  # [B, m, V]
        return State(gumbel_topk(None, logits, tables.num_ranks)[0], jnp.clip(room - first, 0, count))

    def update(params, state: State, observed: State, verdict: Verdict) -> State:
        return observed

    return Drafter(
        propose=propose,
        size=TreeSize(n, int(tables.depths.max())),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(widths=tuple(width for width in tables.widths if width < n), rewinds=False),
        hooks=Hooks(soft_prompts=soft_prompts),
    )
