"""Results can be pickled, under any mode of JAX, and neither the kind of a seed nor the number of eos ids matters."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama

import specjax
from specjax import UsageError, decode, drafters, stream
from specjax.engine import run
from specjax.serving.batch import Served

PROMPTS = [[1, 2, 3, 1, 2], [4, 5]]
OPTIONS = {"key": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def drafter():
    return drafters.token_recycling(64, num_nodes=4)


def again(value):
    return pickle.loads(pickle.dumps(value))


def test_targets_are_pickled_as_the_same_model(drafter):
    """It is the very object, so nothing is compiled again; a copy shares it."""
    target = tiny_llama()
    other = again(target)
    assert other.model is target.model is copy.deepcopy(target).model
    expected = decode(target, drafter, PROMPTS, **OPTIONS).to_lists()
    compiled = run.run._cache_size()
    assert decode(other, drafter, PROMPTS, **OPTIONS).to_lists() == expected
    assert run.run._cache_size() == compiled


def test_a_changed_model_is_not_pickled_as_the_one_of_its_config():
    model = tiny_llama().model
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(model._replace(rewind=None))


def test_sharded_targets_are_refused_in_one_sentence():
    sharded = specjax.shard(tiny_llama(layers=1), specjax.mesh(1, 2))
    with pytest.raises(UsageError, match=r"llama is sharded over a mesh, which cannot be pickled; pickle the model"):
        pickle.dumps(sharded)
    assert copy.deepcopy(sharded.model) is sharded.model


def test_results_and_steps_are_pickled_without_their_functions(drafter):
    result = decode(tiny_llama(), drafter, PROMPTS, **OPTIONS)
    other = again(result)
    assert result.drafter is not None and other.drafter is None
    assert other.to_lists() == result.to_lists() and other.finish_reasons == result.finish_reasons
    *_, last = stream(tiny_llama(), drafter, PROMPTS, **OPTIONS)
    assert last.drafter is not None and again(last).drafter is None and again(last).tokens == last.tokens
    served = Served(3, [1, 2], 1, "length", drafter=lambda: drafter)
    assert again(served) == served._replace(drafter=None)


@pytest.mark.parametrize("kind", [jnp.int32, jnp.int8, np.int64, np.uint8, lambda seed: np.array(seed), "traced"])
def test_a_seed_may_be_any_integer(kind):
    target = markov()
    text = lambda key: decode(target, drafters.autoregressive(), [[0]], key=key, max_new_tokens=8, temperature=1.0)
    result = jax.jit(text)(5) if kind == "traced" else text(kind(5))
    assert result.to_lists() == text(5).to_lists() != text(6).to_lists()


def test_negative_traced_seeds():
    text = lambda key: decode(markov(), drafters.autoregressive(), [[0]], key=key, max_new_tokens=8, temperature=1.0)
    assert jax.jit(text)(-7).to_lists() == text(-7).to_lists() == text(jax.random.key(-7)).to_lists()


@pytest.mark.parametrize("key", [jnp.float32(5), jnp.arange(3), jnp.bool_(True), "5"])
def test_other_values_are_no_seeds(key):
    with pytest.raises(UsageError, match=r"key must be a jax\.random\.key, a PRNGKey array or a seed"):
        decode(markov(), drafters.autoregressive(), [[0]], key=key, max_new_tokens=2)


def test_under_debug_nans():
    """Depths that were never drafted have the rate nan, which is no error."""
    drafter = drafters.prompt_lookup(3)
    with jax.debug_nans(True):
        result = decode(tiny_llama(), drafter, [[1, 2]], key=0, max_new_tokens=2, temperature=0.7)
        assert result.finite.all() and np.isnan(result.acceptance_by_depth).any()
    traced = jax.jit(lambda result: result.acceptance_by_depth)(result)
    np.testing.assert_array_equal(traced, result.acceptance_by_depth)


def test_the_number_of_eos_ids_does_not_change_the_program():
    target, drafter = tiny_llama(), drafters.prompt_lookup(2)
    text = lambda eos: decode(target, drafter, PROMPTS, eos=eos, **OPTIONS).to_lists()
    plain = text(())
    compiled = run.run._cache_size()
    unused = sorted({*range(64)} - {token for row in plain for token in row})
    for count in (1, 2, 8):
        assert text(unused[:count]) == plain
    last = plain[0][-1]
    assert text([*unused[:3], last])[0] == plain[0][: plain[0].index(last) + 1]
    assert run.run._cache_size() == compiled
    assert text(unused[:9]) == plain and run.run._cache_size() == compiled + 1
