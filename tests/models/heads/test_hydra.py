"""Hydra against Medusa, Hydra++ against Hydra, and all of them against the equations in NumPy."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, features_of, random_params, said_of
from heads import layer_of
from toy import markov, tiny_llama

from specjax import decode, drafters
from specjax.models.heads.blocks import init_params
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.hydra import Hydra, HydraConfig, hydra_head
from specjax.models.heads.medusa import MedusaConfig, medusa_head

CONFIG = HydraConfig(32, 64, num_heads=4, num_blocks=2)


def silu(x):
    return x / (1 + np.exp(-x))


def oracle(params, features, path) -> np.ndarray:
    """Return the logits after the root and after each token of `path`."""
    table = np.asarray(tiny_llama().params["embed"]["weight"])
    rows = []
    for b, n in enumerate(LENGTH):
        logits, c = [], features[b, n - 2]
        for branch, token in zip(params["branches"].values(), [TEXT[b, n - 1], *path[b]], strict=True):
            c = np.concatenate([c, table[token]])
            apply = lambda part, x: part["weight"] @ x + part["bias"]
            z = apply(branch["first"]["residual"], c) + silu(apply(branch["first"]["linear"], c))
            z = z + silu(apply(branch["blocks"][0]["linear"], z))
            logits.append(branch["head"]["weight"] @ z + branch["head_bias"])
        rows.append(logits)
    return np.array(rows)


@pytest.fixture(scope="module")
def features():
    return features_of(tiny_llama())


@pytest.fixture(scope="module")
def params():
    return random_params("hydra", CONFIG)


def test_it_says_what_the_equations_say(features, params):
    head = DraftHead(hydra_head(CONFIG), params)
    np.testing.assert_allclose(said_of(head, tiny_llama(), features), oracle(params, features, PATH), atol=1e-4)


def test_it_is_medusa_where_it_reads_no_token(features, params):
    width, params = CONFIG.width, jax.tree.map(np.copy, params)
    config = MedusaConfig(width, CONFIG.vocab_size, CONFIG.num_heads, num_blocks=2)
    medusa = random_params("medusa", config)
    for i, branch in params["branches"].items():
        other = medusa["branches"][i]
        for name, square in (("residual", np.eye(width)), ("linear", other["blocks"][0]["weight"])):
            weight = branch["first"][name]["weight"]
            weight[:] = 0
            weight[:, :width] = square
        branch["first"]["residual"]["bias"][:] = 0
        branch["first"]["linear"]["bias"] = other["blocks"][0]["bias"]
        branch["blocks"][0]["linear"] = other["blocks"][1]
        branch["head"], branch["head_bias"][:] = other["head"], 0
    ours = said_of(DraftHead(hydra_head(CONFIG), params), tiny_llama(), features)
    np.testing.assert_allclose(ours, said_of(DraftHead(medusa_head(config), medusa), tiny_llama(), features), atol=1e-5)


def test_a_prefix_layer_that_adds_nothing_leaves_the_normed_feature(features, params):
    config = dataclasses.replace(CONFIG, layer=layer_of(tiny_llama()))
    prefix = random_params("hydra", config) | params
    for part, last in (("attention", "o"), ("mlp", "down")):
        prefix["prefix"][part][last]["weight"][:] = 0
    prefix["norm"]["weight"][:] = 1
    ours = said_of(DraftHead(hydra_head(config), prefix), tiny_llama(), features, reads=2)
    normed = features / np.sqrt((features**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(ours, oracle(params, normed, PATH), atol=1e-4)


def test_new_heads_say_the_feature_through_their_own_head(features):
    params = jax.tree.map(np.asarray, init_params(Hydra, CONFIG, jax.random.key(0)))
    ours = said_of(DraftHead(hydra_head(CONFIG), params), tiny_llama(), features)
    for i, branch in params["branches"].items():
        for b, n in enumerate(LENGTH):
            z = features[b, n - 2]
            np.testing.assert_allclose(ours[b, i], branch["head"]["weight"] @ z, atol=1e-4)


def branching_target():
    """Return a target with 0 -> 1 or 2, with probability 1/2 each; 1 -> 3, 2 -> 4, 3 -> 0, 4 -> 0."""
    rows = np.full((5, 5), 1e-9, np.float32)
    for token, following in ((0, 1), (0, 2), (1, 3), (2, 4), (3, 0), (4, 0)):
        rows[token, following] = 1.0
    return markov(rows / rows.sum(1, keepdims=True)), rows


def test_a_head_that_sees_the_sampled_token_knows_what_follows_it():
    """Medusa's draft after 0 is right at most half of the time, since it does not read the sampled token."""
    target, rows = branching_target()
    config = HydraConfig(5, 5, num_heads=1)
    params = jax.tree.map(np.array, init_params(Hydra, config, jax.random.key(0)))
    branch = params["branches"][0]
    branch["first"]["residual"]["weight"][:] = np.eye(5, 10, 5)  # reads the root's embedding alone
    branch["head"]["weight"] = 20 * rows.T
    result = decode(
        target, drafters.head_drafter(DraftHead(hydra_head(config), params), 1), [[0], [1], [0, 2]],
        key=1, temperature=1.0, max_new_tokens=60, sampling="coupled",
    )  # fmt: skip
    # Coupled draws from the target's own distribution are the target's.
    assert result.stats.target_passes.tolist() == [30, 30, 30]
