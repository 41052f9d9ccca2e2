"""Texts of several models on eight devices equal those on one, with every method, including authors and costs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import those
from toy import tiny_llama

import specjax
from specjax.catalog import of_kind
from specjax.types import Target

WIDTH = 32
PROMPTS = [*lib.PROMPTS, [3]]
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(len(PROMPTS)))


@functools.cache
def llama(seed: int, data: int, model: int) -> Target:
    full = tiny_llama(seed, num_heads=8, num_kv_heads=8, head_dim=16, width=WIDTH, vocab=lib.VOCAB)
    return full if data * model == 1 else specjax.shard(full, specjax.mesh(data, model))


def run(name: str, data: int, model: int):
    """Run a method of `texts.calls` with models that can be split."""
    method, models, settings = lib.calls()[name]
    seeds = {id(lib.history(seed)): seed for seed in range(3)}

    def split(argument: Any) -> Any:
        return llama(seeds[id(argument)], data, model) if isinstance(argument, Target) else argument

    settings = {setting: split(value) for setting, value in settings.items()}
    if "head" in settings:  # it reads hidden states
        settings["head"] = (jnp.where(jnp.arange(WIDTH) % 2, 1.0, -1.0), jnp.float32(0.0))
    return method(*map(split, models), PROMPTS, key=KEYS, max_new_tokens=10, **settings)


@pytest.mark.parametrize("name", those(("momentum",), of_kind("collaboration")))
def test_eight_devices_write_what_one_writes(name):
    one, eight = run(name, 1, 1), run(name, 2, 4)
    assert eight.to_lists() == one.to_lists()
    for what in ("authors", "passes", "read"):
        np.testing.assert_array_equal(getattr(eight, what), getattr(one, what))
