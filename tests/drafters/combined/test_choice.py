"""Tests of the bandit over drafters: exact text, choice of arms by reward, bad settings."""

import dataclasses

import jax
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import auto, autoregressive, choice, prompt_lookup, suffix, token_recycling, two_model
from specjax.engine.job import Keep
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start
from specjax.engine.step import step


def cycle(n):
    """Return a target that cycles through n tokens."""
    rows = np.full((n, n), 1e-6, np.float32)
    rows[np.arange(n), (np.arange(n) + 1) % n] = 1.0
    return markov(rows)


@pytest.mark.parametrize(("price", "max_passes", "min_passes"), [(1.0, 75, 0), (50.0, 300, 200)])
def test_it_drafts_where_it_pays_and_is_plain_where_not(price, max_passes, min_passes):
    several = prompt_lookup(3), token_recycling(7, num_nodes=3)
    drafter = choice(*several, depths=(3,), costs=(1.0, price))
    result = decode(cycle(7), drafter, [[0]], key=jax.random.key(0), max_new_tokens=210)
    assert result.to_lists()[0] == [(t + 1) % 7 for t in range(210)]
    assert min_passes <= int(result.stats.target_passes[0]) <= max_passes
    arms = 3
    if min_passes:  # each arm once, then hardly ever
        assert int(result.stats.drafted[0]) < 3 * 3 * arms


def test_text_is_that_of_plain_sampling():
    target = tiny_llama()
    run = lambda drafter: decode(
        target, drafter, [[1, 2, 1, 2], [3]], key=jax.random.key(1), max_new_tokens=20, temperature=1.0
    ).to_lists()
    several = prompt_lookup(3, min_ngram=1), token_recycling(64, num_nodes=3)
    assert run(choice(*several)) == run(autoregressive())


@pytest.mark.parametrize("name", ["auto", "choice"])
def test_a_step_does_not_read_its_own_randomness(name):
    """Change the key for the same past: the verdict changes, and the draft does not."""
    drafter = {
        "auto": lambda: auto(64, widths=(1, 4, 8), costs=(1.0, 1.01, 1.02)),
        "choice": lambda: choice(prompt_lookup(3, min_ngram=1), token_recycling(64, num_nodes=3), costs=(1.0, 1.01)),
    }[name]()
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2, i] for i in range(16)]
    settings = Settings(temperature=1.0)
    job = prepare(tiny_llama(), drafter, prompts, settings, key=jax.random.key(0), max_new_tokens=40)
    parts = dataclasses.replace(job.parts, keep=Keep(scored=True))
    state, advance = start(job), jax.jit(step)
    num_drafted = 0
    for number in range(6):
        reseeded = state._replace(keys=jax.random.split(jax.random.key(9 + number), len(prompts)))
        (state, ours), (_, theirs) = advance(parts, state), advance(parts, reseeded)
        for one, other in zip(jax.tree.leaves(ours.scored.tree), jax.tree.leaves(theirs.scored.tree), strict=True):
            np.testing.assert_array_equal(one, other)
        assert (ours.tokens != theirs.tokens).any()
        num_drafted += int(ours.drafted.sum())
    assert num_drafted > 0


def test_what_its_drafters_read_and_remember_is_theirs():
    """Continue in a second call with the matrix, the prompt's entries and the rewards of the arms."""
    drafter = choice(prompt_lookup(3), token_recycling(7, num_nodes=3, read_prompt=True), depths=(3,), costs=(1.0, 1.0))
    run = lambda drafter: decode(cycle(7), drafter, [[0]], key=jax.random.key(0), max_new_tokens=70)
    first = run(drafter)
    second = run(first.drafter)
    assert second.to_lists() == first.to_lists()
    assert int(second.stats.target_passes[0]) < int(first.stats.target_passes[0])
    assert float(second.drafter.params.arms.pulls.sum()) > float(first.drafter.params.arms.pulls.sum()) > 0
    assert (first.drafter.params.several[1].tokens[0] >= 0).all()
    prompted = decode(cycle(7), drafter, [[*range(7), *range(7)]], key=jax.random.key(0), max_new_tokens=1)
    assert (prompted.drafter.params.several[1].tokens[0] >= 0).all()  # from the prompt alone


def test_bad_settings():
    with pytest.raises(UsageError, match="at least one drafter"):
        choice()
    with pytest.raises(UsageError, match="the same drafter twice"):
        choice(prompt_lookup(3), prompt_lookup(3))
    with pytest.raises(UsageError, match="that follow any tree"):
        choice(two_model(tiny_llama()))
    with pytest.raises(UsageError, match="depths must be at least 1"):
        choice(prompt_lookup(3), depths=(0,))


def test_steps_of_rows_that_have_ended_teach_no_arm():
    drafter = choice(prompt_lookup(3), token_recycling(7, num_nodes=3), costs=(1.0, 1.0))
    job = prepare(cycle(7), drafter, [[0]], Settings(), key=jax.random.key(0), max_new_tokens=4)
    state, advance, over = start(job), jax.jit(step), False
    while not over:
        state, _ = advance(job.parts, state)
        over = bool(state.done.all())
    idle, _ = advance(job.parts, state)
    jax.tree.map(np.testing.assert_array_equal, idle.draft.arms, state.draft.arms)


def test_it_may_be_a_fallback_under_a_wider_pass():
    drafter = suffix(9, min_match=3, fallback=choice(prompt_lookup(3), token_recycling(64, num_nodes=3)))
    text = lambda drafter: decode(
        tiny_llama(), drafter, [[1, 2, 3, 1, 2, 3, 1]], key=jax.random.key(0), max_new_tokens=24
    ).to_lists()
    assert text(drafter) == text(autoregressive())
