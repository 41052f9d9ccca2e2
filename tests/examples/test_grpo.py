"""The rollout example: one update, its gradients and log-probabilities; what it learns in a few."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from scripts import module_at

FILE = pathlib.Path(__file__).parents[2] / "examples" / "grpo_rollout.py"


@pytest.fixture(scope="module")
def grpo():
    return module_at(FILE)


def test_one_update(grpo, capsys):
    (metrics,) = grpo.main(["--updates", "1"])
    assert "update 0: reward" in capsys.readouterr().out
    assert metrics.logprob_gap < 1e-4  # the sampler's log-probabilities are those of the differentiated pass
    assert np.isfinite(metrics.gradient_norm) and metrics.gradient_norm > 0
    assert abs(metrics.loss) < 1e-5  # the ratios are 1 and the advantages of a group add up to 0
    assert 0.3 < metrics.reward < 0.7
    assert metrics.tokens_per_pass >= 1


def test_reward_rises(grpo):
    history = grpo.main(["--updates", "12", "--learning-rate", "0.02"])
    assert np.mean([m.reward for m in history[-3:]]) > np.mean([m.reward for m in history[:3]]) + 0.1


def test_advantages_are_normalised_within_groups(grpo):
    ours = grpo.advantages_of(jnp.array([0.0, 1.0, 5.0, 5.0]), 2)
    np.testing.assert_allclose(ours, [-1, 1, 0, 0], atol=1e-3)


def test_rewards_count_what_was_sampled(grpo):
    tokens = jnp.array([[2, 4, 3, -1], [1, 1, 1, 1]])
    alive = jnp.array([[True, True, True, False], [True] * 4])
    np.testing.assert_allclose(grpo.reward_of(tokens, alive), [2 / 3, 0])
