"""LocalLeap: anchors and what lies around them."""

import hand_made
import numpy as np
import pytest
import toy_denoisers as toys
from hand_made import proposal, taken

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.local_leap import around_anchors
from specjax.diffusion.rules import threshold

CARD = [[0.3, 0.8, 0.92, 0.76, 0.4, 0.77, 0.2, 0.8]]


def test_the_numbers_of_the_card():
    columns = proposal(CARD)
    for radius, expected in ((0, [2]), (1, [1, 2, 3]), (2, [1, 2, 3]), (4, [1, 2, 3, 5]), (50, [1, 2, 3, 5, 7])):
        assert taken(around_anchors(0.9, 0.75, radius), columns) == [expected]


def test_without_an_anchor_one_column():
    assert taken(around_anchors(0.95, 0.75, 4), proposal(CARD)) == [[2]]


def test_a_decided_column_is_no_anchor():
    view = hand_made.view([1, 1, 0, 1, 1, 1, 1, 1])
    assert taken(around_anchors(0.9, 0.75, 2), proposal(CARD), view) == [[1]]


def test_no_radius_or_no_lower_bar_is_the_threshold_rule():
    columns = proposal(np.random.default_rng(0).uniform(0.3, 1, (64, 9)))
    plain = hand_made.select(threshold(0.9), columns)[0]
    for rule in (around_anchors(0.9, 0.5, 0), around_anchors(0.9, 0.9, 3), around_anchors(0.9, 0.95, 3)):
        np.testing.assert_array_equal(hand_made.select(rule, columns)[0], plain)


def test_what_hangs_on_the_column_before_is_decided_one_at_a_time():
    denoiser = toys.ladder()
    result = specjax.denoise(denoiser, methods.local_leap(denoiser), [[1, 2]], key=0, max_new_tokens=9)
    assert result.decided_at[0].tolist() == list(range(9))


def test_a_radius_below_0_is_refused():
    with pytest.raises(UsageError, match="radius"):
        methods.local_leap(toys.full(), radius=-1)
