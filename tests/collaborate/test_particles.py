"""Weights and resampling by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.collaborate.particles import ess, systematic

W = jnp.log(jnp.array([[0.5, 0.3, 0.1, 0.1]]))


def test_ess_and_ancestors_by_hand():
    np.testing.assert_allclose(ess(W), [2.7778], rtol=1e-4)
    np.testing.assert_allclose(ess(jnp.zeros((1, 7))), [7.0], rtol=1e-6)
    assert systematic(jnp.array([0.5]), W).tolist() == [[0, 0, 1, 2]]
    assert systematic(jnp.array([0.5]), jnp.zeros((1, 4))).tolist() == [[0, 1, 2, 3]]


def test_nobody_descends_from_a_weight_of_zero():
    logw = jnp.array([[-jnp.inf, 0.0, -jnp.inf]])
    for u0 in (1e-7, 0.5, 1 - 1e-7):
        assert systematic(jnp.array([u0]), logw).tolist() == [[1, 1, 1]]


def test_expected_numbers_of_copies_are_the_weights():
    u0 = (jnp.arange(1000) + 0.5) / 1000
    ancestors = systematic(u0, jnp.broadcast_to(W, (1000, 4)))
    counts = np.stack([(np.asarray(ancestors) == i).sum(1) for i in range(4)], 1)
    np.testing.assert_allclose(counts.mean(0), [2, 1.2, 0.4, 0.4], atol=2e-3)
    assert np.abs(counts - [2, 1.2, 0.4, 0.4]).max() < 1


def test_many_particles_need_no_table_of_all_pairs():
    """The indices of a few particles are those counted one by one, and 60,000 particles take little memory."""
    rng = np.random.default_rng(0)
    logw, u0 = jnp.asarray(rng.normal(size=(4, 50)) * 3, jnp.float32), jnp.asarray(rng.uniform(size=4), jnp.float32)
    total, u = jnp.cumsum(jax.nn.softmax(logw, 1), 1), (u0[:, None] + jnp.arange(50)) / 50
    counted = jnp.minimum(jnp.sum(total[:, None, :] <= u[:, :, None], 2), 49)
    np.testing.assert_array_equal(systematic(u0, logw), counted)
    assert systematic(jnp.array([0.5]), jnp.zeros((1, 60_000)))[0, -1] > 59_000
