"""The card's tests of SWIFT (B3): sets, matchness, search and tree."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, decode
from specjax.arrays.logit_rows import LogitRows
from specjax.drafters import autoregressive, swift
from specjax.drafters.layers.swift import SkipSearch, SkipSet, _proposal, matchness, search_once
from specjax.engine.prefill import prefill
from specjax.trees import chain_with_siblings
from specjax.trees.contracts import Parents
from specjax.types import Context

WINDOW = 6
PROMPTS = [[7, 1, 2, 3], [9, 9, 4]]
START = jnp.array([4, 3])
LIMIT = jnp.array([9, 9])
LENGTH = START + 8


def search(**changes):
    settings = {"layers": (1, 2), "ratio": 0.25, "window": WINDOW, "enough": 1.0, "patience": 99, "max_trials": 99}
    return SkipSearch(**({"num_layers": 4} | settings | changes))


@functools.cache
def context():
    """Return the state after the prompts and 8 tokens of the model."""
    target = tiny_llama(layers=4)
    answers = decode(target, autoregressive(), PROMPTS, key=jax.random.key(0), max_new_tokens=8).to_lists()
    tokens = jnp.asarray([(prompt + new + [0] * 300)[:212] for prompt, new in zip(PROMPTS, answers, strict=True)])
    cache = prefill(
        target.model, target.params, target.model.init_cache(target.params, None, 2, 212), tokens, LENGTH - 1
    )
    return Context(tokens, LENGTH, cache=cache, target=target)


def scored(skipped, rows=(True, True)):
    run = jax.jit(functools.partial(matchness, search()))
    return run(skipped, np.array(rows), START, context())


def empty(search, start=START):
    first = jnp.broadcast_to(jnp.asarray(search.first()), (2, 2 * len(search.layers)))
    zeros = jnp.zeros((2,), jnp.int32)
    return SkipSet(first, zeros - 1, zeros, zeros, start)


def test_sets_have_27_of_60_sublayers_between_the_first_and_the_last_layer():
    big = search(num_layers=32, layers=tuple(range(1, 31)), ratio=0.45)
    assert (big.size, len(big.first()), big.first().sum()) == (27, 60, 27)
    assert big.first()[:6].tolist() == [True, False] * 3  # attention of layers 1, 3, 5
    state = empty(big)
    for trial in range(6):
        proposed = _proposal(state._replace(trials=jnp.array([trial, trial + 1])), big.size)
        assert proposed.sum(1).tolist() == [27, 27]
        runs = big.sublayers(proposed)
        assert runs.attention[:, jnp.array([0, 31])].all() and runs.mlp[:, jnp.array([0, 31])].all()
        changed = (proposed != state.skipped).sum(1)
        assert int(changed[1 - trial % 2]) == 2  # odd trials exchange one
        assert int(changed[trial % 2]) > 2


def test_nothing_skipped_is_always_accepted():
    target = tiny_llama(layers=3)
    drafter = swift(target, 3, ratio=0.0, stop=0.0)
    result = decode(target, drafter, [[1, 2, 3], [4]], key=jax.random.key(0), max_new_tokens=16)
    assert result.block_efficiency.tolist() == [4.0, 4.0]


def test_matchness_in_one_pass_is_that_of_single_steps():
    target, settings = tiny_llama(layers=4), search()
    skipped = jnp.array([[False, False, True, False], [True, False, False, True]])
    hits = np.zeros(2, int)
    cache = target.model.rewind(context().cache, START)

    @jax.jit
    def step(cache, tokens, positions):
        output, pending = target.model.forward(
            target.params, tokens, cache, positions=positions, mask=jnp.ones((2, 1, 1), bool),
            layers=settings.sublayers(skipped),
        )  # fmt: skip
        return jnp.argmax(output.logits[:, 0], -1), target.model.commit(
            cache, pending, jnp.zeros((2, 1), jnp.int32), jnp.ones((2,), jnp.int32)
        )

    for t in range(WINDOW):
        places = START[:, None] + t
        at = lambda places: jnp.take_along_axis(context().tokens, places, 1)
        named, cache = step(cache, at(places), places)
        hits += np.asarray(named == at(places + 1)[:, 0])
    assert 0 < hits.min() <= hits.max() < WINDOW
    assert scored(skipped).tolist() == hits.tolist()
    assert scored(skipped & False).tolist() == [WINDOW, WINDOW]  # nothing skipped: the text is the model's own
    assert scored(skipped, (False, True)).tolist()[1] == hits[1]  # whether other rows search does not matter


def test_the_search_is_monotone_and_reaches_the_best_set():
    """Return all sets of two of eight sublayers."""
    settings, ctx = search(layers=(0, 1, 2, 3)), context()
    score = jax.jit(lambda skipped: matchness(settings, skipped, jnp.array([True, True]), START, ctx))
    sets = [np.isin(np.arange(8), pair) for pair in itertools.combinations(range(8), settings.size)]
    scores = np.array([score(jnp.stack([jnp.asarray(s)] * 2)) for s in sets])
    best = scores.max(0)
    assert len(sets) == 28
    assert (np.mean(scores == best, 0) < 0.5).all()  # most sets are worse
    run = jax.jit(lambda state: search_once(settings, state, ctx, LIMIT))
    state = empty(settings)
    for trial in range(60):
        previous, state = state, run(state)
        assert (state.hits >= previous.hits).all()
        if trial == 0:
            np.testing.assert_array_equal(state.skipped, previous.skipped)  # the first set is scored first
    assert state.hits.tolist() == best.tolist()
    assert score(state.skipped).tolist() == best.tolist()


def test_the_search_waits_for_enough_text_and_ends():
    run = lambda settings, state: search_once(settings, state, context(), LIMIT)
    waiting = empty(search(), jnp.array([6, 4]))  # 6 and 7 tokens are there: not more than 6, and more
    assert run(search(), waiting).trials.tolist() == [0, 1]
    resting = search_once(search(), waiting, context(), jnp.array([9, 0]))  # the second row drafts nothing
    assert resting.trials.tolist() == [0, 0]
    spent = empty(search())._replace(
        hits=jnp.array([WINDOW, 0]), trials=jnp.array([3, 3]), failures=jnp.array([0, 2])
    )  # fmt: skip
    assert run(search(enough=0.9, patience=3), spent).trials.tolist() == [3, 4]
    assert run(search(enough=0.9, patience=2), spent).trials.tolist() == [3, 3]
    assert run(search(enough=0.9, max_trials=3), spent).trials.tolist() == [3, 3]
    unfinished = run(search(enough=1.0, patience=3), spent)  # a score at the bar is not above it
    assert unfinished.trials.tolist() == [4, 4]
    np.testing.assert_array_equal(unfinished.hits[0], WINDOW)


@pytest.mark.parametrize(("keys", "counts"), [(None, [3, 8, 10]), (jax.random.key(0), [1, 8, 10])])
def test_less_sure_tokens_have_more_siblings(keys, counts):
    """Check the card's example: largest probabilities .97, .7, .3 give 3, 8 and 10 candidates (greedy)."""
    builder, total = chain_with_siblings(3), 0
    if keys is not None:
        keys, counts = jnp.broadcast_to(keys, (1, 1)), [1, 5, 10]
        tops = (0.97, 0.6, 0.3)
    else:
        tops = (0.97, 0.7, 0.3)
    for top, count in zip(tops, counts, strict=True):
        distribution = jnp.full((1, 1, 20), (1 - top) / 19).at[0, 0, 5].set(top)
        parents = Parents(jnp.array([[4]]), jnp.array([[True]]), LogitRows(jnp.log(distribution)), keys, False)
        _, level = builder.expand((), 0, parents)
        assert level.valid.sum() == count
        assert level.feed.tolist() == [[0]]
        assert (level.parents == 4).all()
        if keys is None:
            assert level.tokens[0, 0] == 5
        total += count
    assert total == (21 if keys is None else 16)


