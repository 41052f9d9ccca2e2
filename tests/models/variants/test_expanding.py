"""Float copies of quantised models, and the refusal to train them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import quantized, tiny_llama

from specjax.errors import UsageError
from specjax.models.variants.expanding import check_trainable, expand_target
from specjax.numerics.quantized_array import as_float_weights
from specjax.training.methods.lexical_units import train_lud

INT4 = quantized(tiny_llama(), "int4-weights")


def test_an_expanded_model_has_the_values_of_the_quantised_one():
    expanded = expand_target(INT4)
    assert expanded.model.config.quantized == () and INT4.model.config.quantized != ()
    jax.tree.map(np.testing.assert_array_equal, expanded.params, as_float_weights(INT4.params))
    assert expand_target(expanded) is expanded
    assert jax.tree.map(jnp.shape, expanded.params) == jax.tree.map(jnp.shape, tiny_llama().params)


def test_quantised_weights_are_not_trained():
    check_trainable(expand_target(INT4).params, "it")
    tokens, length = jnp.ones((1, 4), jnp.int32), jnp.array([4])
    with pytest.raises(UsageError, match=r"the weights of .* are quantised, and training and low-rank updates change"):
        train_lud(INT4, tokens, length, pad_token=0, key=0, steps=1)
