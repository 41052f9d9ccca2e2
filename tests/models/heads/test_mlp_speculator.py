"""The MLP speculator against its equations in NumPy, tied and not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, features_of, random_params, said_of
from toy import tiny_llama

from specjax.models.heads.contract import DraftHead
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig, mlp_speculator_head

gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))


def oracle(params, config, features, path) -> np.ndarray:
    of = lambda name, i: params[name][min(i, len(params[name]) - 1)]
    state_weight = 0.5 ** (0.5 / config.num_heads)
    token_weight = math.sqrt((1 - state_weight**2) * config.inner_width / 2)
    rms = lambda x: x / np.sqrt((x**2).mean() + 1e-6)
    rows = []
    for b, n in enumerate(LENGTH):
        logits, state = [], features[b, n - 2].astype(np.float64)
        if config.scaled:
            state = rms(state) / math.sqrt(2)
        for i, token in enumerate([TEXT[b, n - 1], *path[b]]):
            state = of("projections", i)["weight"] @ state
            state += token_weight / state_weight * of("embeddings", i)["weight"][token]
            state = gelu(of("norms", i)["weight"] * rms(state) + of("norms", i)["bias"])
            logits.append(of("heads", i)["weight"] @ state)
        rows.append(logits)
    return np.array(rows)


@pytest.mark.parametrize("options", [{}, {"tied": True, "scaled": True}])
def test_it_says_what_the_equations_say(options):
    config, features = MlpSpeculatorConfig(32, 24, 64, num_heads=4, **options), features_of(tiny_llama())
    params = random_params("mlp_speculator", config)
    assert len(params["embeddings"]) == (1 if config.tied else 4)
    head = DraftHead(mlp_speculator_head(config), params)
    np.testing.assert_allclose(said_of(head, tiny_llama(), features), oracle(params, config, features, PATH), atol=1e-4)
