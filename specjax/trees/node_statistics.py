"""Acceptance statistics of drafted nodes by class, counted after the text has passed each draft.

A complete draft is stored until the text has passed it, verified or not. Then the text determines the nodes that would
have been accepted. So plain decoding also updates the statistics, and they do not depend on the set of verified nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.trees import operations
from specjax.trees.templates import Template
from specjax.types import Array, Context, TokenTree

MEMORY = 0.98
"""Factor on the counts of a class at each new trial, so that about the last WINDOW trials count."""
WINDOW = 1 / (1 - MEMORY)
PRIOR = 6.0
"""Weight of the prior acceptance rate, as a number of trials."""
DOUBT = 3.0
"""Number of expected hits after which the acceptance rates of a source without any hit are halved."""
FADING = 0.95
"""Factor on the recent hits and expectations at each draft."""


class DraftShape(NamedTuple):
    """Static shape of every draft: a chain of `copied` nodes, and templates, below a common root.

    Its arrays are numpy constants, so that a program has no loop from parent to child. That loop took half of the
    drafting time on a TPU.
    """

    copied: int
    parents: np.ndarray  # int32[M]
    depth: np.ndarray  # int32[M]
    above: np.ndarray  # bool[M, M], True if node j is node i or one of its ancestors
    path: np.ndarray  # int32[M, D], nodes on the path to each node, padded with it; D: depth of the templates
    source: np.ndarray  # int32[M], 0: the chain and the first template; 1, 2, ...: later templates

    @property
    def sources(self) -> int:
        return int(self.source.max()) + 1


def make_shape(copied: int, *templates: Template) -> DraftShape:
    """Return the shape of drafts with a chain of `copied` tokens and the nodes of each of `templates`."""
    parents, sources = [np.arange(-1, copied)], [np.zeros(1 + copied)]
    for number, template in enumerate(templates):
        offset = sum(map(len, parents)) - 1
        parents.append(np.where(template.parents[1:] > 0, template.parents[1:] + offset, 0))
        sources.append(np.full(template.num_nodes - 1, number))
    joined, source = np.concatenate(parents).astype(np.int32), np.concatenate(sources).astype(np.int32)
    depth, above = operations.depths(joined[None])[0], operations.ancestor_mask(joined[None])[0]
    at_depth = lambda d: np.argmax(above & (depth == np.minimum(d, depth)[:, None]), 1)
    path = [at_depth(d) for d in range(1, 1 + max(template.max_depth for template in templates))]
    return DraftShape(copied, joined, depth, above, np.stack(path, 1).astype(np.int32), source)


class Drafted(NamedTuple):
    """The tokens of a draft shape at one position of the text. Equal paths may occur in several of its parts."""

    tokens: Array  # int32[B, M]
    valid: Array  # bool[B, M]
    kind: Array  # int32[B, M], class of each node
    start: Array  # int32[B], text length at the time of the draft; 0: no draft


class Counts(NamedTuple):
    """Numbers of trials (nodes whose parent was right) and hits (trials that were right), by class."""

    hits: Array  # float32[B, C]
    trials: Array  # float32[B, C]


class NodeStatistics(NamedTuple):
    """Statistics of past drafts, and the draft that is not counted yet."""

    counts: Counts  # counts of this row's drafts
    pending: Drafted  # the draft that is stored until the text has passed it
    recent: Array  # float32[B, 2, S], recent hits by source, and their number expected from the classes


def init(classes: int, batch: int, shape: DraftShape) -> NodeStatistics:
    """Return the statistics of rows without any draft."""
    none = jnp.zeros((batch, len(shape.parents)), jnp.int32)
    counts = Counts(jnp.zeros((batch, classes)), jnp.zeros((batch, classes)))
    return NodeStatistics(counts, Drafted(none, none > 0, none, none[:, 0]), jnp.zeros((batch, 2, shape.sources)))


def add_earlier(counts: Counts, earlier: Counts) -> Counts:
    """Add `earlier` counts [C] to the counts of rows [B, C].

    The weight of the earlier counts decreases as the rows' trials fill the window.
    """
    share = jnp.maximum(1 - counts.trials / WINDOW, 0)
    return jax.tree.map(lambda rows, past: rows + share * past, counts, earlier)


def merge_counts(earlier: Counts, rows: Counts) -> Counts:
    """Add the counts of all rows [B, C] to `earlier` counts [C], and scale the sum down to the window.

    A long text counts no more than all earlier texts together. It also does not remove the counts that shorter texts
    added during its run.
    """
    both = Counts(earlier.hits + jnp.sum(rows.hits, 0), earlier.trials + jnp.sum(rows.trials, 0))
    return jax.tree.map(lambda x: x * WINDOW / jnp.maximum(both.trials, WINDOW), both)


def count_pending(
    prior: np.ndarray, shape: DraftShape, past: NodeStatistics, context: Context, earlier: Counts
) -> NodeStatistics:
    """Count the nodes of the pending draft once the text has passed it. `prior` and `earlier` are as in `rank`."""
    tokens, valid, kind, start = past.pending
    place = start[:, None] - 1 + shape.depth
    passed = place < context.length[:, None]
    text = take_along(context.tokens, jnp.clip(place, 0, context.tokens.shape[1] - 1), 1)
    agrees = valid & passed & (text == tokens) | (shape.depth == 0)
    right = jnp.all(agrees[:, None, :] | ~shape.above, 2)  # all nodes of the path
    is_trial = valid & (shape.depth > 0) & right[:, np.maximum(shape.parents, 0)]
    is_passed = (start > 0) & ~jnp.any(is_trial & ~passed, 1)  # no trial depends on a token that is not decoded yet
    one_hot = (kind[:, :, None] == jnp.arange(len(prior))) & (is_trial & is_passed[:, None])[:, :, None]  # [B, M, C]
    trials = jnp.sum(one_hot, 1, dtype=jnp.float32)
    hits = jnp.sum(one_hot & right[:, :, None], 1, dtype=jnp.float32)
    decay = MEMORY**trials
    chance = jnp.where(is_trial, _chance(prior, add_earlier(past.counts, earlier), kind), 0.0)
    outcome = jnp.stack([(is_trial & right).astype(jnp.float32), chance], 1)  # [B, 2, M]
    outcome = jnp.stack([jnp.sum(jnp.where(shape.source == s, outcome, 0.0), 2) for s in range(shape.sources)], 2)
    recent = jnp.where(is_passed[:, None, None], FADING * past.recent + outcome, past.recent)
    counts = Counts(past.counts.hits * decay + hits, past.counts.trials * decay + trials)
    return NodeStatistics(counts, past.pending._replace(start=jnp.where(is_passed, 0, start)), recent)


def store_pending(past: NodeStatistics, drafted: Drafted) -> NodeStatistics:
    """Store a draft until the text has passed it, in rows without a pending draft."""
    free = past.pending.start == 0
    pick = lambda new, old: jnp.where(free.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return past._replace(pending=jax.tree.map(pick, drafted, past.pending))


def rank(
    prior: np.ndarray, shape: DraftShape, drafted: Drafted, past: NodeStatistics, earlier: Counts
) -> tuple[TokenTree, Array]:
    """Return the union of all parts, sorted by decreasing acceptance probability of the paths, and these probabilities.

    Args:
      prior: float32[C], acceptance rate of each class without any trial. earlier: counts [C] of other texts.

    Returns: the tree, and float32[B, M]; 0 for the root and after the valid nodes.
    """
    tokens, valid = drafted.tokens, drafted.valid
    nodes = np.arange(len(shape.parents))
    path_tokens = tokens[:, shape.path]  # [B, M, D]
    comparable = (shape.depth[:, None] == shape.depth) & (shape.depth > 0) & (shape.depth <= shape.path.shape[1])
    same = jnp.all(path_tokens[:, :, None] == path_tokens[:, None], 3) & valid[:, :, None] & valid[:, None] & comparable
    same |= nodes[:, None] == nodes  # [B, M, M]
    representative = jnp.argmax(same, 2)  # representative of all nodes with an equal path
    trust = _trust(past.recent)[:, shape.source]
    chance = _chance(prior, add_earlier(past.counts, earlier), drafted.kind) * trust
    miss = jnp.where(valid, jnp.log1p(-chance), 0.0)
    chance = 1 - jnp.exp(jnp.sum(jnp.where(same, miss[:, None, :], 0.0), 2))
    path = jnp.prod(jnp.where(shape.above & (nodes > 0), chance[:, None, :], 1.0), 2)
    parents = representative[:, np.maximum(shape.parents, 0)].at[:, 0].set(-1)
    return operations.sort_by_score(TokenTree(tokens, parents, valid & (representative == nodes)), path)


def _chance(prior: np.ndarray, counts: Counts, kind: Array) -> Array:
    """Return float32[B, N]: the probability that a node of this class is right, given that its parent is."""
    chance = (counts.hits + PRIOR * prior) / (counts.trials + PRIOR)
    return take_along(chance, kind, 1)


def _trust(recent: Array) -> Array:
    """Return float32[B, S]: a factor of at most 1 on the acceptance rates of each source.

    On a difficult text, drafts fail in all classes, long before the counts of each class show it.
    """
    hits, expected = recent[:, 0], recent[:, 1]
    return jnp.minimum((hits + DOUBT) / (expected + DOUBT), 1.0)
