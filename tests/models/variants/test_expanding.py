"""Quantised models with parts of their layers, and their float copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import quantized, tiny_llama

from specjax.errors import UsageError
from specjax.models import narrow_mlps
from specjax.models.variants.expanding import check_trainable, expand_target
from specjax.models.variants.low_rank import init_lora
from specjax.numerics.quantized_array import as_float_weights
from specjax.training.methods.lexical_units import train_lud

INT4 = quantized(tiny_llama(), "int4-weights")


def test_an_expanded_model_has_the_values_of_the_quantised_one():
    expanded = expand_target(INT4)
    assert expanded.model.config.quantized == () and INT4.model.config.quantized != ()
    jax.tree.map(np.testing.assert_array_equal, expanded.params, as_float_weights(INT4.params))
    assert expand_target(expanded) is expanded
    assert jax.tree.map(jnp.shape, expanded.params) == jax.tree.map(jnp.shape, tiny_llama().params)


@pytest.mark.parametrize("width", [32, 24])
def test_the_first_units_of_quantised_mlps_are_those_of_the_expanded_model(width):
    """The matrix `down` has groups of 64 inputs here, and one of 16 in another format, which 24 units cut."""
    target = quantized(tiny_llama(), "int4-weights", group=16)
    narrow, expanded = narrow_mlps(target, width), narrow_mlps(expand_target(target), width)
    jax.tree.map(np.testing.assert_array_equal, as_float_weights(narrow.params), expanded.params)


def test_quantised_weights_are_not_trained():
    check_trainable(expand_target(INT4).params, "it")
    tokens, length = jnp.ones((1, 4), jnp.int32), jnp.array([4])
    for train in (
        lambda: init_lora(INT4, jax.random.key(0)),
        lambda: train_lud(INT4, tokens, length, pad_token=0, key=0, steps=1),
    ):
        with pytest.raises(UsageError, match=r"the weights of .* are quantised, and training changes float weights"):
            train()
