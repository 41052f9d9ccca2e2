"""Fast-dLLM++: the gap between what a choice has at least and what any other can have."""

import hand_made
import numpy as np
from hand_made import proposal, taken

from specjax.diffusion.methods.fast_dllm import by_factor
from specjax.diffusion.methods.fast_dllm_pp import frechet

FALLING = [[0.99, 0.95, 0.82, 0.78, 0.74]]


def test_the_numbers_of_the_card():
    columns = proposal(FALLING)
    for delta, count in ((0.30, 4), (0.33, 3), (0.6, 2), (0.9, 1), (0.01, 5)):  # gaps .98, .89, .58, .32, .02
        assert taken(frechet(delta), columns) == [list(range(count))]
    assert len(taken(by_factor(0.7), columns)[0]) == 2


def test_of_equal_confidences_it_takes_what_the_factor_rule_takes():
    equal = proposal(np.full((1, 32), 0.96))
    assert taken(frechet(0.25), equal) == taken(by_factor(0.75), equal) == [list(range(17))]


def test_the_bounds_of_delta():
    columns = proposal(np.random.default_rng(1).uniform(0.1, 0.99, (1, 9)))
    assert len(taken(frechet(1.0), columns)[0]) == 1
    assert taken(frechet(-1.0), columns) == [list(range(9))]


def test_it_takes_all_that_the_factor_rule_takes():
    columns = proposal(1 - np.random.default_rng(2).beta(0.5, 4, (64, 8)))
    ours, factor = (np.asarray(hand_made.select(rule, columns)[0]) for rule in (frechet(0.3), by_factor(0.7)))
    assert np.all(ours >= factor) and ours.sum() > factor.sum()


def test_what_it_takes_is_the_likeliest_choice_under_any_joint_law():
    rng, num_cases = np.random.default_rng(3), 0
    joints = rng.dirichlet(np.full(27, 0.08), 512).reshape(-1, 3, 3, 3)
    marginals = np.stack([joints.sum((2, 3)), joints.sum((1, 3)), joints.sum((1, 2))], 1)
    proposed = hand_made.of_logits(np.log(marginals))
    for joint, columns, best in zip(joints, taken(frechet(0.0), proposed), np.asarray(proposed.token), strict=True):
        if len(columns) > 1:
            other_axes = tuple(axis for axis in range(3) if axis not in columns)
            together = joint.sum(other_axes)
            choice = np.unravel_index(np.argmax(together), together.shape)
            assert list(choice) == [int(best[column]) for column in columns]
            num_cases += 1
    assert num_cases > 50
