"""Mixtures on eight fake devices, with floats and quantised experts, equal those on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hybrid_logits import whole_text_logits
from jax.sharding import PartitionSpec
from tiers import exhaustive, those

import specjax
from specjax import drafters
from specjax.models import init_params, make_model
from specjax.models.experts.feed import ExpertMatrices
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.latent.sizes import LatentSizes
from specjax.models.layout import Layout
from specjax.models.llama import LlamaConfig
from specjax.models.storage import quantize_params, quantized_config

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 12))
SIZES = {"vocab_size": 64, "width": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
SHARED = MixtureSizes(8, 128, Routing(2, normalized=True), shared_width=128, shared_gate=True)
OF_GPT_OSS = MixtureSizes(8, 128, Routing(2, "softmax_of_chosen"), router_bias=True, bias=True, limit=7.0)
LATENT = LatentSizes(16, 8, 16, 16, 32)
CONFIGS = {
    "shared": LlamaConfig(**SIZES, mlp_width=128, experts=SHARED, tied=False),
    "gpt_oss": LlamaConfig(
        **SIZES, mlp_width=128, experts=OF_GPT_OSS, sinks=True, qkv_bias=True, out_bias=True, window=4,
        is_global=(False, True), tied=False,
    ),
    "latent": HybridConfig(
        **SIZES | {"num_kv_heads": 1, "head_dim": LATENT.cached}, mlp_width=128, latent=LATENT, rotary_dim=8,
        experts=SHARED._replace(shared_gate=False), model_type="deepseek_v3", tied=False,
        kinds=(LayerKind("latent_attention"), LayerKind("latent_attention", "moe")),
    ),
}  # fmt: skip
_logits = jax.jit(whole_text_logits, static_argnums=0)


def target_of(name, scheme=None, dtype="float32"):
    """Return a mixture whose vectors are random too."""
    config = dataclasses.replace(CONFIGS[name], dtype=dtype, name=name)
    config = config if scheme is None else quantized_config(config, scheme, "cpu")
    rng = np.random.default_rng(1)
    noisy = lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if x.ndim == 1 else x
    params = jax.tree.map(noisy, init_params(config, jax.random.key(0)))
    return specjax.Target(make_model(config), params)


def difference(target, mesh):
    """Return the largest difference of logits on a mesh, and their largest magnitude."""
    full = np.asarray(_logits(target.model, target.params, TOKENS), np.float32)
    spread = specjax.shard(target, mesh)
    sharded = np.asarray(_logits(spread.model, spread.params, TOKENS), np.float32)
    return np.abs(sharded - full).max(), np.abs(full).max()


QUICK = {("shared", "int8"), ("gpt_oss", "int8-weights"), ("latent", None)}
SCHEMES = [None, "int8", "int8-weights", "int4-weights"]


CASES = [
    (name, scheme) if (name, scheme) in QUICK else exhaustive(name, scheme) for name in CONFIGS for scheme in SCHEMES
]


@pytest.mark.parametrize(("name", "scheme"), CASES)
@pytest.mark.parametrize(
    ("data", "model", "expert"), [(2, 2, 2), exhaustive(2, 4, 1), exhaustive(1, 8, 1), exhaustive(8, 1, 1)]
)
def test_a_mesh_equals_one_device(data, model, expert, name, scheme):
    worst, size = difference(target_of(name, scheme), specjax.mesh(data, model, expert=expert))
    assert worst < 2e-5 * max(1.0, size)


@pytest.mark.parametrize("name", those({"gpt_oss"}, list(CONFIGS)))
def test_gradients_on_a_mesh_equal_those_on_one_device(name):
    target = target_of(name)
    spread = specjax.shard(target, specjax.mesh(data=2, model=2, expert=2))

    def gradients(target):
        loss = lambda params: jnp.mean(jax.nn.log_softmax(whole_text_logits(target.model, params, TOKENS))[..., 3])
        return jax.jit(jax.grad(loss))(target.params)

    pairs = list(zip(jax.tree.leaves(gradients(spread)), jax.tree.leaves(gradients(target)), strict=True))
    pairs = [(a, b) for a, b in pairs if a.shape == b.shape]  # a mesh repeats heads of keys and values
    assert any(a.ndim == 3 for a, _ in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("scheme", [None, "int8-weights"])
def test_stacked_experts_of_a_mesh_equal_separate_ones(scheme):
    """Each device has a part of the experts of all layers, and loops over those of one layer."""
    target = target_of("gpt_oss", scheme)
    config = dataclasses.replace(target.model.config, stacked=True)
    layers = target.params["layers"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(2)))
    of_stack = specjax.Target(make_model(config), target.params | {"layers": stacked})
    worst, size = difference(of_stack, specjax.mesh(1, 2, expert=4))
    assert worst < 2e-5 * max(1.0, size)
    full = [np.asarray(_logits(t.model, t.params, TOKENS)) for t in (target, of_stack)]
    np.testing.assert_allclose(*full, atol=2e-5 * max(1.0, size))


@pytest.mark.parametrize("name", those({"shared"}, list(CONFIGS)))
def test_each_device_has_its_part_of_every_expert(name):
    spread = specjax.shard(target_of(name, "int8"), specjax.mesh(2, 4))
    weight = spread.params["layers"][1]["mlp"]["expert_up"]["weight"].values
    assert weight.addressable_shards[0].data.shape == (8, 32, 64)


def test_a_quantised_expert_has_the_sharding_of_its_matrix():
    """A kernel that multiplies by one expert on a mesh reads the sharding of a matrix, without the axis of experts."""
    spread = specjax.shard(target_of("shared", "int4-weights"), specjax.mesh(2, 4))
    layout = Layout(specjax.mesh(2, 4), ("data", "model"))
    feed = layout.with_shardings(spread.params)["layers"][0]["mlp"]
    specs = []
    for part in ("gate", "up", "down"):
        weight = ExpertMatrices(8, 64, 64, bias=False, dtype="float32", rngs=nnx.Rngs(0))
        weight.weight = nnx.Param(feed[f"expert_{part}"]["weight"])
        specs.append(tuple(weight.arrays()[0].sharding.spec))
    assert specs == [("model", None), ("model", None), (None, "model")]
    assert feed["shared"]["gate"]["weight"].sharding.spec == PartitionSpec("model", None)


def test_a_mesh_that_does_not_divide_the_experts_is_refused():
    config = dataclasses.replace(CONFIGS["shared"], num_heads=12, num_kv_heads=3, name="mixture")
    with pytest.raises(specjax.UsageError, match=r"splits the 8 experts of mixture into 3 parts \(axis expert\)"):
        specjax.parallel.abstract_target(config, specjax.mesh(1, 1, expert=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_drafted_text_on_a_mesh(name):
    target = target_of(name, "int8-weights")
    prompts = [list(range(12)), [5, 6, 7, 5, 6, 7], [3, 4], [9]]
    run = lambda target: specjax.decode(
        target, drafters.token_recycling(64, num_nodes=8), prompts, key=jax.random.key(0), max_new_tokens=8
    ).to_lists()
    assert run(specjax.shard(target, specjax.mesh(2, 4))) == run(target)


@pytest.mark.parametrize("name", those({"gpt_oss"}, list(CONFIGS)))
def test_bfloat16_is_close_to_float32(name):
    """Rounding may exchange two experts with nearly equal scores in a few rows, so the median counts."""
    target = target_of(name, dtype="bfloat16")
    exact = target_of(name)
    params = jax.tree.map(lambda x, y: y.astype(x.dtype), exact.params, target.params)
    full = np.asarray(_logits(exact.model, params, TOKENS))
    rounded = np.asarray(_logits(target.model, target.params, TOKENS), np.float32)
    assert np.median(np.abs(rounded - full)) < 0.02 * np.abs(full).max()


@pytest.mark.parametrize(
    ("scheme", "limit"), [("int8", 0.05), exhaustive("int8-weights", 0.03), exhaustive("int4-weights", 0.3)]
)
def test_quantised_experts_are_close_to_floats(scheme, limit):
    """Each scheme also rounds attention, and its scales are those of each expert's rows."""
    exact = target_of("shared")
    config = quantized_config(exact.model.config, scheme, "cpu")
    params = quantize_params(exact.params, config)
    assert params["layers"][0]["mlp"]["expert_down"]["weight"].shape == (8, 64, 128)
    full = np.asarray(_logits(exact.model, exact.params, TOKENS))
    rounded = np.asarray(_logits(make_model(config), params, TOKENS))
    assert np.median(np.abs(rounded - full)) < limit * np.abs(full).max()
