"""Bytes that a pass has to move."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from specjax.models import make_model
from specjax.planning import traffic
from specjax.planning.model_configs import load_config


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("cache_dtype", "each"), [(None, 2 * 64), ("int8", 64 + 4)])
def test_a_cached_token_takes_keys_and_values_of_all_layers(cache_dtype, each, stacked):
    """SmolLM2: 30 layers, 3 heads of 64 numbers; an int8 vector has a scale of 4 bytes."""
    config = dataclasses.replace(
        load_config("smollm2_135m", "bfloat16"), cache_dtype=cache_dtype, stacked=stacked, cache_lanes=1
    )
    model = make_model(config)
    cache = jax.eval_shape(lambda: model.init_cache(4, 640))
    leaves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache)
    assert traffic.bytes_per_token(model, 4, leaves) == 4 * 30 * 3 * 2 * each


def test_the_draft_models_cache_is_found_in_the_drafters_state():
    draft = make_model(load_config("smollm2_135m", "bfloat16"))
    cache = jax.eval_shape(lambda: draft.init_cache(2, 256))
    assert traffic._cache_in({"a": 1, "b": (cache, 2)}, draft, 2) is cache
    assert traffic._cache_in({"a": 1}, draft, 2) is None


def test_windowed_layers_read_their_window():
    gemma = load_config("gemma3_270m", "bfloat16")
    assert traffic._mean_context(gemma, 4096) == pytest.approx((3 * 4096 + 15 * 512) / 18)
    assert traffic._mean_context(load_config("llama3_1b", "bfloat16"), 4096) == 4096
