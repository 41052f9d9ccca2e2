"""Regret in simulation: rewards as a drafter's rounds pay them, noisy, with gaps that matter and arms that change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError
from specjax.controllers.bandit import ucb


def simulate(means, rounds, seed=0, noise=0.5, bandit=None):
    """Mean rewards float32[rounds] of the arms pulled; `means` [K] or [rounds, K]."""
    bandit = bandit or ucb(np.shape(means)[-1])
    means = jnp.broadcast_to(jnp.asarray(means, jnp.float32), (rounds, np.shape(means)[-1]))

    def body(arms, xs):
        mean, key = xs
        arm = bandit.choose(arms)
        reward = jnp.maximum(mean[arm] + noise * jax.random.normal(key), 0.0)
        return bandit.update(arms, arm, reward), mean[arm]

    keys = jax.random.split(jax.random.key(seed), rounds)
    return np.asarray(jax.jit(lambda: jax.lax.scan(body, bandit.init(), (means, keys))[1])())


@pytest.mark.parametrize("means", [(1.0, 1.5, 0.8, 0.6), (1.0, 0.9, 0.8, 0.7), (1.0, 2.0, 2.1, 0.5)])
def test_regret_against_the_best_fixed_arm(means):
    earned = np.mean([simulate(means, 1000, seed).mean() for seed in range(5)])
    assert earned > 0.9 * max(means)
    assert earned > np.mean(means) * 1.05  # picking arms in turn is caught


def test_it_follows_a_change():
    means = np.repeat([[1.0, 2.0], [1.0, 0.5]], 600, 0)
    earned = simulate(means, 1200)
    assert earned[1000:].mean() > 0.9
    never_forgets = simulate(means, 1200, bandit=ucb(2, memory=1.0))
    assert earned[600:].mean() > never_forgets[600:].mean()


def test_every_arm_is_tried_first_in_order():
    bandit, order = ucb(3), []
    arms = bandit.init()
    for _ in range(3):
        order.append(int(bandit.choose(arms)))
        arms = bandit.update(arms, jnp.int32(order[-1]), jnp.float32(1.0))
    assert order == [0, 1, 2]
    with pytest.raises(UsageError, match="a bandit needs arms"):
        ucb(0)
