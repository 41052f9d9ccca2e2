"""Greedy and sample-and-match verification of trees."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.types import TokenTree
from specjax.verifiers import greedy, sample_and_match


def reference(tokens, parents, valid, wanted):
    """Plain Python: node ids of the accepted path and the next token."""
    node, path = 0, [0]
    while True:
        below = [j for j in range(1, len(tokens)) if parents[j] == node and valid[j] and tokens[j] == wanted[node]]
        if not below:
            return path, wanted[node]
        node = below[0]
        path.append(node)


@st.composite
def trees(draw, nodes=7, vocab=3, batch=3):
    def row():
        parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)]
        tokens = [draw(st.integers(0, vocab - 1)) for _ in range(nodes)]
        valid = [True]
        for i in range(1, nodes):
            valid.append(valid[parents[i]] and draw(st.booleans()))
        return tokens, parents, valid

    rows = [row() for _ in range(batch)]
    wanted = [[draw(st.integers(0, vocab - 1)) for _ in range(nodes)] for _ in range(batch)]
    return rows, wanted


KEYS = jax.random.split(jax.random.key(0), (3, 7))
GREEDY, SAMPLED = jax.jit(greedy), jax.jit(sample_and_match)


@settings(max_examples=60, deadline=None)
@given(trees())
def test_walk_equals_plain_python(case):
    rows, wanted = case
    tokens, parents, valid = (jnp.array(x) for x in zip(*rows, strict=True))
    tree = TokenTree(tokens, parents, valid)
    logits = jnp.log(jax.nn.one_hot(jnp.array(wanted), 3))
    for verify in (GREEDY, SAMPLED):
        verdict = verify(KEYS, tree, logits)
        for b, row in enumerate(rows):
            path, token = reference(*row, wanted[b])
            assert verdict.path[b].tolist() == path + [-1] * (7 - len(path))
            assert int(verdict.num_nodes[b]) == len(path)
            assert int(verdict.next_token[b]) == token


def test_greedy_takes_the_lowest_of_equal_logits():
    tree = TokenTree(jnp.array([[0, 2, 1]]), jnp.array([[-1, 0, 0]]), jnp.ones((1, 3), bool))
    logits = jnp.array([[[0.0, 5.0, 5.0]] * 3])
    verdict = greedy(KEYS[:1, :3], tree, logits)
    assert verdict.path[0].tolist() == [0, 2, -1]
    assert int(verdict.next_token[0]) == 1


def test_a_draw_depends_on_the_key_of_the_node_only():
    """The same position gives the same token whether it is drafted or not.

    This is the basis of equality with plain sampling.
    """
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 3)), jnp.float32)
    bare = TokenTree(jnp.zeros((3, 7), jnp.int32), jnp.full((3, 7), -1), jnp.zeros((3, 7), bool).at[:, 0].set(True))
    first = SAMPLED(KEYS, bare, logits).next_token
    full = TokenTree(
        jnp.broadcast_to(jnp.array([0, 0, 1, 2, 0, 0, 0]), (3, 7)),
        jnp.broadcast_to(jnp.array([-1, 0, 0, 0, 1, 2, 3]), (3, 7)),
        jnp.ones((3, 7), bool),
    )
    verdict = SAMPLED(KEYS, full, logits)
    assert (verdict.num_nodes >= 2).all()
    assert jnp.take_along_axis(full.tokens, verdict.path[:, 1:2], 1)[:, 0].tolist() == first.tolist()
