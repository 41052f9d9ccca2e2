"""Linear recurrences over token trees, against recurrences in float64."""

import jax.numpy as jnp
import numpy as np

from specjax.models.hybrid import recurrence as R


def test_sums_of_strong_decays_keep_small_differences():
    """A sum of -4,000 in one float32 number has an error of 2e-4."""
    decay = np.concatenate([np.full(200, -20.3), np.full(60, -0.001)])[None, :, None]
    parts = np.cumsum(np.asarray(R.split_decay(jnp.asarray(decay, jnp.float32))), 1, dtype=np.float32)
    difference = np.sum(parts[:, -1] - parts[:, 200], -1)
    np.testing.assert_allclose(difference, -0.059, atol=2e-7)
    alone = np.cumsum(decay.astype(np.float32), 1, dtype=np.float32)
    assert abs(alone[0, -1, 0] - alone[0, 200, 0] + 0.059) > 1e-4
