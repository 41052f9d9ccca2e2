"""Tries from paths, against a dictionary of prefixes."""

import collections

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import from_paths

build = jax.jit(from_paths, static_argnames="num_nodes")


def prefixes(tree, row=0):
    """Root paths of the valid nodes, in order, without the root's token."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    paths = [()]
    for i in range(1, len(tokens)):
        if tree.valid[row, i]:
            assert 0 <= parents[i] < i
            assert tree.valid[row, parents[i]]
            paths.append((*paths[parents[i]], int(tokens[i])))
    return paths[1:]


def brute_force(paths, weights, num_nodes):
    total = collections.Counter()
    for path, weight in zip(paths.tolist(), weights.tolist(), strict=True):
        if weight <= 0:
            continue
        for d, token in enumerate(path):
            if token < 0:
                break
            total[tuple(path[: d + 1])] += weight
    return sorted(total, key=lambda prefix: (-total[prefix], len(prefix), prefix))[: num_nodes - 1]


def test_the_cards_paths():
    """REST (A7): weights 4: 2, 5: 1, 49: 1, 46: 1, 59: 1; two nodes keep 4 and 5."""
    paths, weights = jnp.array([[[4, 9], [5, 9], [4, 6]]]), jnp.ones((1, 3), jnp.int32)
    tree = build(jnp.array([3]), paths, weights, num_nodes=6)
    assert tree.tokens[0].tolist() == [3, 4, 5, 6, 9, 9]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.valid.all()
    assert tree.logits is None
    assert prefixes(from_paths(jnp.array([3]), paths, weights, 3)) == [(4,), (5,)]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    npst.arrays(np.int32, (2, 5, 3), elements=st.integers(-1, 2)),
    npst.arrays(np.int32, (2, 5), elements=st.integers(-1, 4)),
)
def test_the_heaviest_prefixes_of_random_paths(paths, weights):
    tree = build(jnp.array([7, 8]), jnp.asarray(paths), jnp.asarray(weights), num_nodes=6)
    assert tree.tokens[:, 0].tolist() == [7, 8]
    assert tree.parents[:, 0].tolist() == [-1, -1]
    for row in range(2):
        wanted = brute_force(paths[row], weights[row], 6)
        assert prefixes(tree, row) == wanted
        assert tree.valid[row].tolist() == [True] * (1 + len(wanted)) + [False] * (5 - len(wanted))


def test_weights_that_do_not_add_up_exactly_keep_parents_before_children():
    """Sums of 0.1 ten times differ by the order of addition; a single chain must stay a chain."""
    paths = jnp.broadcast_to(jnp.arange(8), (1, 10, 8))
    tree = build(jnp.array([0]), paths, jnp.full((1, 10), 0.1), num_nodes=9)
    assert tree.parents[0].tolist() == list(range(-1, 8))
    assert tree.tokens[0].tolist() == [0, *range(8)]


def test_more_nodes_than_prefixes_and_none_at_all():
    tree = build(jnp.array([3]), jnp.array([[[1, 1]]]), jnp.array([[1.0]]), num_nodes=5)
    assert tree.valid[0].tolist() == [True] * 3 + [False] * 2
    assert tree.parents[0].tolist() == [-1, 0, 1, 0, 0]
    empty = build(jnp.array([3]), jnp.array([[[-1, 1]]]), jnp.array([[1.0]]), num_nodes=5)
    assert empty.valid[0].tolist() == [True] + [False] * 4
    assert build(jnp.array([3]), jnp.array([[[2, 1]]]), jnp.array([[1.0]]), num_nodes=1).tokens.tolist() == [[3]]
