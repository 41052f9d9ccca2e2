"""The Adam loop of trainers of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.adaptive.optimise import descend
from specjax.errors import UsageError
from specjax.numerics.quantized_array import WeightFormat, quantize_rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_small_updates_of_16_bits_add_up(dtype):
    """A step of 1e-4 is below half of the distance to the next number of 16 bits at 1."""
    start = {"x": jnp.ones((), dtype)}
    run = jax.jit(lambda params: descend(lambda params: params["x"].astype(jnp.float32), params, 100, 1e-4))
    params, losses = run(start)
    assert params["x"].dtype == dtype and losses.dtype == jnp.float32
    np.testing.assert_allclose(np.float32(params["x"]), 0.99, atol=2**-8)
    assert losses[0] == 1 > losses[-1]


def test_quantised_parameters_are_refused():
    params = {"x": quantize_rows(jnp.ones((2, 4)), WeightFormat())}
    with pytest.raises(UsageError, match="the weights of the model to train are quantised"):
        descend(lambda params: jnp.sum(params["x"].expand()), params, 1, 1e-4)
