"""The card's hand-worked trees (Token Recycling, A4)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import compiled, markov

from specjax import UsageError, decode
from specjax.drafters import auto, token_recycling
from specjax.drafters.tables.token_recycling import SLOTS, Recycled, best_paths, paper_tree
from specjax.trees.operations import chain
from specjax.types import Context, Output, TokenTree, Verdict

SMALL = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def test_the_cards_tree():
    drafter = compiled(token_recycling(4, tree=SMALL))
    tokens = jnp.full((8, 4), -1).at[:2].set(jnp.array([[1, 3, 0, 2], [2, 0, 3, 1]]))
    matrix = Recycled(jnp.arange(4), tokens, None)
    context = Context(jnp.array([[3, 0, 0]]), jnp.array([2]))
    state = drafter.init(matrix, context)
    tree, _ = drafter.propose(matrix, None, state, context, jnp.array([9]))
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 0, 0, 2]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.valid.all()
    cut, _ = drafter.propose(matrix, None, state, context, jnp.array([1]))
    assert cut.valid[0].tolist() == [True] * 3 + [False] * 4


def test_unknown_successors_are_left_out_and_the_rest_moves_up():
    drafter = compiled(token_recycling(4, tree=SMALL))
    matrix = Recycled(jnp.arange(4), jnp.full((8, 4), -1).at[:2, 0].set(jnp.array([1, 2])).at[0, 2].set(3), None)
    context = Context(jnp.array([[0]]), jnp.array([1]))
    tree, _ = drafter.propose(matrix, None, drafter.init(matrix, context), context, jnp.array([9]))
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


def recycle(tree, path):
    """Return the first rank of the matrix after a step in which node i's best token was 10 + i."""
    nodes = tree.tokens.shape[1]
    logits = -jnp.abs(jnp.arange(20.0) - 10 - jnp.arange(nodes)[:, None])[None]
    drafter = token_recycling(20, num_nodes=nodes - 1)
    state = drafter.init((), Context(tree.tokens, jnp.array([1])))
    verdict = Verdict(jnp.array([path]), jnp.array([1]), jnp.array([0]))
    observation = drafter.observe((), state, None, tree, verdict, Output(logits, None))
    state = drafter.update((), state, observation, verdict)
    return drafter.hooks.export((), state).tokens[0, :4].tolist()


def test_duplicate_writers_have_a_defined_winner():
    tree = TokenTree(jnp.array([[1, 2, 1, 2, 2]]), jnp.array([[-1, 0, 0, 1, 2]]), jnp.array([[True] * 4 + [False]]))
    # The root before node 2; node 1 before its deeper twin; 4 is invalid.
    assert recycle(tree, [0, 2, -1, -1, -1]) == [-1, 10, 11, -1]
    assert recycle(tree, [0, 1, 3, -1, -1]) == [-1, 10, 11, -1]
    deep = TokenTree(jnp.array([[0, 2, 1, 2]]), jnp.array([[-1, 0, 0, 2]]), jnp.ones((1, 4), bool))
    assert recycle(deep, [0, 2, 3, -1]) == [10, 12, 13, -1]  # accepted nodes win


@pytest.mark.parametrize("make", [token_recycling, functools.partial(auto, widths=(1, 8))])
def test_sixty_four_rows_take_less_than_300_mb(make):
    """Check the memory for Gemma 3's vocabulary on a TPU, which pads the last two axes to tiles of 8 x 128."""
    context = Context(jax.ShapeDtypeStruct((64, 256), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32))
    state = jax.eval_shape(functools.partial(make(262_144).init, ()), context)

    def tiled(x):
        *leading, rows, columns = (1, 1, *x.shape)
        return 4 * math.prod(leading) * -(-rows // 8) * 8 * -(-columns // 128) * 128

    assert sum(tiled(x) for x in jax.tree.leaves(state)) < 300e6


def test_of_two_tokens_of_one_slot_the_latest_is_known():
    """Check that tokens of one slot do not share successors."""
    drafter = compiled(token_recycling(3 * SLOTS, num_nodes=2))
    context = lambda token: Context(jnp.array([[token]]), jnp.array([1]))
    state = drafter.init((), context(0))
    for token in (5, 5 + SLOTS):
        logits = jnp.zeros((1, 1, 3 * SLOTS)).at[0, 0, token + 1].set(1.0)
        tree = chain(jnp.array([[token]]), jnp.ones((1, 1), bool))
        verdict = Verdict(jnp.array([[0]]), jnp.array([1]), jnp.array([token + 1]))
        observation = drafter.observe((), state, context(token), tree, verdict, Output(logits, None))
        state = drafter.update((), state, observation, verdict)
        for other in (5, 5 + SLOTS, 5 + 2 * SLOTS):
            tree, _ = drafter.propose((), None, state, context(other), jnp.array([1]))
            assert tree.valid[0, 1] == (other == token)
            assert other != token or tree.tokens[0, 1] == token + 1
    assert drafter.hooks.export((), state).owner[5] == 5 + SLOTS


def test_what_was_learnt_starts_the_next_call():
    """Pass a cycle from one row to all rows of the next call, which accept it from the first step on."""
    rows = np.full((9, 9), 1e-6, np.float32)
    for t in range(9):
        rows[t, (t + 1) % 9] = 1.0
    call = lambda drafter, prompts: decode(markov(rows), drafter, prompts, key=jax.random.key(0), max_new_tokens=14)
    cold = call(token_recycling(9, keep_chances=True), [[0], [4]])
    warm = call(cold.drafter, [[3], [7], [1]])
    assert [row[:3] for row in warm.to_lists()] == [[4, 5, 6], [8, 0, 1], [2, 3, 4]]
    assert warm.stats.target_passes.tolist() == [2, 2, 2]
    assert cold.stats.target_passes.min() > 5
    chances = warm.drafter.params.log_p
    assert chances.shape == (8, 9)
    assert (chances[0] > -1e-3).all()


def test_the_prompt_teaches_if_asked():
    rows = np.full((9, 9), 1e-6, np.float32)
    for t in range(9):
        rows[t, (t + 1) % 9] = 1.0
    prompt = [[*range(9), 0]]
    call = lambda **options: decode(
        markov(rows), token_recycling(9, **options), prompt, key=jax.random.key(0), max_new_tokens=14
    )
    read, unread = call(read_prompt=True), call()
    assert read.to_lists() == unread.to_lists() == [[(t + 1) % 9 for t in range(14)]]
    assert int(read.stats.target_passes[0]) == 2
    assert int(unread.stats.target_passes[0]) > 5


def test_a_cycle_is_accepted_to_full_depth_once_seen():
    """Use a deterministic bigram target: after one pass over the cycle every step emits depth + 1 tokens."""
    rows = np.full((9, 9), 1e-6, np.float32)
    for t in range(9):
        rows[t, (t + 1) % 9] = 1.0
    result = decode(markov(rows), token_recycling(9), [[0]], key=jax.random.key(0), max_new_tokens=9 + 7 * 5)
    assert result.to_lists()[0] == [(t + 1) % 9 for t in range(44)]
    assert int(result.stats.target_passes[0]) <= 9 + 5
