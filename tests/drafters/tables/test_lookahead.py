"""The card's examples of lookahead decoding (A3): the sliding window and drafts from its n-grams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov

from specjax import UsageError, decode
from specjax.drafters import lookahead
from specjax.drafters.tables.lookahead import _candidates, _trie
from specjax.retrieval import ngrams
from specjax.trees.operations import depths
from specjax.types import Context, Output, TokenTree, Verdict

VOCAB = 10
SMALL = {"ngram": 3, "window": 2, "guesses": 2, "buckets": 64}


def counting():
    """Return the card's toy: the next token is the last one plus 1."""
    rows = np.full((VOCAB, VOCAB), 1e-6, np.float32)
    for t in range(VOCAB):
        rows[t, (t + 1) % VOCAB] = 1.0
    return markov(rows)


@functools.cache
def programs(**options):
    drafter = lookahead(**dict(options))

    @jax.jit
    def learn(state, tree, verdict, output):
        """The state after a round, and the likeliest token below each column."""
        observation = drafter.observe((), state, None, tree, verdict, output)
        return drafter.update((), state, observation, verdict), observation.below

    return drafter, jax.jit(drafter.init), jax.jit(drafter.propose), learn


def context(text):
    return Context(jnp.array([text + [0] * (8 - len(text))]), jnp.array([len(text)]))


def verdict_of(num_nodes, n, next_token):
    return Verdict(jnp.full((1, n), -1).at[0, 0].set(0), jnp.array([num_nodes]), jnp.array([next_token]))


def show(tree):
    """Return the valid nodes as (token, token of the parent)."""
    tokens, parents = np.asarray(tree.tokens[0]), np.asarray(tree.parents[0])
    return [(int(tokens[i]), int(tokens[parents[i]]) if i else None) for i in np.flatnonzero(tree.valid[0])]


def test_the_cards_window():
    drafter, init, propose, learn = programs(**SMALL, seed_pool=False)
    keys = jax.random.split(jax.random.key(0), 1)
    state = init((), context([3]))
    state = state._replace(window=jnp.array([[[3, 7], [4, 8]]]), rows=jnp.array([2]))
    tree, state = propose((), keys, state, context([3]), jnp.array([9]))
    assert show(tree) == [(3, None), (7, 3), (4, 3), (8, 7)]
    assert depths(tree.parents)[0, :4].tolist() == [0, 1, 1, 2]
    logits = jax.nn.one_hot((tree.tokens + 1) % VOCAB, VOCAB)
    output = Output(logits, jnp.zeros((*tree.tokens.shape, 1)))
    two_columns = state._replace(window=jnp.array([[[3, 7], [4, 8]]]))
    state, y = learn(state, tree, verdict_of(1, drafter.num_nodes, 4), output)
    assert state.window[0].tolist() == [[4, 8], [5, 9]]
    assert y.tolist() == [[5, 9]]  # below 3, 4 and 7, 8
    two, _ = learn(two_columns, tree, verdict_of(2, drafter.num_nodes, 5), output)
    assert two.window[0].tolist() == [[8, -1], [9, -1]]  # a column further; the missing one is to be drawn
    # The next time the last token is 3 the pool drafts 4, 5, and the window's 4, 5 stand behind them.
    tree, state = propose((), keys, state, context([3, 4, 3]), jnp.array([9]))
    assert show(tree)[:3] == [(3, None), (4, 3), (5, 4)]
    assert len(ngrams.find(state.pool, jnp.array([[[7]]])).grams[0, 0]) == 2


def test_a_pass_emits_what_the_pool_holds():
    """Draft a cycle in full, two tokens of an n-gram and the bonus, once its n-grams are known."""
    result = decode(counting(), lookahead(**SMALL), [[0]], key=jax.random.key(0), max_new_tokens=70)
    assert result.to_lists()[0] == [(t + 1) % VOCAB for t in range(70)]
    assert int(result.stats.target_passes[0]) <= 30


