"""Numbers of experts that passes read, against the choices of the routers counted with NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import init_params, make_model
from specjax.models.experts.counting import PassHistory, start_history
from specjax.models.experts.routing import ExpertChoice, Routing
from specjax.models.experts.sizes import MixtureSizes, TokenShuffling
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind
from specjax.models.llama import LlamaConfig
from specjax.parallel.expert_traces import trace_experts
from specjax.types import Sublayers, Target

SIZES = {
    "vocab_size": 32, "width": 40, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_width": 24,
}  # fmt: skip
MIXTURE = MixtureSizes(8, 24, Routing(2, normalized=True))
KINDS = LayerKind("gated_delta", "moe"), LayerKind("attention", "gated"), *[LayerKind("attention", "moe")] * 2
CONFIGS = {
    "first layer dense": LlamaConfig(**SIZES, experts=MIXTURE._replace(dense_layers=(0,))),
    "hybrid": HybridConfig(**SIZES, experts=MIXTURE, kinds=KINDS, gated_delta=GatedDeltaSizes(1, 2, 8, 8)),
    "stacked": LlamaConfig(**SIZES, experts=MIXTURE, stacked=True),
}
TOKENS = np.random.default_rng(0).integers(0, 32, 6)


def forward(config, params, **options):
    model = make_model(config)
    mask, places = jnp.tril(jnp.ones((1, 6, 6), bool)), jnp.arange(6)[None]
    cache = model.init_cache(params, None, 1, 8)
    return model.forward(params, jnp.asarray(TOKENS)[None], cache, positions=places, mask=mask, **options)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_is_that_of_the_routers_choices(name):
    config = CONFIGS[name]
    params = init_params(config, jax.random.key(1))
    traces = trace_experts(Target(make_model(config), params), [TOKENS], window=6)
    expected = np.mean([len(np.unique(layer)) for layer in traces.experts])
    output = jax.jit(forward, static_argnums=0)(config, params)
    np.testing.assert_allclose(output.experts, expected, rtol=1e-6)
    assert 2 < expected < 8


def test_passes_that_leave_layers_out_are_not_counted():
    config = CONFIGS["first layer dense"]
    params = init_params(config, jax.random.key(1))
    runs = jnp.ones((1, 4), bool)
    assert jax.eval_shape(lambda p: forward(config, p, layers=Sublayers(runs, runs)), params).experts is None
    assert jax.eval_shape(lambda p: forward(config, p, group=2), params).experts is None


def test_a_model_without_experts_has_no_count_and_no_history():
    config = dataclasses.replace(CONFIGS["stacked"], experts=None)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(1)))
    assert jax.eval_shape(lambda p: forward(config, p), params).experts is None
    assert start_history(None, TOKENS) is None


def test_tables_of_devices_choose_experts_without_a_count():
    history = start_history(MIXTURE._replace(shuffling=TokenShuffling(2, 32, 0.5)), TOKENS[None])
    assert history is not None and history.read is None and history.rows is not None
    choice = ExpertChoice(jnp.array([[0, 1]]), jnp.ones((1, 2)))
    assert history.after(choice, 8) is history
    assert float(PassHistory(read=jnp.float32(3)).after(choice, 8).read) == 5
