"""Chimera's closed forms, its trigrams, and its scratch against one dense pass over features and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, features_of, random_params, said_of
from heads import layer_of
from toy import tiny_llama

from specjax.models.heads import blocks
from specjax.models.heads.chimera import Chimera, ChimeraConfig, chimera_head
from specjax.models.heads.contract import DraftHead
from specjax.types import Context

CONFIG = ChimeraConfig(layer_of(tiny_llama()), 64, num_heads=4)
TABLE = np.asarray(tiny_llama().params["embed"]["weight"])
HEAD = np.asarray(tiny_llama().params["head"]["weight"])


@pytest.fixture(scope="module")
def features():
    return features_of(tiny_llama())


@pytest.fixture(scope="module")
def params():
    return random_params("chimera", CONFIG)


def trigram(params, ids):
    c = TABLE[list(ids)].reshape(-1)
    z = params["trigram"]["linear"]["weight"] @ c + params["trigram"]["linear"]["bias"]
    return params["down"]["weight"] @ (c + z / (1 + np.exp(-z)))


def idle(params):
    """Return a head with layers that add zero."""
    params = jax.tree.map(np.copy, params)
    for layer in params["stack"].values():
        layer["attention"]["o"]["weight"][:] = layer["mlp"]["down"]["weight"][:] = 0
    return params


def test_a_layer_that_adds_nothing_says_the_trigrams(features, params):
    params = idle(params)
    for head in params["heads"].values():
        head["weight"] = np.concatenate([0 * HEAD, HEAD], 1)
    ours = said_of(DraftHead(chimera_head(CONFIG), params), tiny_llama(), features, reads=2)
    for b, n in enumerate(LENGTH):
        text = [*TEXT[b, :n], *PATH[b]]
        for depth in range(len(PATH[b]) + 1):
            g = trigram(params, text[n + depth - 3 : n + depth])
            np.testing.assert_allclose(ours[b, depth], HEAD @ g, atol=1e-4)


def test_heads_of_both_halves_say_the_last_feature_where_the_trigram_is_nothing(features, params):
    params = idle(params)
    params["down"]["weight"][:] = 0
    for head in params["heads"].values():
        head["weight"] = np.concatenate([HEAD, HEAD], 1)
    ours = said_of(DraftHead(chimera_head(CONFIG), params), tiny_llama(), features)
    base = features[np.arange(2), LENGTH - 2] @ HEAD.T
    np.testing.assert_allclose(ours, np.broadcast_to(base[:, None], ours.shape), atol=1e-4)


@pytest.mark.parametrize(("text", "three"), [([7], [7, 7, 7]), ([7, 8], [7, 8, 8]), ([7, 8, 9], [7, 8, 9])])
def test_the_left_border_of_trigrams(params, text, three):
    module = blocks.bind(Chimera, CONFIG)(params)
    previous = jnp.array([[[text[max(len(text) - back, 0)] for back in (3, 2)]]])
    context = Context(jnp.array([text]), jnp.array([len(text)]), target=tiny_llama())
    position = jnp.array([[len(text) - 1]])
    np.testing.assert_allclose(
        module.embedded(previous, jnp.array([text[-1:]]), position, context)[0, 0], trigram(params, three), atol=1e-4
    )


def test_drafted_nodes_see_what_was_said_in_place_of_trigrams(features, params):
    """The reference is one dense pass per depth over [features, outputs so far, trigram], without a cache."""
    ours = said_of(DraftHead(chimera_head(CONFIG), params), tiny_llama(), features, reads=2)
    module, layer = blocks.bind(Chimera, CONFIG)(params), CONFIG.layer
    context = Context(jnp.asarray(TEXT), jnp.asarray(LENGTH), target=tiny_llama())
    context = context._replace(length=context.length[:1])
    cache = blocks.empty_cache(context, layer, 1, 16)

    @jax.jit
    def last_of(x):
        return module.layers(x, blocks.causal_inputs(context, layer, cache, 12), cache)[0]

    b, n = 0, int(LENGTH[0])
    text, x = [*TEXT[b, :n], *PATH[b]], list(features[b, : n - 1])
    for depth in range(len(PATH[b]) + 1):
        row = np.array([*x, trigram(params, text[n + depth - 3 : n + depth])])
        outputs = last_of(np.pad(row, ((0, 12 - len(row)), (0, 0)))[None])
        y = np.asarray(outputs[0, len(row) - 1])
        logits = params["heads"][depth]["weight"] @ np.concatenate([features[b, n - 2], y])
        np.testing.assert_allclose(ours[b, depth], logits, atol=1e-3)
        x.append(y)
