"""Stacked mixtures of experts: equal logits, no copy of the experts of a layer, and quantised experts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import models
from specjax.models.experts.routing import ExpertChoice, Routing
from specjax.models.experts.running import run_experts
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind

EXPERTS, TOKENS, CAPACITY = 6, 5, 16
MIXTURE = MixtureSizes(EXPERTS, 24, Routing(2, normalized=True), shared_width=16, shared_gate=True)
SIZES = {
    "vocab_size": 32, "width": 40, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_width": 24,
    "experts": MIXTURE,
}  # fmt: skip
GROUP = LayerKind("gated_delta", "moe"), LayerKind("attention", "moe")
CONFIGS = (
    models.LlamaConfig(**SIZES),
    HybridConfig(**SIZES, kinds=GROUP * 2, gated_delta=GatedDeltaSizes(1, 2, 8, 8)),
)


def stacked_params(config, params):
    """Return the parameters of a model with stacked layers from those of separate layers."""
    stack = lambda members: jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    of_group = [stack([params["layers"][i] for i in range(m, 4, config.period)]) for m in range(config.period)]
    is_list = isinstance(config, HybridConfig)
    return {**params, "layers": dict(enumerate(of_group)) if is_list else of_group[0]}


def reader(config):
    """Return a compiled pass over a text, and its lowered form."""
    model = models.make_model(config)

    def read(params, tokens):
        cache = model.init_cache(params, None, 1, CAPACITY)
        mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None]
        return model.forward(params, tokens, cache, positions=jnp.arange(TOKENS)[None], mask=mask)[0].logits

    return jax.jit(read)


INT8 = (("layers.*", models.storage.scheme_format("int8-weights", "cpu")),)


@pytest.mark.parametrize(
    "config", [CONFIGS[0], dataclasses.replace(CONFIGS[1], quantized=INT8)], ids=["attention", "hybrid in int8"]
)
def test_stacked_layers_equal_separate_ones(config):
    params = models.init_params(config, jax.random.key(0))
    stacked = dataclasses.replace(config, stacked=True)
    assert stacked.stacked
    tokens = np.random.default_rng(0).integers(0, 32, (1, TOKENS))
    read, arrays = reader(stacked), stacked_params(stacked, params)
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
    assert shapes(arrays) == shapes(models.abstract_params(stacked))
    np.testing.assert_allclose(read(arrays, tokens), reader(config)(params, tokens), atol=2e-6)
    program = read.lower(arrays, tokens).compile().as_text()
    layer = rf"= \w+\[{EXPERTS},(24,40|40,24)\]"  # the experts of one layer
    assert not re.search(layer, program) and re.search(layer.replace(f"{EXPERTS},", "1,"), program)


@pytest.mark.parametrize("form", ["loop", "blocks", "gather"])
def test_experts_of_a_later_layer_are_those_after_the_first(form):
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 8), (12, 8, 8)]))
    choice = ExpertChoice(jnp.array([[0, 3], [2, 5], [1, 2]]), jnp.array([[0.5, 0.5], [0.1, 0.9], [1.0, 2.0]]))
    run = functools.partial(run_experts, x, choice, num_experts=6, expert=lambda weight, x: x @ weight.T, form=form)
    np.testing.assert_allclose(run(weights, first=jnp.int32(6)), run(weights[6:]), atol=1e-6)
    assert not np.allclose(run(weights, first=jnp.int32(0)), run(weights[6:]))
