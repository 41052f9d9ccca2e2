"""Tests of every rule that decides without a state, over random proposals."""

import itertools

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.diffusion import measures
from specjax.diffusion.methods.dimple import confident
from specjax.diffusion.methods.dparallel import certain
from specjax.diffusion.methods.dream import by_chance
from specjax.diffusion.methods.entropy_bound import within
from specjax.diffusion.methods.fast_dllm import by_factor
from specjax.diffusion.methods.fast_dllm_pp import frechet
from specjax.diffusion.methods.local_leap import around_anchors
from specjax.diffusion.methods.r2_dllm import redundant
from specjax.diffusion.rules import quota, threshold
from specjax.diffusion.rules.quota import MEASURES
from specjax.numerics import sampling

ROWS, WIDTH, WORDS = 64, 7, 5


def random_windows():
    """Proposals from nearly flat to nearly certain, some rows with equal columns, some with nothing to decide."""
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(ROWS, WIDTH, WORDS)) * rng.choice([0.0, 1.0, 4.0, 12.0], (ROWS, WIDTH, 1))
    logits[:8] = logits[:8, :1]
    logits[8:16, :, 0] = -np.inf
    opened = rng.random((ROWS, WIDTH)) < 0.7
    eligible = opened & (rng.random((ROWS, WIDTH)) < 0.8)
    eligible[16:20] = False
    return hand_made.of_logits(logits), hand_made.view(opened, eligible=eligible)


PROPOSED, SEEN = random_windows()

BY_ONE_NUMBER = {
    "threshold": (threshold, (1.1, 0.9, 0.5, 0.0), "confidence"),
    "strict threshold": (lambda tau: threshold(tau, strict=True), (1.1, 0.9, 0.5, 0.0), "confidence"),
    "factor": (by_factor, (0.0, 0.5, 1.0, 9.0), "confidence"),
    "frechet": (frechet, (1.0, 0.5, 0.1, -1.0), "confidence"),
    "entropy bound": (within, (-1.0, 0.1, 1.0, 99.0), "entropy"),
    "entropy bound without its own": (lambda gamma: within(gamma, False), (-1.0, 0.1, 1.0, 99.0), "entropy"),
    "entropy": (certain, (-1.0, 0.1, 0.5, 9.0), "entropy"),
    "anchors": (lambda tau: around_anchors(tau, 0.6, 2), (1.1, 0.9, 0.7, 0.0), "confidence"),
    "anchors by what is near": (lambda near: around_anchors(0.9, near, 2), (1.1, 0.7, 0.4, 0.0), None),
    "redundant": (lambda tau: redundant(tau, 2, 2, 2, 3), (1.1, 0.9, 0.5, 0.0), "confidence"),
}
"""Of each: its factory by a number, numbers from the strictest to the most generous, what one a pass is ranked by."""


def take_of(rule, share=1):
    take, _, _ = hand_made.select(rule, PROPOSED, SEEN, share)
    return np.asarray(take)


def check(take):
    """Only what is eligible, and at least one of that."""
    eligible = np.asarray(SEEN.eligible)
    assert not np.any(take & ~eligible)
    np.testing.assert_array_equal(take.any(1), eligible.any(1))


@pytest.mark.parametrize("name", BY_ONE_NUMBER)
def test_a_more_generous_number_takes_more(name):
    make, numbers, by = BY_ONE_NUMBER[name]
    takes = [take_of(make(number)) for number in numbers]
    for take in takes:
        check(take)
    for less, more in itertools.pairwise(takes):
        assert np.all(more >= less)
    assert takes[-1].sum() > takes[0].sum()
    if by is not None:
        np.testing.assert_array_equal(takes[0], take_of(quota(by)))


@pytest.mark.parametrize("by", MEASURES)
def test_a_larger_quota_takes_more_and_exactly_that(by):
    eligible = np.asarray(SEEN.eligible).sum(1)
    takes = {count: take_of(quota(by), count) for count in (0, 1, 3, 99)}
    for count, take in takes.items():
        check(take)
        np.testing.assert_array_equal(take.sum(1), np.minimum(eligible, max(count, 1)))
    assert np.all(takes[3] >= takes[1]) and np.all(takes[99] == np.asarray(SEEN.eligible))


def test_other_settings_too():
    redundants = redundant(0.9, 0.5, 0.5, 0.5, 1), redundant(0.9, 0.3, 0.3, 0.3, 2, "mean")
    for rule in (*redundants, by_chance("margin", 0.3), confident(0.9), confident(1.1), confident(0.5, 3)):
        check(take_of(rule))


def test_a_strict_threshold_does_not_take_what_equals_it():
    columns = hand_made.uniform([[4, 2, 1]])  # of confidence 1/4, 1/2 and 1, exactly
    assert hand_made.taken(threshold(1.0), columns) == [[2]]
    assert hand_made.taken(threshold(1.0, strict=True, min_columns=2), columns) == [[1, 2]]


def test_of_equal_columns_the_lower_ones():
    equal = hand_made.proposal(np.full((1, 5), 0.5))
    for rule in (quota(), quota("entropy"), quota("margin")):
        assert hand_made.taken(rule, equal, quota=2) == [[0, 1]]


def test_which_columns_chance_takes_says_nothing_of_their_tokens():
    """The column that is taken of two columns with two words each has either word half of the time."""
    rows = 2000
    view = hand_made.view(np.ones((rows, 2)))
    token = jnp.argmax(sampling.noise(view.keys[:, :2], 2), -1)
    proposed = hand_made.of_logits(np.ones((rows, 2, 2)))
    for rule in (quota("random"), by_chance("confidence", 1.0)):
        take, _, _ = hand_made.select(rule, proposed, view)
        first = np.asarray(token)[np.asarray(take)[:, :2]]
        assert len(first) == rows and abs(first.mean() - 0.5) < 4 * 0.5 / np.sqrt(rows)


def test_a_greedy_token_is_as_sure_as_the_logits_before_say():
    np.testing.assert_array_equal(take_of(quota("warped_confidence")), take_of(quota("confidence")))


def test_confidence_of_the_draw_counts_filters_only_where_tokens_are_drawn():
    """Column 0 is the surer one by itself, column 1 once the rows are cut to their two largest."""
    plain = hand_made.of_logits(np.log([[[0.5, 0.45, 0.05], [0.48, 0.26, 0.26]]]))
    cut = jnp.where(jnp.arange(hand_made.VOCAB) < 2, plain.logits, -jnp.inf)
    drawn = plain._replace(warped=cut, filtered=cut, greedy=jnp.zeros(1, bool))
    np.testing.assert_allclose(measures.drawn_confidence(plain)[0, :2], [0.5, 0.48], rtol=1e-6)
    np.testing.assert_allclose(measures.drawn_confidence(drawn)[0, :2], [0.5 / 0.95, 0.48 / 0.74], rtol=1e-6)
    rule = threshold(0.6, measure=measures.drawn_confidence)
    assert hand_made.taken(rule, plain) == [[0]] and hand_made.taken(rule, drawn) == [[1]]
