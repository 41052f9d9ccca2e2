"""FSPAD's two options of an EAGLE head: new options change nothing, and each half of the output has its own use."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from head_runs import features_of, random_params, said_of
from heads import layer_of
from toy import tiny_llama

from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import EagleConfig, eagle_head


@pytest.fixture(scope="module")
def pair():
    """Return an EAGLE head and the same head with FSPAD's parts, with a sampler that adds zero and equal halves."""
    config = EagleConfig(layer_of(tiny_llama()))
    fspad = dataclasses.replace(config, sampler=True, split=True)
    plain, params = random_params("eagle", config), random_params("eagle", fspad)
    params["sampler"]["mlp"]["down"]["weight"][:] = 0
    for name in ("fc", "stack"):
        params[name] = jax.tree.map(np.copy, plain[name])
    down = params["stack"][0]["mlp"]["down"]
    down["weight"] = np.concatenate([down["weight"]] * 2)
    return DraftHead(eagle_head(config), plain), DraftHead(eagle_head(fspad), params)


def changed(head: DraftHead, part: str, rows: slice) -> DraftHead:
    """Return a head with other weights in some rows of the last projection of the sampler or of the layer."""
    params = jax.tree.map(np.copy, head.params)
    mlp = params["sampler"]["mlp"] if part == "sampler" else params["stack"][0]["mlp"]
    mlp["down"]["weight"][rows] += 1.0
    return head.replace(params=params)


def test_it_is_eagle_when_its_sampler_adds_nothing_and_its_halves_are_tied(pair):
    eagle, fspad = pair
    features = features_of(tiny_llama())
    np.testing.assert_allclose(
        said_of(fspad, tiny_llama(), features), said_of(eagle, tiny_llama(), features), atol=1e-5
    )


def test_one_half_says_the_token_and_the_other_is_fed_back(pair):
    _, fspad = pair
    features, width = features_of(tiny_llama()), fspad.head.config.layer.width
    previous = said_of(fspad, tiny_llama(), features)
    apart = lambda head: np.abs(said_of(head, tiny_llama(), features) - previous).max((0, 2))  # by depth
    fed_back = apart(changed(fspad, "layer", slice(width, None)))
    assert fed_back[0] == 0 and fed_back[1:].min() > 1e-3  # committed pairs have the target's features
    assert apart(changed(fspad, "layer", slice(width))).min() > 1e-3
    assert apart(changed(fspad, "sampler", slice(None))).min() > 1e-3
