"""Tests of the step from acceptance rates to tokens."""

from __future__ import annotations

import pytest

from specjax import trees
from specjax.costs.tokens import expected_tokens, rank_acceptance
from specjax.trees.templates import branching_paths


def test_expected_tokens_of_chains_and_trees():
    """The chain values are those of the cost model's card: 1, 1.7, 2.19, 2.533, 2.7731, 2.9412 at 0.7."""
    chain = lambda k: tuple((0,) * depth for depth in range(1, k + 1))
    by_length = [expected_tokens(chain(k), rank_acceptance(0.7)) for k in range(6)]
    assert by_length == pytest.approx([1, 1.7, 2.19, 2.533, 2.7731, 2.94117])
    a = (0.6, 0.2, 0.1)
    for n, depth in ((5, None), (6, None), (4, 2)):
        value, paths = trees.sequoia(a, n, depth)
        assert expected_tokens(paths, a) == pytest.approx(value)
    assert expected_tokens(branching_paths((2, 1)), a) == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    assert expected_tokens(((3,),), a) == 1  # a rank that was not measured is worth nothing


def test_rank_acceptance_is_a_distribution():
    assert rank_acceptance(0.5, 3) == pytest.approx((0.5, 0.25, 0.125))
    assert sum(rank_acceptance(0.9)) <= 1
