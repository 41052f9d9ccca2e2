"""The card's tests of SkipDecode (B2)."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError, adaptive
from specjax.adaptive.skip_decode import budgets
from specjax.models.skipping.policy import TokenPositions


def layers_of(depth, num_layers, at, prompt=5):
    """The layers that the generated tokens `at` run; -1: the last of the prompt."""
    carry = depth.plan((), TokenPositions(prompt + jnp.array([at]), jnp.array([prompt])), (), num_layers)
    runs = [np.asarray(depth.runs(carry, layer).attention)[0] for layer in range(num_layers)]
    return [np.where(column)[0].tolist() for column in np.array(runs).T]


def test_the_cards_example():
    depth = adaptive.skip_decode(max_layers=24, min_layers=8, horizon=8)
    prompt, first, middle, last, behind = layers_of(depth, 24, [-1, 0, 4, 8, 30])
    assert prompt == first == list(range(24))
    assert middle == [0, *range(9, 24)]
    assert last == behind == [0, *range(17, 24)]


def test_the_sets_are_nested():
    for warm_up in (1, 3):
        sets = layers_of(adaptive.skip_decode(2.0, warm_up=warm_up, horizon=40), 24, list(range(60)))
        assert all(set(later) <= set(earlier) for earlier, later in itertools.pairwise(sets))
        assert [len(sets[0]), len(sets[-1])] == list(budgets(2.0, None, None, warm_up, 24))


def test_budgets():
    assert budgets(2.0, None, None, 1, 24) == (18, 6)
    assert budgets(1.0, None, None, 1, 24) == (24, 24)
    assert budgets(24.0, None, None, 1, 24) == (2, 2)
    for arguments, words in (
        ((1.5, 30, None, 1), "to the 24 layers of the model"),
        ((1.5, 6, 8, 1), "not 6 and 8"),
        ((1.5, 20, 2, 3), "from warm_up, 3,"),
    ):
        with pytest.raises(UsageError, match=words):
            budgets(*arguments, 24)
    for options, words in (({"speedup": 0.5}, "speedup must be at least 1"), ({"warm_up": 0}, "warm_up and horizon")):
        with pytest.raises(UsageError, match=words):
            adaptive.skip_decode(**options)
