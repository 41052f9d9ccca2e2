"""Bytes that a pass has to move."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hybrids import tiny_hybrid
from toy import tiny_llama

from specjax.models import abstract_params, make_model
from specjax.planning import traffic
from specjax.planning.abstract import cache_shapes
from specjax.planning.inputs.model_configs import load_config
from specjax.types import Target


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("cache_dtype", "each"), [(None, 2 * 64), ("int8", 64 + 4)])
def test_a_cached_token_takes_keys_and_values_of_all_layers(cache_dtype, each, stacked):
    """SmolLM2: 30 layers, 3 heads of 64 numbers; an int8 vector has a scale of 4 bytes."""
    config = dataclasses.replace(
        load_config("smollm2_135m", "bfloat16"), cache_dtype=cache_dtype, stacked=stacked, cache_lanes=1
    )
    target = Target(make_model(config), abstract_params(config))
    assert traffic.bytes_per_token(target, 4, cache_shapes(target, 4, 640)) == 4 * 30 * 3 * 2 * each


def test_the_draft_models_cache_is_found_in_the_drafters_state():
    config = load_config("smollm2_135m", "bfloat16")
    draft = Target(make_model(config), abstract_params(config))
    cache = cache_shapes(draft, 2, 256)
    assert traffic._cache_in({"a": 1, "b": (cache, 2)}, draft) is cache
    assert traffic._cache_in({"a": 1}, draft) is None


def test_windowed_layers_read_their_window():
    gemma = load_config("gemma3_270m", "bfloat16")
    assert traffic.mean_context(gemma, 4096) == pytest.approx((3 * 4096 + 15 * 512) / 18)
    assert traffic.mean_context(load_config("llama3_1b", "bfloat16"), 4096) == 4096
    mistral = dataclasses.replace(load_config("llama3_1b", "bfloat16"), window=512)
    assert traffic.mean_context(mistral, 4096) == 512, "all of its layers, as it names none"


def test_states_of_recurrent_layers_count_at_any_length():
    target = tiny_hybrid()
    cache = cache_shapes(target, 4, 640)
    assert traffic.bytes_per_token(target, 4, cache) == 4 * 2 * 16 * 4  # one layer attends, with one head of 16
    windows, states = 3 * 64 + 2 * 32 + 3 * 64, 2 * 4 * 8 * 8
    assert traffic.fixed_bytes(target, 4, cache) == 4 * 4 * (windows + states)
    moved = lambda states: traffic.pass_bytes(target.model.config, target.params, 0.0, 100.0, states=states)
    assert moved(50.0) - moved(0.0) == 100  # read and written
    longer = traffic.fixed_bytes(target, 4, cache_shapes(target, 4, 1280))
    assert longer == traffic.fixed_bytes(target, 4, cache)
    assert traffic.pending_bytes(tiny_llama(), 1) >= traffic.bytes_per_token(
        tiny_llama(), 1, cache_shapes(tiny_llama(), 1, 640)
    )


def test_a_pass_reads_states_once_and_its_commit_writes_them_once():
    target = tiny_hybrid()
    cache, config = cache_shapes(target, 4, 640), target.model.config
    shapes = jax.eval_shape(lambda: target.params)
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes)) - 4 * 64 * 32  # the embedding is looked up
    states = 4 * 4 * ((3 * 64 + 2 * 32 + 3 * 64) + 2 * 4 * 8 * 8)
    one_pass = traffic._pass_of(config, target, 4, cache)
    assert one_pass(0) == weights + 2 * states
    assert one_pass(100) - one_pass(0) == 100 * 4 * 2 * 16 * 4
