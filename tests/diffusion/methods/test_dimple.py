"""Dimple: its rule, its shares, and the prompt that is read once."""

import hand_made
import numpy as np
import toy_denoisers as toys
from hand_made import proposal, shares, taken

import specjax
from specjax.diffusion import methods
from specjax.diffusion.methods.dimple import confident, next_times
from specjax.diffusion.rules import threshold

SURE = [[0.5, 0.96, 0.7, 0.98, 0.6]]


def test_what_is_sure_enough_or_else_the_share():
    columns = proposal(SURE)
    assert taken(confident(0.95), columns, quota=3) == [[1, 3]]
    assert taken(confident(0.0), columns) == [[0, 1, 2, 3, 4]]
    assert taken(confident(0.99), columns, quota=3) == [[1, 2, 3]] and taken(confident(0.99), columns) == [[3]]
    assert taken(confident(0.95), columns, quota=5) == [[0, 1, 2, 3, 4]]  # the last step


def test_nothing_is_surer_than_1():
    assert taken(confident(1.0), proposal([[1.0, 1.0, 0.3]]), quota=2) == [[0, 1]]


def by_the_card(columns, steps, eps=1e-3):
    times, left, counts = np.linspace(1, eps, steps + 1), columns, []
    while left:
        t = left / columns
        fits = [int(left * (1 - s / t)) for s in times if s < t and int(left * (1 - s / t)) >= 1]
        counts.append(left if len(counts) == steps - 1 else (fits or [1])[0])
        left -= counts[-1]
    return counts


def test_shares_are_those_of_the_next_time_that_has_one():
    assert shares(next_times(steps=4), 8) == [1, 2, 2, 3]  # Dream's
    for columns, steps in ((14, 5), (7, 3), (12, 64), (5, 1), (32, 6)):
        assert shares(next_times(steps=steps), columns) == by_the_card(columns, steps)
    assert shares(next_times(), 9) == [1] * 9


def test_confidence_is_that_before_temperature():
    columns = proposal(SURE)
    hot = columns._replace(warped=columns.logits / 5)
    assert taken(confident(0.95), hot) == taken(confident(0.95), columns)


def test_the_prompt_is_read_once_and_of_one_layer_that_changes_nothing():
    denoiser, prompts = toys.full("shifted", layers=1), [[1, 2, 3, 4, 5], [6]]
    once, always = (
        specjax.denoise(
            denoiser, methods.dimple(denoiser, prefill=prefill, gamma=0.3), prompts, key=1, max_new_tokens=9
        )
        for prefill in (True, False)
    )
    assert once.to_lists() == always.to_lists() and once.decided_at.tolist() == always.decided_at.tolist()
    passes = once.stats.target_passes
    assert once.columns.tolist() == (10 * passes).tolist()
    assert always.columns.tolist() == [14 * int(passes[0]), 10 * int(passes[1])]


def test_one_a_pass_where_nothing_is_sure_is_the_threshold_rule():
    columns = proposal(np.random.default_rng(0).uniform(0.3, 0.999, (64, 7)))
    np.testing.assert_array_equal(*(hand_made.select(rule, columns)[0] for rule in (confident(0.9), threshold(0.9))))
