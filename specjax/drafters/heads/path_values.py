"""The fit of the values of `trees.path_ddtree` (TAPS) to the text: logistic regression with one step per draft.

Rule: a drafted node is a trial once the text has reached its parent's place in the same step, verified or not. It is a
hit if the text has its token. The weights take a step of Adagrad on the log loss of the trials of all rows.
Guarantee: the weights depend on the text of earlier steps only, and trees are point masses, so texts are unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.drafters.heads.sized_trees import find_trials
from specjax.trees import operations
from specjax.trees.builders.taps import FEATURES, PathDetails, PathWeights, estimate, initial_weights
from specjax.trees.growing import GrownTree
from specjax.types import Array

STEP = 0.3
"""Size of the first step of a weight."""
RECENT = 0.1
"""Weight of a step in the recent acceptance by depth."""


class PathRecord(NamedTuple):
    """The weights, and the drafted nodes of a step."""

    learned: PathWeights
    squares: Array  # float32[FEATURES], sums of squared gradients
    tokens: Array  # int32[B, N]
    parents: Array  # int32[B, N]
    drafted: Array  # bool[B, N]
    details: PathDetails


def init_record(batch: int, num_nodes: int, levels: int) -> PathRecord:
    """Return the record of rows without any step."""
    none = jnp.zeros((batch, num_nodes), jnp.int32)
    details = PathDetails(jnp.zeros((batch, num_nodes, len(FEATURES))), jnp.zeros((batch, num_nodes)))
    return PathRecord(initial_weights(levels), jnp.ones(len(FEATURES)), none, none, none > 0, details)


def record_axes(record: PathRecord) -> PathRecord:
    """Return the batch axis of each array, like `Hooks.axes`."""
    return batch_axes.rows_first(record)._replace(learned=batch_axes.shared(record.learned), squares=batch_axes.SHARED)


def store(record: PathRecord, grown: GrownTree) -> PathRecord:
    """Return the record with the nodes of a draft."""
    tree = grown.tree
    depth = operations.depths(tree.parents)
    return record._replace(
        tokens=tree.tokens, parents=tree.parents, drafted=tree.valid & (depth > 0), details=grown.details
    )


def learn(record: PathRecord, tokens: Array, number: Array) -> PathRecord:
    """Fit the weights to the text of the step: the first `number` int32[B] of tokens int32[B, T]."""
    is_trial, is_hit = find_trials(record.tokens, record.parents, record.drafted, tokens, number)
    details, learned = record.details, record.learned
    error = jnp.where(is_trial, jax.nn.sigmoid(estimate(details, learned.weights)) - is_hit, 0.0)
    gradient = jnp.einsum("bn,bnf->f", error, details.features)
    squares = record.squares + gradient**2
    weights = learned.weights - STEP * gradient / jnp.sqrt(squares)
    depth = operations.depths(record.parents) - 1
    is_first = is_trial & (details.features[:, :, FEATURES.index("rank")] == 0)
    at_depth = (depth[:, :, None] == jnp.arange(len(learned.recent))) & is_first[:, :, None]  # [B, N, levels]
    count = jnp.sum(at_depth, (0, 1))
    mean = jnp.sum(at_depth & is_hit[:, :, None], (0, 1)) / jnp.maximum(count, 1)
    recent = learned.recent + jnp.where(count > 0, RECENT * (mean - learned.recent), 0.0)
    return record._replace(learned=PathWeights(weights, recent), squares=squares)
