"""Sizes of DDTree's trees (`ddtree:auto`): the number of nodes with the most tokens per second.

DDTree (2026), arXiv 2604.12989, tries fixed sizes. Choosing the size by a cost model is ours.

Rule: draft the N best prefixes, for the widest pass that can pay. The value of a node is the product, down its path, of
the acceptance rate of each node given its parent. Sort the nodes by it, v_1 >= v_2 >= ... Verify w - 1 nodes, where w
is the width of the target pass that maximises
  sum over rows of (1 + v_1 + ... + v_{w-1}) / (costs[w] + cost of the draft);  w = 1: 1 / costs[1], without a draft.
The acceptance rate of a node is calibrated: (hits + PRIOR q) / (trials + PRIOR), counted by depth and by the size of q.
A node is a trial once the text has reached its parent's place in the same step, verified or not, and a hit if the text
has its token. While drafts save nothing on average, the head pauses for REST steps.
Guarantee: a point-mass tree, for verification by matching. The size depends on the text of all rows before the step, so
it leaves texts unchanged. It is one program: the widths are branches of the target pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs as costs_of
from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.drafters.widths import RECENT, PassWidths, best_width, default_widths, select_passes, weight_of
from specjax.models.heads.contract import DraftHead, Head
from specjax.trees import Builder, operations
from specjax.trees.growing import GrownTree
from specjax.trees.node_statistics import MEMORY, PRIOR, Counts
from specjax.types import Array, Context, PyTree, Target, TokenTree

EDGES = (0.02, 0.05, 0.15, 0.4, 0.7, 0.9)
"""Edges of the classes of q."""
REST = 7
"""Plain steps between two drafts while drafting does not pay."""
HOPE = 0.25
"""Prior of the expected savings of a draft, in passes of width 1."""


class Sizing(NamedTuple):
    """Static settings: costs of passes, and the platform of the program."""

    costs: costs_of.Costs = None  # per width of `widths`, or a curve; None: the rule of thumb
    platform: str | None = None  # None: this device

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the target pass to choose from."""
        return default_widths(self.platform)

    def passes(self, batch: int, target: Target | None) -> PassWidths:
        """Return the passes that can pay for `batch` rows, and their costs."""
        assert target is not None
        dtype = costs_of.dtype_of(target)
        return select_passes(self.widths, self.costs, batch, target.model.vocab_size, dtype, self.platform, target)

    def pass_costs(self, batch: int, target: Target | None, builder: Builder) -> np.ndarray:
        """Return the costs float32[D + 1] of passes that verify chains of 0 ... D tokens, in passes of one token.

        Each chain has the narrowest compiled width that it fits. Costs that are numbers are those of the D + 1 lengths.

        Raises: UsageError for another number of costs.
        """
        lengths = np.arange(builder.max_depth + 1)
        costs_of.check(self.costs, len(lengths), "length of a chain")
        if self.costs is not None and not isinstance(self.costs, costs_of.Curve):
            return np.asarray(self.costs, np.float32)
        assert target is not None
        widths = sorted({1, *builder.widths, builder.num_nodes})
        shares, dtype = costs_of.shares_of(target, self.platform), costs_of.dtype_of(target)
        costs = costs_of.evaluate(self.costs, widths, batch, dtype, self.platform, shares)
        return np.asarray(costs)[np.searchsorted(widths, lengths + 1)]

    def draft_cost(self, context: Context, head: Head, params: PyTree, levels: int) -> float:
        """Return the cost of a draft of `levels` levels in passes of width 1, by a rule of thumb."""
        assert context.target is not None
        return costs_of.of_head(context.target, DraftHead(head, params), levels, self.platform, context)


SIZING = Sizing()


class DraftedClasses(NamedTuple):
    """All drafted nodes of a step, for the counts."""

    tokens: Array  # int32[B, N]
    parents: Array  # int32[B, N]
    valid: Array  # bool[B, N]
    kind: Array  # int32[B, N], class


class SizeRecord(NamedTuple):
    """The results of earlier steps that set the sizes of trees."""

    counts: Counts  # [B, classes]
    drafted: DraftedClasses
    promise: Array  # float32[], moving average of the savings of drafts, in passes of width 1
    rest: Array  # int32[], steps until the next draft


def init_record(batch: int, num_nodes: int, max_depth: int) -> SizeRecord:
    """Return the record of rows without any step."""
    zeros = jnp.zeros((batch, max_depth * (len(EDGES) + 1)))
    none = jnp.zeros((batch, num_nodes), jnp.int32)
    return SizeRecord(Counts(zeros, zeros), DraftedClasses(none, none, none > 0, none), jnp.float32(HOPE), jnp.int32(0))


