"""Rotation in the form of GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays import platforms
from specjax.models.layers import rope


@pytest.mark.parametrize(("rotated", "amplitude"), [(8, None), (6, 1.5)])
def test_the_form_without_a_concatenation_rotates_by_the_same_angles(rotated, amplitude, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    positions = jnp.array([[0, 1, 5], [7, 100, 3]])
    frequencies = 0.3 ** jnp.arange(rotated // 2)
    wanted = rope(x, positions, frequencies, amplitude=amplitude)
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    np.testing.assert_allclose(rope(x, positions, frequencies, amplitude=amplitude), wanted, atol=1e-6)
    assert not np.allclose(wanted[..., :rotated], x[..., :rotated], atol=0.1)
