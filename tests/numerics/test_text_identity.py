"""The promise about a text follows the numbers that are rounded: of parameters, cache and products."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from toy import markov, tiny_llama

import specjax
from specjax import adaptive
from specjax.models import init_params, make_model
from specjax.models.storage import SCHEMES
from specjax.numerics.text_identity import describe_identity, text_identity


def changed(**fields):
    config = dataclasses.replace(tiny_llama().model.config, **fields)
    return specjax.Target(make_model(config), jax.eval_shape(lambda: init_params(config, jax.random.key(0))))


@pytest.mark.parametrize(
    ("fields", "identity", "words"),
    [
        ({}, "exact", "except at ties within float32 rounding"),
        ({"dtype": "bfloat16", "same_bits": True}, "same bits", "rounding changes no text"),
        ({"dtype": "bfloat16"}, "near-ties possible", "bfloat16 numbers"),
        ({"cache_dtype": "int8"}, "near-ties possible", "the int8 cache"),
        ({"quantized": (("*", SCHEMES["int8"]),)}, "near-ties possible", "activations to int8"),
        ({"quantized": (("*", SCHEMES["int8-weights"]),)}, "exact", "ties within float32"),
        ({"quantized": (("*", SCHEMES["fp8"]),)}, "exact", "ties within float32"),
        ({"quantized": (("*", SCHEMES["fp8"]),), "dtype": "bfloat16"}, "near-ties possible", "bfloat16 numbers"),
    ],
)
def test_the_promise_of_a_model(fields, identity, words):
    target = changed(**fields)
    assert text_identity(target) == identity
    assert describe_identity(target).startswith(f"{identity}: ") and words in describe_identity(target)


def test_one_rounded_parameter_is_enough():
    target = tiny_llama()
    params = target.params | {"head": {"weight": target.params["head"]["weight"].astype(jnp.bfloat16)}}
    assert text_identity(specjax.Target(target.model, params)) == "near-ties possible"


def test_a_rounded_cache_and_parameters_that_are_numbers():
    """The cache has the dtype of the config. Parameters of a model of one's own may be Python numbers."""
    target, short = tiny_llama(), changed(dtype="bfloat16")
    assert text_identity(specjax.Target(short.model, target.params)) == "near-ties possible"
    plain = markov()
    for config, identity in (
        (SimpleNamespace(dtype="fast"), "exact"),
        (SimpleNamespace(dtype=jnp.bfloat16), "near-ties possible"),
    ):
        model = plain.model._replace(config=config)
        assert text_identity(specjax.Target(model, {"decay": 0.5, "steps": 3})) == identity


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_dtype": "int8"}, "the int8 cache"),
        ({"dtype": "bfloat16"}, "bfloat16 numbers"),
        ({"quantized": (("*", SCHEMES["int8"]),)}, "activations to int8"),
        ({}, "except at ties"),
    ],
)
def test_a_variant_has_the_promise_of_the_model_inside(fields, words):
    """A model that skips layers has no config of its own."""
    variant = adaptive.skip_layers(changed(num_layers=4, **fields), adaptive.ffn_skip(first=1, last=1))
    assert variant.model.config is None
    assert words in describe_identity(variant)


def test_a_narrow_cache_of_a_model_without_a_config_counts():
    plain = markov()
    for dtype, identity in ((jnp.float32, "exact"), (jnp.int32, "exact"), (jnp.int8, "near-ties possible")):
        cache = lambda params, inputs, batch, capacity, dtype=dtype: jnp.zeros((batch, capacity), dtype)
        model = plain.model._replace(init_cache=cache, config=None)
        assert text_identity(specjax.Target(model, plain.params)) == identity


def test_the_callers_precision_counts_on_accelerators(monkeypatch):
    assert text_identity(markov()) == "exact"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert text_identity(markov()) == "exact"  # the library multiplies in float32
    with jax.default_matmul_precision("tensorfloat32"):
        assert text_identity(markov()) == "near-ties possible"
        assert "float32 products of precision tensorfloat32" in describe_identity(markov())


def test_results_state_it():
    result = specjax.decode(markov(), "prompt_lookup", [[0, 1, 0]], key=0, max_new_tokens=4)
    assert result.text_identity == "exact"
    assert jax.tree.map(lambda x: x, result).text_identity == "exact"
