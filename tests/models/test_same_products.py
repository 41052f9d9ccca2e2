"""Products of a row do not depend on the other rows, also where the row is longer than kernels sum up in one go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UsageError
from specjax.models import LlamaConfig, make_model, products


def test_long_rows():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((24, 8192), (96, 8192)))
    run = jax.jit(lambda x: products.same_project(x, weight, jnp.float32))
    whole = np.asarray(run(x))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(whole, exact, atol=0.02)
    for rows in (1, 2, 9, 16):
        np.testing.assert_array_equal(run(x[:rows]), whole[:rows])


def test_float32_is_refused():
    config = LlamaConfig(61, 32, 1, 2, 2, 16, 40, same_bits=True)
    with pytest.raises(UsageError, match='same_bits is of dtype "bfloat16", not "float32"'):
        make_model(config)
