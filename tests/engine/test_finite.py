"""Weights and configs that give no numbers are noticed and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import decode, stream
from specjax.drafters import autoregressive, prompt_lookup
from specjax.engine.value_checks import explain_failure
from specjax.models import make_model
from specjax.types import Target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5]]
OPTIONS = {"key": jax.random.key(0), "max_new_tokens": 3}


def spoiled(*path, value=np.nan):
    """The tiny model with one element of a parameter replaced."""
    target = tiny_llama()

    def one(where, leaf):
        return leaf.at[(0,) * leaf.ndim].set(value) if tuple(part.key for part in where) == path else leaf

    return Target(target.model, jax.tree_util.tree_map_with_path(one, target.params))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "path", [("layers", 1, "mlp", "down", "weight"), ("layers", 0, "attention", "k", "weight"), ("head", "weight")]
)
def test_a_bad_weight_is_found_and_named(path, value):
    target = spoiled(*path, value=value)
    result = decode(target, autoregressive(), PROMPTS, **OPTIONS)
    assert result.finite.tolist() == [False, False]
    assert ".".join(map(str, path)) in explain_failure(target)


@pytest.mark.parametrize("changes", [{"rope_base": 0.0}, {"norm_eps": -1.0}])
def test_an_impossible_config_is_found(changes):
    good = tiny_llama()
    target = Target(make_model(dataclasses.replace(good.model.config, **changes)), good.params)
    assert not decode(target, prompt_lookup(), PROMPTS, **OPTIONS).finite.any()
    assert "config" in explain_failure(target)


def test_prompts_of_one_token():
    result = decode(spoiled("layers", 0, "attention", "k", "weight"), autoregressive(), [[1], [4]], **OPTIONS)
    assert result.finite.tolist() == [False, False]


def test_numbers_are_numbers():
    for target in (tiny_llama(), tiny_llama(stacked=True), markov()):
        prompts = PROMPTS if target.model.name == "llama" else [[0, 1], [2]]
        assert decode(target, prompt_lookup(), prompts, **OPTIONS).finite.tolist() == [True, True]


def test_one_token_of_a_batch_and_a_stream_of_steps():
    """A bad vector of one token is that of the rows that have it."""
    good = tiny_llama()
    embed = good.params["embed"]["weight"].at[4].set(jnp.nan)
    target = Target(good.model, good.params | {"embed": {"weight": embed}})
    assert decode(target, autoregressive(), PROMPTS, **OPTIONS).finite.tolist() == [True, False]
    for step in stream(target, autoregressive(), PROMPTS, **OPTIONS):
        assert step.info.finite.tolist() == [True, False]