def record_axes(record: SizeRecord) -> SizeRecord:
    """Return the batch axis of each array, like `Hooks.axes`."""
    return batch_axes.rows_first(record)._replace(promise=batch_axes.SHARED, rest=batch_axes.SHARED)


def choose_size(
    passes: PassWidths, draft_cost: float, record: SizeRecord, grown: GrownTree, context: Context, limit: Array
) -> tuple[TokenTree, SizeRecord]:
    """Return the tree of the nodes to verify, and the record with all drafted nodes.

    Args:
      grown: with `chances` float32[B, N], q of each node.
    """
    tree, q = grown.tree, grown.chances
    assert q is not None
    depth = operations.depths(tree.parents)
    edge = jnp.sum(q[:, :, None] >= jnp.asarray(EDGES), 2, dtype=jnp.int32)
    kind = jnp.clip(depth - 1, 0) * (len(EDGES) + 1) + edge
    chance = calibrated(record.counts, kind, q)
    above = operations.ancestor_mask(tree.parents)
    drafted = tree.valid & (depth > 0)
    log_chance = jnp.where(drafted, jnp.log(jnp.maximum(chance, 1e-30)), 0.0)
    value = jnp.where(drafted, jnp.exp(jnp.sum(jnp.where(above, log_chance[:, None, :], 0.0), 2)), 0.0)
    record = record._replace(drafted=DraftedClasses(tree.tokens, tree.parents, drafted, kind))
    tree, value = operations.sort_by_score(tree, value)
    costs = passes.costs + draft_cost * (np.asarray(passes.widths) > 1)
    width, saved = best_width(passes.widths, costs, value, weight_of(context.remaining, limit > 0))
    promise = record.promise + RECENT * (jnp.where(width > 1, saved, -draft_cost) - record.promise)
    pause_length = jnp.where((promise <= 0) & (width == 1), REST, jnp.zeros_like(record.rest))
    return tree._replace(valid=tree.valid & (jnp.arange(value.shape[1]) < width)), record._replace(
        promise=promise, rest=pause_length
    )


def pause(record: SizeRecord) -> SizeRecord:
    """Return the record of a step without a draft."""
    empty = record.drafted._replace(valid=jnp.zeros_like(record.drafted.valid))
    return record._replace(drafted=empty, rest=jnp.maximum(record.rest - 1, 0))


def calibrated(counts: Counts, kind: Array, q: Array) -> Array:
    """Return float32[B, N]: the acceptance rate of nodes given their parents, from counts [B, C] of their classes.

    Rows share their counts, because one row has few trials.
    """
    total = jax.tree.map(lambda x: jnp.broadcast_to(jnp.sum(x, 0), x.shape), counts)
    at = lambda x: take_along(x, kind, 1)
    return (at(total.hits) + PRIOR * q) / (at(total.trials) + PRIOR)


def count(record: SizeRecord, tokens: Array, number: Array) -> SizeRecord:
    """Count the drafted nodes against the text of the step: the first `number` int32[B] of tokens int32[B, T]."""
    drafted = record.drafted
    is_trial, right = find_trials(drafted.tokens, drafted.parents, drafted.valid, tokens, number)
    classes = record.counts.trials.shape[1]
    one_hot = (drafted.kind[:, :, None] == jnp.arange(classes)) & is_trial[:, :, None]
    trials = jnp.sum(one_hot, 1, dtype=jnp.float32)
    hits = jnp.sum(one_hot & right[:, :, None], 1, dtype=jnp.float32)
    decay = MEMORY**trials
    counts = Counts(record.counts.hits * decay + hits, record.counts.trials * decay + trials)
    return record._replace(counts=counts)


def find_trials(drafted: Array, parents: Array, valid: Array, tokens: Array, number: Array) -> tuple[Array, Array]:
    """Return bool[B, N] each: nodes whose parents are on the path of the text, and nodes that are on it themselves.

    Args:
      drafted, parents, valid: [B, N] each, a tree. tokens: int32[B, T], the text; the first `number` int32[B] count.
    """
    depth, above = operations.depths(parents), operations.ancestor_mask(parents)
    text = take_along(tokens, jnp.clip(depth - 1, 0, tokens.shape[1] - 1), 1)
    reached = valid & (depth <= number[:, None]) & (depth <= tokens.shape[1])
    agrees = reached & (text == drafted) | (depth == 0)
    right = jnp.all(agrees[:, None, :] | ~above, 2)
    return reached & take_along(right, jnp.maximum(parents, 0), 1), right
