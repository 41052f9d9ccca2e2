"""dParallel's rule: entropy up to a bound."""

import hand_made
import numpy as np
from hand_made import taken, uniform

from specjax.diffusion.methods.dparallel import certain
from specjax.diffusion.rules import quota


def test_every_column_of_little_entropy_and_at_least_one():
    columns = uniform([3, 1, 2, 6, 1])  # 1.10, 0, 0.69, 1.79, 0
    for eta, expected in ((-1.0, [1]), (0.5, [1, 4]), (0.7, [1, 2, 4]), (2.0, [0, 1, 2, 3, 4])):
        assert taken(certain(eta), columns) == [expected]
    assert taken(certain(0.5), uniform([3, 2, 6])) == [[1]]


def test_below_0_it_is_one_a_pass_by_entropy():
    columns = hand_made.of_logits(np.random.default_rng(0).normal(size=(64, 7, 5)))
    one, surest = (np.asarray(hand_made.select(rule, columns)[0]) for rule in (certain(-1.0), quota("entropy")))
    np.testing.assert_array_equal(one, surest)
    assert np.any(surest != np.asarray(hand_made.select(quota(), columns)[0]))  # which is not by confidence
