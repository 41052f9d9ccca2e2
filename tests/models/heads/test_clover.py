"""Clover's gates, and heads that equal the target's output layer if nothing is added."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from head_runs import LENGTH, PATH, TEXT, features_of, random_params, said_of
from heads import layer_of
from toy import tiny_llama

from specjax.models.heads.blocks import init_params
from specjax.models.heads.clover import Clover, Clover2, CloverConfig, Gate, clover_head
from specjax.models.heads.contract import DraftHead

LAYER = layer_of(tiny_llama(), num_heads=4, num_kv_heads=2, num_layers=2)
CONFIG = CloverConfig(LAYER, (2,), vocab_size=64)


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def gated(params, h, y):
    apply = lambda name, x: (x @ params[name]["weight"].T + params[name]["bias"]).reshape(*x.shape[:-1], 4, -1)
    q, k, v = apply("q", params["norm"]["weight"] * rms(h)), apply("k", y), apply("v", y)
    cosine = (q * k).sum(-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1)
    return h + (cosine[..., None] * v).reshape(h.shape)


@pytest.fixture(scope="module")
def features():
    return features_of(tiny_llama())


def own(module, config, *zeroed):
    """Return new parameters with zeros for the named projections of the layers."""
    params = jax.tree.map(np.array, init_params(module, config, jax.random.key(0)))
    for layer in params["stack"].values():
        layer["attention"]["o"]["weight"][:] = layer["mlp"]["down"]["weight"][:] = 0
    return params


def test_a_gate_is_a_cosine_a_head():
    gate, rng = Gate(LAYER, nnx.Rngs(0)), np.random.default_rng(0)
    h, y = rng.normal(size=(2, 3, 5, 32)).astype(np.float32)
    np.testing.assert_array_equal(gate(h, y), h)  # a new one gives what it is given
    random = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), nnx.to_pure_dict(nnx.state(gate)))
    nnx.update(gate, nnx.State(random))
    np.testing.assert_allclose(gate(h, y), gated(random, h, y), atol=1e-4)


def test_heads_that_add_nothing_say_what_the_target_says(features):
    params = own(Clover2, CONFIG)
    for name in ("first", "next"):
        params[name]["weight"][:] = np.eye(32, len(params[name]["weight"][0]))
        params[name]["bias"][:] = 0
    ours = said_of(DraftHead(clover_head(CONFIG), params), tiny_llama(), features)
    logits = tiny_llama().model.unembed(tiny_llama().params, rms(features[np.arange(2), LENGTH - 2]))
    np.testing.assert_allclose(ours, np.broadcast_to(np.asarray(logits)[:, None], ours.shape), atol=2e-3)


def test_it_says_what_the_equations_say(features):
    """The layers are left out; they are those of every model."""
    params = random_params("clover", CONFIG)
    for layer in params["stack"].values():
        layer["attention"]["o"]["weight"][:] = layer["mlp"]["down"]["weight"][:] = 0
    ours = said_of(DraftHead(clover_head(CONFIG), params), tiny_llama(), features, reads=2)
    table, apply = params["embed"]["weight"], lambda part, x: part["weight"] @ x + part["bias"]
    for b, n in enumerate(LENGTH):
        h = gated(params["gate"], features[b, n - 2], table[TEXT[b, n - 1]])
        h = params["norm"]["weight"] * rms(h)
        out = apply(params["first"], h)
        for depth, token in enumerate([None, *PATH[b]]):
            if token is not None:
                h = gated(params["next_gate"], h, table[token])
                out = apply(params["next"], np.concatenate([h, table[token]]))
            logits = tiny_llama().model.unembed(tiny_llama().params, params["head_norm"]["weight"] * rms(out))
            np.testing.assert_allclose(ours[b, depth], logits, atol=1e-3)


def test_the_first_clover_reads_all_drafted_tokens(features):
    config = CloverConfig(LAYER, (2,), num_heads=4, embeds=False, version=1)
    new = own(Clover, config)
    ours = said_of(DraftHead(clover_head(config), new), tiny_llama(), features)
    logits = tiny_llama().model.unembed(tiny_llama().params, rms(features[np.arange(2), LENGTH - 2]))
    np.testing.assert_allclose(ours, np.broadcast_to(np.asarray(logits)[:, None], ours.shape), atol=2e-3)
    # Each token of the path changes what is said below it, and nothing above.
    head = DraftHead(clover_head(config), random_params("clover", config))
    previous = said_of(head, tiny_llama(), features)
    for depth in range(3):
        other = PATH.copy()
        other[:, depth] += 1
        apart = np.abs(said_of(head, tiny_llama(), features, other) - previous).max((0, 2))
        assert apart[: depth + 1].max() == 0 and apart[depth + 1 :].min() > 1e-4
