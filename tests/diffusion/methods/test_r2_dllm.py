"""R2-dLLM: each of the three rules by itself."""

import numpy as np
import pytest
import toy_denoisers as toys
from hand_made import proposal, select, taken, view

from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.r2_dllm import redundant
from specjax.diffusion.rules import threshold

OFF = 2.0
CLUSTER = redundant(0.9, 0.8, OFF, OFF, 3)
REPEAT = redundant(0.9, OFF, 0.8, OFF, 3)


def test_with_all_three_off_it_is_the_threshold_rule():
    columns = proposal(np.random.default_rng(0).uniform(0.3, 1, (64, 9)))
    off, plain = (select(rule, columns)[0] for rule in (redundant(0.9, OFF, OFF, OFF, 3), threshold(0.9)))
    np.testing.assert_array_equal(off, plain)


def test_three_in_a_row_that_are_sure_enough_together():
    """.85, .70 and .86 have the mean .803; the surest column, .89, is taken first, and no part of them."""
    assert taken(CLUSTER, proposal([[0.85, 0.70, 0.86, 0.1, 0.1, 0.89]])) == [[0, 1, 2, 5]]
    assert taken(CLUSTER, proposal([[0.85, 0.68, 0.86, 0.1, 0.1, 0.89]])) == [[5]]
    assert taken(CLUSTER, proposal([[0.85, 0.70, 0.86]])) == [[2]]  # what is left has the mean .775
    assert taken(CLUSTER, proposal([[0.85, 0.78, 0.86]])) == [[0, 1, 2]]


def test_one_of_the_three_may_be_decided_but_not_two():
    sure = proposal([[0.85, 0.3, 0.82, 0.1, 0.1, 0.89]])
    assert taken(CLUSTER, sure, view([1, 0, 1, 1, 1, 1])) == [[0, 2, 5]]
    assert taken(CLUSTER, proposal([[0.3, 0.85, 0.3, 0.1, 0.1, 0.89]]), view([0, 1, 0, 1, 1, 1])) == [[5]]


def test_three_columns_must_exist():
    """The window has five, of which the text has two: open ones are no cluster of three with what is behind it."""
    two_open = view([1, 1, 0, 0, 0])
    assert taken(
        CLUSTER, proposal([[0.85, 0.84, 0.1, 0.1, 0.1]]), two_open._replace(revisable=two_open.open & False)
    ) == [[0]]
    sure = proposal([[0.85, 0.84, 0.89, 0.1, 0.1]])
    assert taken(CLUSTER, sure, view([1, 1, 1, 0, 0])) == [[0, 1, 2]]


def test_of_a_run_of_one_token_only_the_surest():
    sure, token = [[0.5, 0.82, 0.6, 0.3, 0.1, 0.85]], [[5, 5, 5, 9, 8, 7]]
    assert taken(REPEAT, proposal(sure, token)) == [[1, 5]]
    assert taken(REPEAT, proposal([[0.5, 0.79, 0.6, 0.3, 0.1, 0.85]], token)) == [[5]]
    assert taken(REPEAT, proposal([[0.82, 0.82, 0.6, 0.3, 0.81, 0.85]], [[5, 5, 5, 9, 8, 7]])) == [[0, 5]]
    assert taken(REPEAT, proposal(sure, token), view([1, 1, 0, 1, 1, 1])) == [[1, 5]]
    assert taken(REPEAT, proposal(sure, token), view([0, 1, 0, 1, 1, 1])) == [[5]]  # a run of one
    assert taken(redundant(0.9, OFF, 0.8, OFF, 3), proposal([[0.5, 0.82, 0.6, 0.3]], [[5, 5, 5, 9]])) == [[1]]


@pytest.mark.parametrize(
    ("over", "sure", "expected"),
    [
        ("last", (0.60, 0.70, 0.81), 2), ("last", (0.60, 0.70, 0.79), None), ("mean", (0.60, 0.70, 0.81), None),
        ("mean", (0.85, 0.80, 0.78), 2), ("max", (0.81, 0.70, 0.60), 2), ("last", (0.81, 0.82, 0.7, 0.83), 3),
    ],
)  # fmt: skip
def test_a_token_that_stays_is_taken_in_its_third_pass(over, sure, expected):
    assert first_taken(over, [(one, 4) for one in sure]) == expected


def test_another_token_or_another_window_begins_anew():
    same = [(0.85, 4)] * 5
    assert first_taken("last", same) == 2
    assert first_taken("last", [*same[:2], (0.85, 5), *same]) == 5
    assert first_taken("last", same, entered=(0, 1)) == 3
    assert first_taken("mean", [(0.7, 3), *same]) == 3  # the confidence of another token is no part of the mean


def first_taken(over, passes, entered=(0,)):
    """The pass that takes column 0, beside a column that is the surest in each of them."""
    rule, state = redundant(0.9, OFF, OFF, 0.8, 3, over), None
    for number, (sure, token) in enumerate(passes):
        proposed = proposal([[sure, 0.89]], [[token, number % 2]])
        take, _, state = select(rule, proposed, view([1, 1], entered=number in entered), state=state)
        if bool(take[0, 0]):
            return number
    return None


def test_what_is_taken_for_its_likeliest_token_becomes_that():
    proposed = proposal([[0.5, 0.82, 0.85]], [[5, 5, 7]])
    drawn = proposed._replace(token=proposed.token.at[0, 1].set(3))
    take, token, _ = select(redundant(0.9, OFF, 0.8, OFF, 3), drawn)
    assert np.flatnonzero(take[0]).tolist() == [1, 2] and token[0, 1:3].tolist() == [5, 7]


def test_what_is_no_setting_is_refused():
    for wrong in ({"times": 0}, {"over": "median"}):
        with pytest.raises(UsageError):
            methods.r2_dllm(toys.full(), **wrong)
