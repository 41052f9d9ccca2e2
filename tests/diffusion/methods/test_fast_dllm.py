"""Fast-dLLM: the factor rule beside the released loop."""

import hand_made
import numpy as np
import pytest
import toy_denoisers as toys
from diffusion_oracles import released_factor

from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.fast_dllm import by_factor


def test_the_factor_rule_is_the_released_one_but_for_a_last_column_that_violates_its_bound():
    rng, counts = np.random.default_rng(0), []
    sure = np.sort(rng.uniform(0.3, 1, (400, 7)) ** rng.uniform(0.02, 0.6, (400, 1)), 1)[:, ::-1]
    for factor in (0.5, 1.0, 2.0):
        ours = np.asarray(hand_made.select(by_factor(factor), hand_made.proposal(sure))[0]).sum(1)
        theirs = np.array([released_factor(row, factor) for row in sure])
        last_alone = ours == 6
        np.testing.assert_array_equal(theirs, np.where(last_alone, 7, ours))
        counts.append(last_alone.sum())
    assert sum(counts) > 50  # of 1,200


def test_the_numbers_of_the_card():
    sure = hand_made.proposal([[0.99, 0.95, 0.82, 0.78, 0.74]])
    assert [len(hand_made.taken(by_factor(factor), sure)[0]) for factor in (1.0, 0.7)] == [3, 2]


def test_a_choice_without_effect_is_refused():
    for wrong, words in (
        ({"factor": 0.5}, "factor has no effect with rule=threshold; leave factor out, or set rule=factor"),
        ({"rule": "factor", "tau": 0.5}, "tau has no effect with rule=factor"),
    ):
        with pytest.raises(UsageError, match=words):
            methods.fast_dllm(toys.full(), **wrong)
