"""The card's hand-worked trees (Token Recycling, A4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov

from specjax import UsageError, decode
from specjax.drafters import token_recycling
from specjax.drafters.token_recycling import _write, best_paths, paper_tree
from specjax.types import Context, TokenTree

SMALL = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def test_the_cards_tree():
    drafter = token_recycling(4, tree=SMALL)
    matrix = jnp.full((1, 4, 8), -1).at[0, :, :2].set(jnp.array([[1, 2], [3, 0], [0, 3], [2, 1]]))
    context = Context(jnp.array([[3, 0, 0]]), jnp.array([2]))
    tree, _ = drafter.propose((), None, matrix, context, jnp.array([9]))
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 0, 0, 2]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.valid.all()
    cut, _ = drafter.propose((), None, matrix, context, jnp.array([1]))
    assert cut.valid[0].tolist() == [True] * 3 + [False] * 4


def test_unknown_successors_are_left_out_and_the_rest_moves_up():
    drafter = token_recycling(4, tree=SMALL)
    matrix = jnp.full((1, 4, 8), -1).at[0, 0, :2].set(jnp.array([1, 2])).at[0, 2, 0].set(3)
    tree, _ = drafter.propose((), None, matrix, Context(jnp.array([[0]]), jnp.array([1])), jnp.array([9]))
    assert tree.valid[0].tolist() == [True] * 4 + [False] * 3
    assert tree.tokens[0, :4].tolist() == [0, 1, 2, 3]
    assert tree.parents[0, :4].tolist() == [-1, 0, 0, 2]


def test_the_paper_tree_has_80_nodes_at_the_depths_of_the_authors():
    depths = [len(path) for path in paper_tree()]
    assert [depths.count(d) for d in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert token_recycling(9).num_nodes == 81
    for n in (1, 7, 30):
        paths = set(best_paths(n))
        assert len(paths) == n
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)
    with pytest.raises(UsageError, match="num_nodes"):
        token_recycling(9, num_nodes=81)
    with pytest.raises(UsageError, match="rank 8"):
        token_recycling(9, tree=((8,),))


def test_duplicate_writers_have_a_defined_winner():
    tree = TokenTree(jnp.array([[1, 2, 1, 2, 2]]), jnp.array([[-1, 0, 0, 1, 2]]), jnp.array([[True] * 4 + [False]]))
    best = jnp.broadcast_to(jnp.arange(5)[None, :, None] + 10, (1, 5, 8))
    written = _write(jnp.zeros((1, 4, 8), jnp.int32), tree, jnp.array([[0, 2, -1, -1, -1]]), best)
    assert written[0, :, 0].tolist() == [
        0,
        10,
        11,
        0,
    ]  # root before node 2; node 1 before its deeper twin; 4 is invalid
    on_path = _write(jnp.zeros((1, 4, 8), jnp.int32), tree, jnp.array([[0, 1, 3, -1, -1]]), best)
    assert on_path[0, :, 0].tolist() == [0, 10, 11, 0]
    deep = TokenTree(jnp.array([[0, 2, 1, 2]]), jnp.array([[-1, 0, 0, 2]]), jnp.ones((1, 4), bool))
    accepted_wins = _write(jnp.zeros((1, 4, 8), jnp.int32), deep, jnp.array([[0, 2, 3, -1]]), best[:, :4])
    assert accepted_wins[0, :, 0].tolist() == [10, 12, 13, 0]


def test_a_cycle_is_accepted_to_full_depth_once_seen():
    """A deterministic bigram target: after one pass over the cycle every step emits depth + 1 tokens."""
    rows = np.full((9, 9), 1e-6, np.float32)
    for t in range(9):
        rows[t, (t + 1) % 9] = 1.0
    result = decode(markov(rows), token_recycling(9), [[0]], key=jax.random.key(0), max_new_tokens=9 + 7 * 5)
    assert result.to_lists()[0] == [(t + 1) % 9 for t in range(44)]
    assert int(result.stats.target_passes[0]) <= 9 + 5
