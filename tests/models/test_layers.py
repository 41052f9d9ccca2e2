"""The layer loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax.arrays import platforms
from specjax.models import bridge, init_params, make_model
from specjax.models.layers import run_layers


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


@pytest.mark.parametrize("taps", [(0, 2, 5), (6,), ()])
def test_scanned_layers_store_the_streams_that_are_read(taps, monkeypatch):
    """No array has the streams of all layers. The mutant stores all of them, and reads the same numbers."""
    batch, count, layers = 2, 3, 6
    config = dataclasses.replace(tiny_llama(layers=layers).model.config, stacked=True)
    model, params = make_model(config), init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, count), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(count), (batch, count))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))

    def run():
        cache = model.init_cache(params, None, batch, 128)
        options = {"positions": positions, "mask": mask, "taps": taps}
        read = lambda params: model.forward(params, tokens, cache, **options)[0].taps
        return jax.jit(read).lower(params).as_text(), read(params)

    text, streams = run()
    every_layer = f"tensor<{layers}x{batch}x{count}x{config.width}x"
    assert every_layer not in text and len(streams) == len(taps)
    monkeypatch.setattr(bridge, "run_layers", lambda *arguments, taps, **options: run_layers(*arguments, **options))
    all_text, expected = run()
    jax.tree.map(np.testing.assert_array_equal, streams, expected)
    assert every_layer in all_text or taps != (0, 2, 5)
