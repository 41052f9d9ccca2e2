"""Coherent candidates, against a loop of numpy."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Procedure, methods, rules, schedules
from specjax.diffusion.methods.ccd import coherent

START = 2


def order_of(sure, candidates, warmup, dynamic):
    """The pass in which each column is decided, where words never change; falling entropy is rising confidence."""
    sure, size = np.asarray(sure), len(sure)
    decided, previous, passes = np.full(size, -1), set(), 0
    while (decided < 0).any():
        ranked = sorted(np.flatnonzero(decided < 0), key=lambda i: (-sure[i], i))
        named = ranked[: 1 if 10 * len(ranked) <= size else min(passes + 1, candidates)]
        again = [i for i in named if i in previous]
        is_confirmed = ranked[0] in previous and again and passes >= warmup
        take = (again if dynamic else again[:1]) if is_confirmed else ranked[:1]
        decided[take] = passes
        previous, passes = set(named), passes + 1
    return decided.tolist()


@pytest.mark.parametrize("dynamic", [True, False])
def test_of_frozen_words_it_is_the_loop(dynamic):
    sure = np.linspace(0.95, 0.3, 24)[np.random.default_rng(0).permutation(24)]
    denoiser = toys.frozen([0.5] * START + sure.tolist())
    method = methods.ccd(denoiser, block=None, dynamic=dynamic)
    result = specjax.denoise(denoiser, method, [[1] * START], key=0, max_new_tokens=24)
    assert result.decided_at[0].tolist() == order_of(sure, 5, 5, dynamic)
    assert result.to_lists() == [[(START + i) % 11 for i in range(24)]]
    passes = result.stats.target_passes[0]
    assert passes == 24 if not dynamic else passes < 14


def state_of(rule, opened):
    canvas = type("Canvas", (), {"tokens": jnp.zeros((len(opened), 9))})
    return rule.init((), canvas, len(opened[0]), 12)


def decide(rule, steps, opened):
    """Return what each pass takes of columns that stay open."""
    state, taken = state_of(rule, opened), []
    for i, (best, sure) in enumerate(steps):
        view = hand_made.window(opened, entered=i == 0)
        take, _, state = rule.select((), state, hand_made.proposal([sure], [best], narrow=True), view, jnp.ones(1, int))
        taken.append(hand_made.places(take)[0])
    return taken


def test_a_word_that_changed_is_held_back():
    opened, sure = [[True] * 6], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    same, changed = [1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6]
    rule = coherent(3, 0, True)
    # named: {0}, {0, 1}, {0, 1, 2}, {0, 1, 2}; coherent from the second pass on
    assert decide(rule, [(same, sure)] * 4, opened) == [[0], [0], [0, 1], [0, 1, 2]]
    assert decide(rule, [*[(same, sure)] * 3, (changed, sure)], opened)[3] == [0, 1]
    assert decide(rule, [*[(same, sure)] * 3, ([9] * 6, sure)], opened)[3] == [0]  # nothing is coherent
    assert decide(coherent(3, 0, False), [(same, sure)] * 4, opened) == [[0]] * 4
    assert decide(coherent(3, 3, True), [(same, sure)] * 4, opened) == [[0], [0], [0], [0, 1, 2]]


def test_a_surest_column_that_is_new_is_decided_alone():
    opened, rule = [[True] * 6], coherent(3, 0, True)
    sure, other = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.9, 0.8, 0.7, 0.6, 0.5, 0.95]
    words = [1, 2, 3, 4, 5, 6]
    assert decide(rule, [*[(words, sure)] * 3, (words, other)], opened)[3] == [5]


def test_one_candidate_is_one_a_pass_by_entropy():
    denoiser, settings = toys.full(), {"key": 1, "max_new_tokens": 14}
    ours = specjax.denoise(denoiser, methods.ccd(denoiser, block=8, candidates=1), [[1, 2, 3]], **settings)
    base = Procedure(schedules.blocks(8), rules.quota("entropy"))
    plain = specjax.denoise(denoiser, base, [[1, 2, 3]], **settings)
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    with pytest.raises(UsageError, match="candidates"):
        methods.ccd(denoiser, candidates=0)
