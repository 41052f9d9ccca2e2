"""Falcon against a full pass with the relaxed mask, against EAGLE, and with a target that it predicts exactly."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from head_runs import LENGTH, TEXT, features_of, random_params, said_of
from heads import layer_of
from tiers import exhaustive
from toy import markov, tiny_llama

from specjax import UsageError, decode, drafters
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import EagleConfig, eagle_head
from specjax.models.heads.falcon import FalconConfig, falcon_head

PATH = np.array([[8, 7, 1, 4], [2, 6, 6, 0]])
TABLE, HEAD = (np.asarray(tiny_llama().params[name]["weight"], np.float64) for name in ("embed", "head"))


@pytest.fixture(scope="module")
def features():
    return features_of(tiny_llama())


def config_of(k: int, **changes) -> FalconConfig:
    return FalconConfig(layer_of(tiny_llama()), k, **changes)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relaxed(rows: int, k: int) -> np.ndarray:
    """Return the mask bool[T, T] in which the last row ends a block."""
    block = (np.arange(rows) - rows) // k
    return block[None] <= block[:, None]


def lstm(params, x, carries: bool):
    """Return the outputs [T, D] for x [T, 2 D], step by step."""
    for cell in params["cells"].values():
        h = c = np.zeros(TABLE.shape[1])
        logits = []
        for one in x:
            if not carries:
                h = c = np.zeros_like(h)
            driven = sum(cell[part]["weight"] @ y + cell[part]["bias"] for part, y in (("inputs", one), ("states", h)))
            i, f, g, o = np.split(driven, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            logits.append(h)
        x = np.stack(logits)
    return x


def layer(params, z, mask):
    """Run the decoder layer on all rows z [T, D], with two heads of 8 that share their keys."""
    attention, mlp = params["attention"], params["mlp"]

    def heads(part, rotated: bool):
        x = (z @ attention[part]["weight"].T).reshape(len(z), -1, 8)
        angle = np.arange(len(z))[:, None, None] / 10000.0 ** (np.arange(0, 8, 2) / 8)
        a, b = np.split(x, 2, -1)
        turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
        return turned if rotated else x

    scores = np.einsum("qhc,kc->hqk", heads("q", True), heads("k", True)[:, 0]) / np.sqrt(8)
    weights = np.exp(np.where(mask, scores - scores.max(), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    visible = np.einsum("hqk,kc->qhc", weights, heads("v", False)[:, 0]).reshape(len(z), -1)
    x = z + visible @ attention["o"]["weight"].T
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * params["mlp_norm"]["weight"]
    gate, up, down = (mlp[part]["weight"] for part in ("gate", "up", "down"))
    return x + ((y @ gate.T) * sigmoid(y @ gate.T) * (y @ up.T)) @ down.T


def oracle(config: FalconConfig, params, features, text, path, mask=relaxed) -> np.ndarray:
    """Return the logits [1 + D, V] of one full pass per depth over the text and the complete blocks."""
    k, loaded = config.block_size, []
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for depth in range(len(path) + 1):
        f, tokens = features[: len(text) - 1], text[1:]
        for block in range(depth // k + 1):
            z = lstm(params["lstm"], np.concatenate([TABLE[tokens], f], 1), config.carries)
            logits = layer(params["stack"][0], z, mask(len(z), k))[-k:]
            f, tokens = np.concatenate([f, logits]), np.concatenate([tokens, path[block * k : (block + 1) * k]])
        loaded.append(HEAD @ logits[depth % k])
    return np.stack(loaded)


def test_the_relaxed_mask_is_that_of_the_paper():
    rows = ["".join(map(str, row)) for row in relaxed(4, 2).astype(int)]
    assert rows == ["1100", "1100", "1111", "1111"]


@pytest.mark.parametrize(("k", "carries", "reads"), [(2, True, 3), exhaustive(3, False, 6)])
def test_it_says_what_a_pass_over_everything_with_that_mask_says(features, k, carries, reads):
    """The texts fill their last block of k = 2 pairs or not, and drafts have up to three blocks."""
    config = config_of(k, carries=carries)
    params = random_params("falcon", config)
    ours = said_of(DraftHead(falcon_head(config), params), tiny_llama(), features, PATH, reads)
    causal = lambda rows, k: relaxed(rows, 1)
    for b, n in enumerate(LENGTH):
        wanted = oracle(config, params, features[b], TEXT[b, :n], PATH[b])
        np.testing.assert_allclose(ours[b], wanted, atol=1e-5 * np.abs(wanted).max())
        other = oracle(config, params, features[b], TEXT[b, :n], PATH[b], causal)
        assert np.abs(ours[b] - other).max() > 1e-2 * np.abs(wanted).max()


def test_blocks_of_one_without_an_lstm_are_eagle(features):
    eagle = EagleConfig(layer_of(tiny_llama()))
    params = random_params("eagle", eagle)
    theirs = said_of(DraftHead(eagle_head(eagle), params), tiny_llama(), features)
    ours = said_of(DraftHead(falcon_head(config_of(1, lstm_layers=0)), params), tiny_llama(), features)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("knows_by", ["token", "feature"])
def test_a_head_that_knows_the_target_is_always_right(knows_by):
    """The head predicts from the token after a feature or from the feature, k tokens ahead."""
    rows = np.full((7, 7), 1e-6, np.float32)
    rows[np.arange(7), (np.arange(7) + 3) % 7] = 1.0
    target, k = markov(rows), 2
    move = np.roll(np.eye(7, dtype=np.float32), 3, 0)  # of logits, from one token to the next
    config = FalconConfig(layer_of(target), k, lstm_layers=0)
    params = random_params("falcon", config)
    jax.tree.map(lambda x: x.fill(0), params["stack"])
    params["fc"]["bias"][:] = 0
    token, feature = (30 * move @ move, 0 * move) if knows_by == "token" else (0 * move, move @ move)
    params["fc"]["weight"] = np.concatenate([token, feature], 1)
    prompts = [[1, 4, 0], [3, 6, 2, 5, 1]]
    drafter = drafters.head_drafter(DraftHead(falcon_head(config), params), 2 * k)
    result = decode(target, drafter, prompts, key=0, max_new_tokens=20)
    assert result.to_lists() == decode(target, "autoregressive", prompts, key=0, max_new_tokens=20).to_lists()
    assert result.stats.target_passes.tolist() == [4, 4]


def test_a_second_layer_and_empty_blocks_are_refused():
    with pytest.raises(UsageError, match="block_size must be at least 1, not 0"):
        falcon_head(config_of(0))
    with pytest.raises(UsageError, match="a Falcon head has one decoder layer, not 2"):
        falcon_head(FalconConfig(layer_of(tiny_llama(), num_layers=2)))