def test_the_window_fills_row_by_row():
    _, init, propose, learn = programs(ngram=4, window=2, guesses=0)
    keys = jax.random.split(jax.random.key(0), 1)
    state = init((), context([1, 2, 3]))
    for rows, nodes in ((1, 2), (2, 4), (3, 6), (3, 6)):
        tree, state = propose((), keys, state, context([1, 2, 3]), jnp.array([9]))
        assert (int(state.rows[0]), int(tree.valid.sum())) == (rows, nodes)
        assert set(np.asarray(state.window).ravel().tolist()) <= {1, 2, 3}
        logits = jax.nn.one_hot(tree.tokens, 4)  # repeats
        state, y = learn(state, tree, verdict_of(1, 6, 3), Output(logits, jnp.zeros((1, 6, 1))))
        assert (y >= 0).all()
        if rows == 1:  # one column further, and the row below is what was said of it
            assert state.window[0, :2].tolist() == [[state.window[0, 0, 0], -1], [state.window[0, 0, 0], -1]]


def test_a_limit_takes_the_deepest_guesses_first():
    _, init, propose, learn = programs(**SMALL, seed_pool=False)
    keys = jax.random.split(jax.random.key(0), 1)
    state = init((), context([3]))._replace(window=jnp.array([[[3, 7], [4, 8]]]), rows=jnp.array([2]))
    tree, state = propose((), keys, state, context([3]), jnp.array([1]))
    assert show(tree) == [(3, None), (7, 3), (4, 3)]
    assert state.ends[0].tolist() == [2, -1]
    output = Output(jax.nn.one_hot(tree.tokens + 1, VOCAB), jnp.zeros((*tree.tokens.shape, 1)))
    state, y = learn(state, tree, verdict_of(1, tree.tokens.shape[1], 4), output)
    assert y[0].tolist() == [5, -1]  # the second column was not in the tree: no n-gram of it
    assert not ngrams.find(state.pool, jnp.array([[[7]]])).hit.any()
    assert state.window[0].tolist() == [[4, 8], [5, -1]]


def test_candidates_share_their_beginnings():
    candidates = jnp.array([[[1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3]]])
    tokens, parents, valid = _trie(candidates, jnp.array([[True, True, True, False]]))
    root = lambda x, value: jnp.concatenate([jnp.full((1, 1), value, x.dtype), x], 1)
    assert show(TokenTree(root(tokens, 0), root(parents, -1), root(valid, True))) == [
        (0, None), (1, 0), (2, 1), (3, 2), (4, 2), (5, 0), (2, 5), (3, 2)
    ]  # fmt: skip
    assert parents[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 7, 8, 0, 1, 2]


def test_the_latest_candidates_come_first():
    @jax.jit
    def latest(grams):
        table, wanted = ngrams.empty(1, 16, 3, 2), jnp.ones((1, 1), bool)
        for gram in grams:
            table = ngrams.write(table, gram[None, None], (), wanted, prefix=1)
        return _candidates(ngrams.find(table, jnp.array([[[7]]])))

    tails, present = latest(jnp.array([[7, 1], [7, 2], [9, 3], [7, 1]]))
    assert (tails[0, :2, 0].tolist(), present[0].tolist()) == ([1, 2], [True, True, False])


def test_the_prompt_seeds_the_pool():
    drafter = lookahead(**SMALL)
    result = decode(counting(), drafter, [list(range(10)) * 2], key=jax.random.key(0), max_new_tokens=9)
    assert int(result.stats.target_passes[0]) == 3  # two of an n-gram and the bonus


def test_without_window_and_candidates_it_is_plain_decoding():
    drafter = lookahead(ngram=2, window=1, guesses=0)
    result = decode(counting(), drafter, [[1, 2, 3]], key=jax.random.key(0), max_new_tokens=12)
    assert result.to_lists()[0] == [(t + 4) % VOCAB for t in range(12)]
    assert (drafter.num_nodes, int(result.stats.target_passes[0])) == (1, 12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ngram": 1}, "ngram must be at least 2"),
        ({"window": 0}, "window must be at least 1"),
        ({"guesses": -1}, "guesses must be at least 0"),
        ({"buckets": 1000}, "buckets must be a power of two"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        lookahead(**options)
