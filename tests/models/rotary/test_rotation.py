"""Rotation of queries and keys."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays import platforms
from specjax.models.rotary import Rotation, rotate


@pytest.mark.parametrize(("rotated", "amplitude"), [(8, None), (6, 1.5)])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_form_rotates_by_the_same_angles(platform, rotated, amplitude, monkeypatch):
    """Compare with complex numbers in float64. Numbers after the rotated ones stay."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    positions = np.array([[0, 1, 5], [7, 100, 3]])
    frequencies = 0.3 ** np.arange(rotated // 2)
    half = rotated // 2
    turned = (x[..., :half] + 1j * x[..., half:rotated]) * np.exp(1j * positions[..., None, None] * frequencies)
    turned *= amplitude or 1.0
    wanted = np.concatenate([turned.real, turned.imag, x[..., rotated:]], -1)
    monkeypatch.setattr(platforms, "of_program", lambda: platform)
    rotation = Rotation.at(jnp.array(positions), jnp.array(frequencies), amplitude)
    np.testing.assert_allclose(rotate(jnp.array(x), rotation), wanted, atol=2e-5)
    assert not np.allclose(wanted[..., :rotated], x[..., :rotated], atol=0.1)
