"""Weights and resampling by hand."""

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
