"""The entropy bound: how many columns fit, in both forms."""

import hand_made
import numpy as np
from hand_made import taken, uniform

from specjax.diffusion.methods.entropy_bound import within

LOG = np.log


def test_the_longest_run_of_least_entropies_within_the_bound():
    columns = uniform([3, 1, 2, 6])  # entropies 1.10, 0, 0.69, 1.79: in order 0, 0.69, 1.79, 3.58 with those before
    for gamma, expected in (
        (0.0, [1]), (0.5, [1]), (0.7, [1, 2]), (1.7, [1, 2]), (1.8, [0, 1, 2]), (3.5, [0, 1, 2]), (3.6, [0, 1, 2, 3]),
    ):  # fmt: skip
        assert taken(within(gamma), columns) == [expected]


def test_without_its_own_entropy_one_more_fits():
    columns = uniform([3, 1, 2, 6])
    for gamma, expected in ((-1.0, [1]), (0.5, [1, 2]), (0.7, [0, 1, 2]), (1.8, [0, 1, 2, 3])):
        assert taken(within(gamma, include_own=False), columns) == [expected]


def test_columns_that_may_not_be_decided_do_not_count():
    view = hand_made.view([1, 1, 1, 1], eligible=[1, 0, 0, 1])
    assert taken(within(1.5), uniform([3, 1, 2, 6]), view) == [[0]]
    assert taken(within(LOG(18) + 0.01), uniform([3, 1, 2, 6]), view) == [[0, 3]]


def test_the_whole_entropy_counts_not_what_the_likeliest_token_adds():
    spread = hand_made.proposal([[0.6, 0.6]])  # -0.6 log 0.6 = 0.31 each, in all 0.31 + 0.4 log(11 / 0.4) = 1.63
    assert taken(within(1.0), spread) == [[0]] and taken(within(3.3), spread) == [[0, 1]]
