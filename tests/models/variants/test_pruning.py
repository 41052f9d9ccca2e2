"""Smaller models made of a base model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from specjax.models import narrow_mlps
from specjax.models.bridge import abstract_params
from specjax.models.variants.pruning import prune_layers
from specjax.numerics.quantized_array import WeightFormat, as_float_weights

FORMS = {
    "a scale per row": WeightFormat(inputs="int8"), "groups of 16": WeightFormat(bits=4, group=16),
    "groups of 32": WeightFormat(group=32),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("width", [8, 16, 24])
def test_first_units_of_quantised_mlps_are_those_of_the_expanded_model(name, width):
    target = toy.quantized(toy.tiny_llama(layers=2), FORMS[name])
    narrow = narrow_mlps(target, width)
    matrices = {part: layer["weight"] for part, layer in as_float_weights(narrow.params["layers"][1]["mlp"]).items()}
    full = {part: layer["weight"] for part, layer in as_float_weights(target.params["layers"][1]["mlp"]).items()}
    np.testing.assert_array_equal(matrices["down"], full["down"][:, :width])
    np.testing.assert_array_equal(matrices["up"], full["up"][:width])
    expected = abstract_params(narrow.model.config)
    assert jax.tree.map(jnp.shape, narrow.params) == jax.tree.map(lambda x: x.shape, expected)


def test_formats_stay_with_the_layers_that_remain():
    target = toy.quantized(toy.tiny_llama(layers=3), WeightFormat(), "layers.0.mlp.*", "layers.2.attention.*")
    pruned = prune_layers(target, [2, 1, 2])
    assert jax.tree.structure(pruned.params) == jax.tree.structure(abstract_params(pruned.model.config))
    patterns = [pattern for pattern, _ in pruned.model.config.quantized]
    assert patterns == ["layers.0.attention.*", "layers.2.attention.*"]
