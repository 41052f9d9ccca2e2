"""Whoever reads a prompt for a thinned model says where it ends: else the model would silently run as the whole."""

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those

from specjax import adaptive, decode, drafters
from specjax.bench.near_ties import next_logits
from specjax.costs.curves import _filled
from specjax.decoders import pearl, superposed

OPTIONS = {"key": jax.random.key(0), "max_new_tokens": depths.NEW}


@functools.cache
def model():
    return adaptive.skip_layers(depths.target(), depths.depth("skip_decode"))


@functools.cache
def plain():
    return depths.texts(model())


DRAFTERS = {
    "two_model": lambda draft: drafters.two_model(draft, num_tokens=3),
    "hierarchical": lambda draft: drafters.hierarchical(draft, drafters.prompt_lookup(1), min_tokens=3),
}


@pytest.mark.parametrize("name", those({"two_model"}, DRAFTERS))
def test_a_thinned_draft_model_says_what_the_thinned_target_says(name):
    result = decode(model(), DRAFTERS[name](model()), depths.PROMPTS, **OPTIONS)
    assert result.to_lists() == plain()
    stats = result.stats
    assert (np.asarray(stats.accepted) >= np.asarray(stats.drafted) - 3).all()  # but behind the end of the text


def test_decoders_write_the_text_of_the_thinned_model():
    assert superposed(model(), depths.PROMPTS, max_new_tokens=depths.NEW, drafts=1).to_lists() == plain()
    devices = jax.devices()
    target, draft = (jax.device_put(model(), devices[place]) for place in (1, 2))
    result = pearl(target, draft, depths.PROMPTS, num_tokens=3, **OPTIONS)
    assert result.to_lists() == plain()
    assert (result.stats.target_passes <= 8).all()  # the draft model is the same, and never errs


def test_logits_of_a_difference_are_those_of_the_thinned_model():
    for prompt, answer in zip(depths.PROMPTS, plain(), strict=True):
        assert next_logits(model(), prompt + answer[:-1], len(prompt)).argmax() == answer[-1]


def test_passes_are_timed_behind_a_prompt():
    assert _filled(model(), jnp.ones((2, 128), jnp.int32), 7, 300).prompt_length.tolist() == [7, 7]
