"""The layer loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax.arrays import platforms
from specjax.models import init_params, make_model


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (9, 1)])
def test_tokens_that_fill_a_tile_of_a_tpu_change_nothing(shape, stacked, monkeypatch):
    """Nine rows fill a tile of eight without them."""
    config = dataclasses.replace(tiny_llama().model.config, stacked=stacked, qkv_bias=True)
    model, params = make_model(config), init_params(config, jax.random.key(0))
    batch, count = shape
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    positions = jnp.broadcast_to(5 + jnp.arange(count), shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))
    cache = model.init_cache(params, None, batch, 128)
    read = lambda: model.forward(params, tokens, cache, positions=positions, mask=mask, taps=(0, 1))

    def shapes():
        equations = jax.make_jaxpr(lambda: read())().eqns  # a new function, because JAX caches what it has traced
        return {result.aval.shape for equation in equations for result in equation.outvars}

    wanted, wide = read(), (batch, -(-8 // batch), config.width)
    assert wide not in shapes() or wide[1] == count
    monkeypatch.setattr(platforms, "of_program", lambda: "tpu")
    assert wide in shapes()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), read(), wanted)
