"""The card's examples of ADED (A5); those of its search are in tests/trees/test_search.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import TARGET_ROWS, markov

from specjax import UsageError, decode
from specjax.drafters import aded, autoregressive, corpus_table
from specjax.drafters.tables.aded import CAP, _add_bonus, _successors
from specjax.retrieval import ngrams
from specjax.types import Context

CARD = [[8, 1, 2, 4]] * 7 + [[8, 1, 3, 5]] * 3  # (8, 1) -> {2: .7, 3: .3}, (1, 2) -> 4, (1, 3) -> 5


def shares(table, pair):
    """Return {token: score} of a pair."""
    tokens, scores = (np.asarray(x)[0, 0] for x in _successors((), table, jnp.array([[pair]])))
    return {int(t): float(s) for t, s in zip(tokens, scores, strict=True) if s > 0}


def paths_of(tree, row=0):
    """Return the valid nodes as tuples of tokens below the root."""
    tokens, parents, valid = (np.asarray(x)[row] for x in tree[:3])
    path = {0: ()}
    for i in range(1, len(tokens)):
        if valid[i]:
            path[i] = (*path[int(parents[i])], int(tokens[i]))
    return list(path.values())[1:]


def test_a_corpus_gives_shares():
    table = corpus_table(CARD, buckets=16)
    assert shares(table, [8, 1]) == pytest.approx({2: 0.7, 3: 0.3})
    assert shares(table, [1, 3]) == {5: 1.0}
    assert shares(table, [2, 4]) == {}
    many = corpus_table([[1, 2, t] for t in range(20) for _ in range(1 + t)], buckets=2)
    assert set(shares(many, [1, 2])) == set(range(8, 20))  # the 12 likeliest
    assert float(jnp.sum(corpus_table([[1, 2]]).ages)) == 0


def test_bonuses_add_up_and_are_capped():
    teach = jax.jit(_add_bonus)
    start = ngrams.empty(1, 4, 12, 3, np.float32(0))
    table, gram = start, jnp.array([[[1, 2, 3], [1, 2, 4]]])
    for _ in range(20):
        table = teach(table, gram, jnp.array([[True, False]]))
    half = jax.tree.map(jnp.asarray, corpus_table([[1, 2, 3], [1, 2, 9]], buckets=4))
    tokens, scores = _successors(half, table, jnp.array([[[1, 2]]]))
    score_of = {int(t): float(s) for t, s in zip(tokens[0, 0], scores[0, 0], strict=True) if s > 0}
    assert score_of == pytest.approx({3: 1.3, 9: 0.5}, abs=1e-5)
    for _ in range(60):
        table = teach(table, gram, jnp.array([[True, True]]))
    assert shares(table, [1, 2]) == pytest.approx({3: CAP, 4: 2.4}, abs=1e-4)
    both = teach(start, jnp.array([[[1, 2, 3], [1, 2, 3]]]), jnp.array([[True, True]]))  # twice in one text
    assert shares(both, [1, 2]) == pytest.approx({3: 0.08})


@pytest.mark.parametrize("search", ["best_first", "mcts"])
def test_single_successors_make_a_chain(search):
    drafter = aded(num_nodes=8, search=search, iterations=4, buckets=16)
    text = Context(jnp.array([[0, 1, 2, 3, 4, 0, 1, 7], [5] * 8]), jnp.array([7, 1]))
    propose = jax.jit(drafter.propose)
    keys = jax.random.split(jax.random.key(0), 2)
    tree, _ = propose((), keys, jax.jit(drafter.init)((), text), text, jnp.array([9, 9]))
    assert paths_of(tree) == [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 0)]
    assert tree.tokens[:, 0].tolist() == [1, 5]
    assert paths_of(tree, 1) == []  # no pair to look up
    cut, _ = propose((), keys, jax.jit(drafter.init)((), text), text, jnp.array([2, 9]))
    assert paths_of(cut) == [(2,), (2, 3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_search_of_monte_carlo_leaves_the_text_alone(temperature):
    settings = {"key": jax.random.key(3), "max_new_tokens": 16, "temperature": temperature}
    drafter = aded(num_nodes=6, depth=3, search="mcts", iterations=5, buckets=8)
    ours = decode(markov(TARGET_ROWS), drafter, [[0, 1, 0, 1], [2]], debug=True, **settings)
    plain = decode(markov(TARGET_ROWS), autoregressive(), [[0, 1, 0, 1], [2]], **settings)
    assert ours.to_lists() == plain.to_lists()
    assert int(ours.stats.accepted.sum()) > 0


def test_what_was_taught_is_remembered():
    rows = np.full((12, 12), 1e-6, np.float32)
    rows[np.arange(11), np.arange(1, 12)] = 1.0
    settings = {"key": jax.random.key(0), "max_new_tokens": 9}
    drafter = aded(num_nodes=4, buckets=16)
    first = decode(markov(rows), drafter, [[0, 1], [0, 1]], **settings)
    again = decode(markov(rows), first.drafter, [[0, 1], [0, 1]], **settings)
    assert again.to_lists() == first.to_lists() == [list(range(2, 11))] * 2
    # Each tri-gram was taught until it was 16 tokens back or the text ended; both rows' bonuses add up.
    assert shares(first.drafter.params, [0, 1])[2] > 2 * shares(first.drafter.params, [6, 7])[8] > 0
    assert (first.stats.target_passes.tolist(), again.stats.target_passes.tolist()) == ([9, 9], [2, 2])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"search": "beam"}, 'search must be "best_first" or "mcts"'),
        ({"reward": "none"}, "reward must be"),
        ({"num_nodes": 0}, "num_nodes must be at least 1"),
        ({"depth": 1, "search": "mcts"}, "depth must be at least 2"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"buckets": 3}, "power of two"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        aded(**options)


def test_a_corpus_of_other_buckets_is_refused():
    drafter = aded(buckets=8).replace(params=corpus_table(CARD, buckets=16))
    with pytest.raises(UsageError, match="buckets must be that of the corpus table, 16"):
        drafter.init(drafter.params, Context(jnp.zeros((1, 4), jnp.int32), jnp.array([2])))
