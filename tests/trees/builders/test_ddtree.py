"""DDTree against a NumPy heap, the enumerated text of its drawn form, and heads that refuse it."""

import functools
import heapq
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, patterns
from heads import tiny_head
from rules import module
from toy import DRAFT_ROWS, joint_distribution, tiny_llama

from specjax import UsageError, make_drafter, trees
from specjax.arrays.logit_rows import LogitRows
from specjax.trees.contracts import Parents
from specjax.trees.growing import grow
from specjax.types import Context, Sampling

VOCAB, LEVELS = 7, 4
PROMPT = 1, 2, 3, 4


def heap_paths(log_q, total):
    """Return the token paths of the `total` best prefixes, by the heap of the authors."""
    order = np.argsort(-log_q, 1, kind="stable")
    ranks = -np.sort(-log_q, 1)
    heap, paths = [(-ranks[0, 0], (0,))], set()
    while heap and len(paths) < total:
        cost, path = heapq.heappop(heap)
        depth, rank = len(path) - 1, path[-1]
        paths.add(tuple(int(order[d, r]) for d, r in enumerate(path)))
        if rank + 1 < log_q.shape[1]:
            heapq.heappush(heap, (cost + ranks[depth, rank] - ranks[depth, rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(log_q):
            heapq.heappush(heap, (cost - ranks[depth + 1, 0], (*path, 0)))
    return paths


@functools.partial(jax.jit, static_argnums=0)
def tree_of(builder, logits, temperature=None, key=None):
    """Grow trees on logits [B, levels, V], the distributions of the depths."""
    batch, levels, _ = logits.shape
    feed = lambda memory, frontier: (memory, logits[jnp.arange(batch)[:, None], frontier.depth])
    context = Context(*[None] * len(Context._fields))._replace(sampling=Sampling(temperature))
    root, limit = jnp.zeros(batch, jnp.int32), jnp.full(batch, levels)
    keys = None if key is None else jax.random.split(key, batch)
    return grow(builder, feed, (), root, logits[:, 0], keys, context, limit, is_path_free=True)[0].tree


@pytest.mark.parametrize("total", [1, 4, 16, 40])
def test_the_nodes_are_those_of_a_heap(total):
    logits = np.random.default_rng(total).normal(size=(20, LEVELS, VOCAB)).astype(np.float32) * 2
    builder = trees.ddtree(total, LEVELS)

    tree = jax.tree.map(np.asarray, tree_of(builder, logits))
    for row, log_q in enumerate(np.asarray(jax.nn.log_softmax(logits, -1), np.float64)):
        paths = {0: ()}
        for node in np.flatnonzero(tree.valid[row])[1:]:
            paths[node] = (*paths[tree.parents[row, node]], int(tree.tokens[row, node]))
        assert set(paths.values()) - {()} == heap_paths(log_q, total)


def test_the_children_of_a_node_are_capped_where_the_drafter_is_sure():
    """Depth 1 has a gap of 2 nats and depth 2 one of 0, so at most round(4 / (1 + e)) = 1 and 3 children."""
    logits = np.zeros((1, 2, VOCAB), np.float32)
    logits[0, 0, 5] = 2.0
    capped, free = (tree_of(trees.parse(f"ddtree:10x2,children=4{gap}"), logits) for gap in (",gap=1", ""))
    count = lambda tree: [int(((tree.parents[0] == node) & tree.valid[0]).sum()) for node in range(2)]
    assert count(capped) == [1, 3] and count(free) == [4, 4]
    with pytest.raises(UsageError, match="gap caps the number of children"):
        trees.ddtree(8, gap=1.0)


def test_a_head_whose_slots_see_tokens_refuses_it():
    with pytest.raises(UsageError, match="ddtree and drawn trees need one of dflash, flash, jetspec, medusa, p_eagle"):
        make_drafter("eagle3", tiny_llama(), tiny_head("eagle3", tiny_llama()), tree=trees.parse("ddtree:8"))


ORDERS = np.array(list(itertools.product(itertools.permutations(range(3)), repeat=2)), np.int32)  # [36, 2, 3]
recursive_rejection, sequoia = (module(name).core for name in ("recursive_rejection", "sequoia"))


def every_draw(monkeypatch, builder, log_q):
    """Return the trees of all orders of draws, for log_q float64[C, 2, 3], and the probability of each, [C, 36]."""
    draw, cases = Parents.best, len(log_q)
    orders = jnp.asarray(np.tile(ORDERS, (cases, 1, 1)))

    def forced(parents, k, *, noisy=True):
        if not noisy:
            return draw(parents, k, noisy=False)
        depth = jnp.where(parents.ids > 0, (parents.ids - 1) // builder.width + 1, 0)
        tokens = jnp.take_along_axis(orders, depth[:, :, None], 1)[:, :, :k]
        return tokens, jnp.take_along_axis(parents.rows.every(), tokens, 2)

    with monkeypatch.context() as patch:
        patch.setattr(Parents, "best", forced)
        logits = jnp.asarray(np.repeat(log_q, len(ORDERS), 0), jnp.float32)
        tree = jax.jit(functools.partial(tree_of.__wrapped__, builder))(logits, jnp.float32(1.0), jax.random.key(0))
    q = np.exp(log_q)[:, np.arange(2)[:, None], ORDERS]  # float64[C, 36, 2, 3]
    left = 1 - np.cumsum(q, 3) + q
    return tree._replace(logits=tree.logits.every()), (q / np.maximum(left, 1e-12)).prod((2, 3))


def largest_error(monkeypatch, total, rule, cases=6):
    """Return the largest error of the joint distribution of three tokens over some random pairs of models."""
    rng = np.random.default_rng(total)
    log_q, rows = np.log(rng.dirichlet(np.full(3, 0.7), (cases, 2))), rng.dirichlet(np.full(3, 0.7), (cases, 3))
    tree, weights = every_draw(monkeypatch, trees.drawn_ddtree(total, 2), log_q)
    np.testing.assert_allclose(weights.sum(1), 1)
    of_case = np.repeat(np.arange(cases), len(ORDERS))
    outcomes = patterns(rule, tree, np.log(rows)[of_case[:, None], np.asarray(tree.tokens)].astype(np.float32))
    worst = 0.0
    for case in range(cases):
        part = lambda x, case=case: jax.tree.map(lambda leaf: leaf[of_case == case], x)
        text, _ = block_distribution(
            rule, part(tree), weights[case], rows[case], 2, lambda *_, part=part: part(outcomes)
        )
        worst = max(worst, np.abs(text - joint_distribution(rows[case], 0, 3)).max())
    return worst


@pytest.mark.parametrize(("total", "rule"), [(5, recursive_rejection), (3, sequoia)])
def test_drawn_trees_leave_the_joint_distribution_of_several_tokens_unchanged(monkeypatch, total, rule):
    assert largest_error(monkeypatch, total, rule) < 2e-6


def test_a_shape_that_reads_the_shared_draws_is_caught(monkeypatch):
    """The mutant is DySpec's order: scores use the q of the drawn tokens."""
    ddtree = importlib.import_module("specjax.trees.builders.ddtree")

    def revealed(parents, k):
        tokens, log_q = (x[:, 0] for x in parents.best(k))
        q = jnp.exp(log_q)
        return ddtree.Ranks(tokens, log_q, jnp.log(jnp.maximum(1 - (jnp.cumsum(q, 1) - q), q)))

    monkeypatch.setattr(ddtree, "_draw_ranks", revealed)
    assert largest_error(monkeypatch, 4, recursive_rejection) > 0.03


def test_the_shape_of_drawn_trees_is_the_best_for_q():
    """The sum of the scores is that of a heap, and greedy rows draft the tree of DDTree."""
    total, logits = 9, np.random.default_rng(0).normal(size=(20, LEVELS, VOCAB)).astype(np.float32) * 2
    temperature = jnp.where(jnp.arange(20) < 10, 1.0, 0.0)
    tree = tree_of(trees.drawn_ddtree(total), logits, temperature, jax.random.key(0))
    fixed = tree_of(trees.ddtree(total), logits)
    for drawn, wanted in zip(tree[:3], fixed, strict=False):
        np.testing.assert_array_equal(drawn[10:], wanted[10:])
    parents = np.asarray(tree.parents)
    q = -np.sort(-np.exp(np.asarray(jax.nn.log_softmax(logits, -1), np.float64)), 2)
    left = 1 - np.cumsum(q, 2) + q
    for row in range(10):
        heap, best = [(-1.0, 0, 0, 1.0)], 0.0
        for _ in range(total):
            value, depth, rank, reach = heapq.heappop(heap)
            best -= value
            if rank + 1 < VOCAB:
                heapq.heappush(heap, (-reach * left[row, depth, rank + 1], depth, rank + 1, reach))
            if depth + 1 < LEVELS:
                below = reach * q[row, depth, rank]
                heapq.heappush(heap, (-below, depth + 1, 0, below))
        reach, depths, score = [1.0], [0], 0.0
        for node in range(1, total + 1):
            parent = parents[row, node]
            rank, depth = int((parents[row, 1:node] == parent).sum()), depths[parent]
            depths.append(depth + 1)
            score += reach[parent] * left[row, depth, rank]
            reach.append(reach[parent] * q[row, depth, rank])
        np.testing.assert_allclose(score, best, rtol=1e-5)


def test_drawn_trees_store_one_distribution_per_depth():
    logits = jnp.log(jnp.asarray(DRAFT_ROWS))[None, :3]
    tree = tree_of(trees.drawn_ddtree(6, 3), logits, jnp.float32(2.0), jax.random.key(0))
    assert isinstance(tree.logits, LogitRows) and tree.logits.common.shape == logits.shape
    rows, parents = np.asarray(tree.logits.every())[0], np.asarray(tree.parents)[0]
    wanted = np.asarray(jax.nn.log_softmax(logits[0] / 2, -1))
    depths = [0]
    for node in range(1, 7):
        np.testing.assert_allclose(rows[parents[node]], wanted[depths[parents[node]]], atol=1e-6)
        depths.append(depths[parents[node]] + 1)
