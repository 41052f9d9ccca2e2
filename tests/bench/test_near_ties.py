"""Tests of the place where two greedy texts part, and of how close the choice was."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.analysis import last_token_model
from specjax.bench.near_ties import NEAR_TIE, find_difference, next_logits

LAWS = np.array([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6], [0.5, 0.4999, 0.0001]])


def test_the_logits_are_those_after_the_last_token():
    assert next_logits(last_token_model(LAWS), [0, 2, 1], 1) == pytest.approx(np.log(LAWS[1]), rel=1e-5)


@pytest.mark.parametrize(
    ("ours", "plain", "position", "pair", "near_tie"),
    [
        ([1, 2, 0], [1, 2, 1], 2, (0, 1), True),  # 0.5 against 0.4999
        ([2, 0], [1, 2], 0, (2, 1), False),  # 0.4 against 0.5
        ([1, 2, 2], [1, 2, 0], 2, (2, 0), False),  # the two largest are a near-tie, but this is the third
        ([1], [1, 2], 1, (None, 2), False),  # one text has ended
    ],
)
def test_a_flip_is_a_near_tie_only_between_the_likeliest(ours, plain, position, pair, near_tie):
    difference = find_difference(last_token_model(LAWS), [0], ours, plain, "float32")
    assert (difference.position, (difference.token, difference.plain_token), difference.near_tie) == (
        position,
        pair,
        near_tie,
    )
    assert (difference.behind < NEAR_TIE["float32"]) == near_tie


def test_equal_texts_do_not_part():
    assert find_difference(last_token_model(LAWS), [0], [1, 2], [1, 2], "float32") is None
