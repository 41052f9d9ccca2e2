"""The size of `ddtree:auto`: the best one by a search over all sizes, its calibration, and the texts with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.heads import sized_trees
from specjax.drafters.widths import MARGIN, PassWidths
from specjax.trees.growing import GrownTree
from specjax.types import Context, TokenTree

NODES, DEPTH, BATCH = 8, 3, 2


def random_draft(rng):
    """Return a grown tree of random shape with random q, in the order of growth."""
    parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, NODES))] for _ in range(BATCH)], np.int32)
    depth = np.zeros_like(parents)
    for node in range(1, NODES):
        depth[:, node] = depth[np.arange(BATCH), parents[:, node]] + 1
    parents = np.where(depth > DEPTH, 0, parents)
    tokens = rng.integers(0, 5, parents.shape).astype(np.int32)
    q = rng.uniform(size=parents.shape).astype(np.float32)
    tree = TokenTree(jnp.asarray(tokens), jnp.asarray(parents), jnp.ones(parents.shape, bool))
    return GrownTree(tree, jnp.zeros(parents.shape, jnp.int32), jnp.asarray(q))


def values_of(grown):
    """Return the product of q down the path of each node, without the root."""
    parents, value = np.asarray(grown.tree.parents), np.ones((BATCH, NODES))
    for node in range(1, NODES):
        value[:, node] = value[np.arange(BATCH), parents[:, node]] * np.asarray(grown.chances)[:, node]
    return value[:, 1:]


@functools.partial(jax.jit, static_argnums=0)
def choose(widths, costs, record, grown):
    context = Context(jnp.zeros((BATCH, 4), jnp.int32), jnp.full(BATCH, 2))
    return sized_trees.choose_size(PassWidths(widths, costs), 0.0, record, grown, context, jnp.full(BATCH, DEPTH))


def size_of(tree):
    return int(np.asarray(tree.valid).sum(1).max())


def test_the_size_is_the_best_of_all_and_cheaper_passes_never_shrink_it():
    rng, widths = np.random.default_rng(0), tuple(range(1, NODES + 1))
    record, sizes = sized_trees.init_record(BATCH, NODES, DEPTH), set()
    for _ in range(30):
        grown, steps = random_draft(rng), rng.uniform(0, 0.5, NODES - 1)
        costs = np.concatenate([[1], 1 + np.cumsum(steps)])
        tree, _ = choose(widths, jnp.asarray(costs, jnp.float32), record, grown)
        values = -np.sort(-values_of(grown), 1)
        tokens = BATCH + np.concatenate([[0], np.cumsum(values.sum(0))])
        goodput = tokens / costs
        goodput[0] *= MARGIN
        assert size_of(tree) == 1 + int(np.argmax(goodput))
        cheaper, _ = choose(widths, jnp.asarray((1 + (costs - 1) / 2), jnp.float32), record, grown)
        assert size_of(cheaper) >= size_of(tree)
        sizes.add(size_of(tree))
    assert len(sizes) > 3


def test_acceptance_is_counted_by_depth_and_q_whether_a_node_was_verified_or_not():
    grown = GrownTree(
        TokenTree(
            jnp.array([[9, 1, 2, 3, 4]] * BATCH), jnp.array([[-1, 0, 0, 1, 2]] * BATCH), jnp.ones((BATCH, 5), bool)
        ),
        jnp.zeros((BATCH, 5), jnp.int32),
        jnp.array([[1.0, 0.95, 0.01, 0.95, 0.5]] * BATCH),
    )
    record = sized_trees.init_record(BATCH, 5, DEPTH)
    _, record = choose((1, 5), jnp.array([1.0, 9.0]), record, grown)  # a plain step, which teaches the first level
    text = jnp.array([[1, 7], [1, 3]])
    counted = sized_trees.count(record, text, jnp.array([1, 2])).counts
    classes, top = len(sized_trees.EDGES) + 1, len(sized_trees.EDGES)
    trials, hits = np.zeros((BATCH, DEPTH * classes)), np.zeros((BATCH, DEPTH * classes))
    trials[:, top], trials[:, 0], hits[:, top] = 1, 1, 1  # the first level: token 1 was right, token 2 was not
    trials[1, classes + top] = hits[1, classes + top] = 1  # below token 1, in the row whose text goes on
    np.testing.assert_allclose(counted.trials, trials)
    np.testing.assert_allclose(counted.hits, hits)
    rate = sized_trees.calibrated(counted, jnp.array([[0, top]] * BATCH), jnp.array([[0.01, 0.95]] * BATCH))
    prior = sized_trees.PRIOR
    np.testing.assert_allclose(rate[0], [prior * 0.01 / (prior + 2), (prior * 0.95 + 2) / (prior + 2)], rtol=1e-6)
