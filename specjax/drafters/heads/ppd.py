"""Parallel Prompt Decoding (PPD): the pass that verifies a tree reads prompts below its nodes, and what it says of
those below the last accepted one is the next draft.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628.

Rule: `specjax.models.heads.ppd`; node (i_1, ..., i_j) of the tree is the guess of rank i_j at distance j. A row with s
guesses verifies the tree of state s, whose node v has c(v) prompts below it; where the path ends at v, state c(v) is
next. A row begins without guesses, in state 0: the root alone, and prompts below it. Trees and prompts are those of the
most tokens per cost, `specjax.trees.shape_search.dynamic_sparse`, by the costs of `specjax.costs`. There is no pass of the head.
Guarantee: distribution (a point-mass tree, q = 1 of each guess). The paper's typical acceptance is `verifiers.typical`,
lossy. Prompts are not nodes of the tree (`specjax.types.SoftPrompts`): no rule sees one, and no node sees one.
Deviations: the root and any node may have prompts or none, whichever is worth more; the authors give every candidate at
least one and the root none. A state's pass is compiled as wide as its own tree; theirs are filled up to one width. In a
batch all rows pass by the width of the largest tree among them, which the costs do not know.
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
from specjax.trees.shape_search.dynamic_sparse import Accuracy, Rates, Shape, dynamic_sparse
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, Hooks, Output, SoftPrompts, TokenTree, Traits, TreeSize, Verdict

LARGEST = 256
CPU_NODES, NODES = 16, 64
"""Tokens of a pass, at most: as `auto` has it, by how dear wide passes are."""
RATES = 0.5, 0.35, 0.25
"""By distance, the chance that a guess is right once those of lower ranks are not; below the last it stays. An
assumption, for heads of which nothing was measured."""
RANKS = 10


class State(NamedTuple):
    """What the last pass said."""

    guesses: Array  # int32[B, m, R], the likeliest tokens at each distance, best first
    known: Array  # int32[B], the distances for which there are any: the state of the row


def ppd(
    head: DraftHead,
    num_nodes: int | None = None,
    *,
    accuracy: Accuracy | None = None,
    costs: costs_of.Costs = None,
    platform: str | None = None,
) -> Drafter:
    """The trees that the costs choose, in passes of at most `num_nodes` tokens.

    Args:
      num_nodes: tokens of a pass, root and prompts included; default: CPU_NODES or NODES, by the platform.
      accuracy: [distance][rank], how often this guess is right, as `models.heads.ppd.rank_accuracy` measures; default:
        an assumption, RATES.
      costs: from `specjax.costs`, or numbers, of passes over 1, 2, ..., `num_nodes` tokens; None: `costs.estimated` for
        one row and the dtype of the head. platform: what the program is for, "cpu", "gpu" or "tpu"; None: what JAX runs
        on.

    State: m R token ids per row.
    Raises: UsageError for chances that are none or of more distances than the head has, costs that do not fit, or too
      few nodes for a candidate and a prompt.
    """
    _, shapes = plan_of(head.head, num_nodes, accuracy, costs, platform)
    return _functions(head.head, shapes).replace(params=head.params)


def plan_of(
    head: Head,
    num_nodes: int | None = None,
    accuracy: Accuracy | None = None,
    costs: costs_of.Costs = None,
    platform: str | None = None,
) -> tuple[Rates, tuple[Shape, ...]]:
    """The trees, by state, and what they are worth. Arguments: of `ppd`."""
    c = head.config
    if num_nodes is None:
        num_nodes = CPU_NODES if (platform or jax.default_backend()) == "cpu" else NODES
    accuracy = assumed(c.num_prompts) if accuracy is None else tuple(map(tuple, accuracy))
    if len(accuracy) > c.num_prompts:
        raise UsageError(f"accuracy is of {len(accuracy)} distances, but the head has prompts for {c.num_prompts}")
    if num_nodes < 2 + c.copies:
        raise UsageError(
            f"num_nodes must be at least {2 + c.copies} (root, candidate, a prompt of {c.copies}), not {num_nodes}"
        )
    if num_nodes > LARGEST:
        raise UsageError(f"num_nodes must be at most {LARGEST}, whose trees take seconds to plan, not {num_nodes}")
    costs_of.check(costs, num_nodes, "token of a pass")
    curve = costs_of.evaluate(costs, range(1, num_nodes + 1), 1, c.dtype, platform)
    return dynamic_sparse(accuracy, tuple(map(float, curve)), c.copies)


def assumed(distances: int) -> Accuracy:
    """RATES as a table."""
    return tuple(rank_acceptance(RATES[min(i, len(RATES) - 1)], RANKS) for i in range(distances))


class _Tables(NamedTuple):
    """The shapes of all states, one row each, filled up to N nodes and P prompts."""

    parents: np.ndarray  # int32[S, N]
    depths: np.ndarray
    ranks: np.ndarray
    is_node: np.ndarray  # bool[S, N]
    prompts: np.ndarray  # int32[S, N], how many of each node
    first: np.ndarray  # int32[S, N], the first of them
    owner: np.ndarray  # int32[S, P], the node above each prompt; -1: none
    distance: np.ndarray  # int32[S, P], 0: the first below it
    room: np.ndarray  # int32[N + 1], prompts that a pass has room for, whose tree has so many nodes or the next width
    widths: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.max()) + 1


def _tables(shapes: tuple[Shape, ...]) -> _Tables:
    templates = [Template(shape.paths) for shape in shapes]
    sizes = [template.num_nodes for template in templates]
    n, most = max(sizes), max(sum(shape.prompts) for shape in shapes)
    fill = lambda rows, size, value: np.array([[*row, *[value] * (size - len(row))] for row in rows], np.int32)
    rows = lambda name: fill([getattr(template, name) for template in templates], n, 0)
    counts = [list(shape.prompts) for shape in shapes]
    widths = sorted(set(sizes))
    room_of = {width: max(sum(c) for c, size in zip(counts, sizes, strict=True) if size <= width) for width in widths}
    return _Tables(
        parents=rows("parents"),
        depths=rows("depths"),
        ranks=rows("ranks"),
        is_node=fill([[1] * size for size in sizes], n, 0).astype(bool),
        prompts=fill(counts, n, 0),
        first=fill([[*itertools.accumulate([0, *row[:-1]])] for row in counts], n, 0),
        owner=fill([[node for node, c in enumerate(row) for _ in range(c)] for row in counts], most, -1),
        distance=fill([[i for c in row for i in range(c)] for row in counts], most, 0),
        room=np.array([room_of[next(w for w in widths if w >= max(size, 1))] for size in range(n + 1)], np.int32),
        widths=tuple(widths),
    )


@functools.cache
def _functions(head: Head, shapes: tuple[Shape, ...]) -> Drafter:
    """The drafter, without its parameters."""
    tables, c, vectors_of = _tables(shapes), head.config, head.soft_prompts
    assert vectors_of is not None
    max_depth, copies, n = len(shapes) - 1, c.copies, tables.parents.shape[1]

    def init(params, context: Context) -> State:
        assert context.target is not None
        batch, vocab = len(context.length), context.target.model.vocab_size
        if tables.num_ranks > vocab:
            raise UsageError(f"accuracy is of {tables.num_ranks} ranks and more, and the vocabulary has {vocab} tokens")
        return State(jnp.zeros((batch, max_depth, tables.num_ranks), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def of_state(table: np.ndarray, state: State) -> Array:
        """[B, ...]."""
        return gather_at(jnp.asarray(table), state.known)

    def propose(params, keys, state: State, context: Context, limit) -> tuple[TokenTree, State]:
        depth, rank = of_state(tables.depths, state), of_state(tables.ranks, state)
        place = jnp.maximum(depth - 1, 0) * tables.num_ranks + rank
        guessed = take_along(state.guesses.reshape(len(depth), -1), place, 1)
        tokens = jnp.where(depth == 0, context.root, guessed)
        valid = of_state(tables.is_node, state) & (depth <= limit[:, None])  # in front, for the nodes lie by depth
        return TokenTree(tokens, of_state(tables.parents, state), valid), state

    def prompts(params, state: State, context: Context, tree: TokenTree) -> SoftPrompts:
        width = tree.tokens.shape[1]
        room = int(tables.room[width])
        owner, distance = (of_state(table[:, :room], state) for table in (tables.owner, tables.distance))
        there = (owner >= 0) & (owner < width)
        there &= take_along(tree.valid, jnp.clip(owner, 0, width - 1), 1)
        each = lambda x: jnp.repeat(x, copies, 1)  # [B, room copies]
        above = width + jnp.arange(room * copies) - copies
        parents = jnp.where(each(distance) == 0, jnp.clip(each(owner), 0, width - 1), above)
        vectors = vectors_of(params)[distance]  # [B, room, copies, D]
        return SoftPrompts(vectors.reshape(*parents.shape, -1), parents, each(there))

    def observe(params, state: State, context: Context, tree: TokenTree, verdict: Verdict, output: Output) -> State:
        width = tree.tokens.shape[1]
        last = jnp.maximum(take_along(verdict.path, jnp.maximum(verdict.num_nodes - 1, 0)[:, None], 1), 0)  # [B, 1]
        first, count = (take_along(of_state(table, state), last, 1)[:, 0] for table in (tables.first, tables.prompts))
        # As if the row were alone: the others may have made the pass wider, with room for more.
        room = gather_at(jnp.asarray(tables.room), jnp.sum(tree.valid, 1, dtype=jnp.int32))
        place = jnp.minimum(first[:, None] + jnp.arange(max_depth), int(tables.room[width]) - 1)  # [B, m]
        place = width + place[:, :, None] * copies + jnp.arange(copies)
        said = take_along(output.logits, place.reshape(len(place), -1, 1), 1)
        said = jnp.mean(said.reshape(*place.shape, -1), 2)  # [B, m, V]
        return State(gumbel_topk(None, said, tables.num_ranks)[0], jnp.clip(room - first, 0, count))

    def update(params, state: State, seen: State, verdict: Verdict) -> State:
        return seen

    return Drafter(
        propose=propose,
        size=TreeSize(n, int(tables.depths.max())),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(widths=tuple(width for width in tables.widths if width < n), rewinds=False),
        hooks=Hooks(soft_prompts=prompts),
    )