def test_the_tree_is_lossless_and_deeper_than_it_is_wide():
    target = tiny_llama(layers=3)
    wanted = decode(target, swift(target, 3), [[1, 2, 3], [4]], key=jax.random.key(0), max_new_tokens=16)
    drafter = swift(target, tree=chain_with_siblings(3), window=4, stop=0.3)
    result = decode(target, drafter, [[1, 2, 3], [4]], key=jax.random.key(0), max_new_tokens=16, debug=True)
    assert result.to_lists() == wanted.to_lists()


def test_bad_settings():
    for options, message in (
        ({}, "a model of 2 layers has none between"),
        ({"layers": (0, 2)}, "layers must be from 0 to 1"),
        ({"layers": (0,), "ratio": 1.0}, "ratio must be at least 0 and below 1"),
        ({"layers": (0,), "window": 0}, "window must be at least 1"),
        ({"layers": (0,), "num_tokens": 0}, "num_tokens must be at least 1"),
        ({"layers": (0,), "patience": 0}, "patience must be at least 1"),
        ({"layers": (0,), "enough": float("nan")}, "enough is a fraction of the window"),
        ({"layers": (0,), "stop": -0.1}, "stop must be at least 0"),
    ):
        with pytest.raises(UsageError, match=message):
            swift(tiny_llama(), **options)
