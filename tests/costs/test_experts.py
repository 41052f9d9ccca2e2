"""Costs of passes of a mixture of experts, from shapes, against numbers by hand."""

import dataclasses

import numpy as np

from specjax import models
from specjax.costs import curves
from specjax.costs.accelerators import equivalent_bytes, launch_bytes
from specjax.costs.experts import (
    ROUTER_LAYERS,
    active_bytes,
    busiest_experts,
    expected_blocks,
    expert_share,
    expert_turns,
)
from specjax.models.bridge import abstract_params
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.llama import LlamaConfig
from specjax.models.storage import num_bytes, quantized_config
from specjax.types import Target

DENSE = LlamaConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, tied=False
)
MIXTURE = dataclasses.replace(DENSE, experts=MixtureSizes(16, 24, Routing(2)))


def of_shapes(config):
    return Target(models.make_model(config), abstract_params(config))


def test_bytes_of_the_chosen_experts():
    target = of_shapes(MIXTURE)
    experts = 2 * 16 * 3 * 24 * 32 * 4  # layers, experts, matrices of 24 x 32, bytes
    active = num_bytes(target.params) - experts + experts * 2 // 16
    assert active_bytes(target) == active
    assert np.isclose(expert_share(target, "cpu").share, experts * 2 / 16 / active)
    assert active_bytes(of_shapes(DENSE)) == num_bytes(abstract_params(DENSE))


def test_more_tokens_read_more_experts():
    """Eight tokens touch 16 (1 - (7 / 8)^8) = 10.5 experts in place of 2, and each is multiplied by all of them."""
    shares = curves.shares_of(of_shapes(MIXTURE), "cpu")
    added = shares.experts.share * (16 * (1 - (7 / 8) ** 8) / 2 - 1)
    costs = curves.estimated((1, 8), 1, platform="cpu", shares=shares)
    np.testing.assert_allclose(costs, [1, (1 + 8 / 16) * (1 + added)], rtol=1e-6)
    assert curves.shares_of(of_shapes(DENSE), "cpu").experts.added(8) == 0


def test_experts_of_the_busiest_device():
    sizes = MIXTURE.experts
    assert busiest_experts(sizes, 3) == sizes.expected_experts(3)
    assert busiest_experts(sizes, 100, 4) == 4  # all of them
    assert busiest_experts(sizes._replace(routing=Routing(1)), 1, 8) == 1
    # Two of 16 experts on two devices are on the same one with probability 7 / 15.
    np.testing.assert_allclose(busiest_experts(sizes, 1, 2), 1 + 7 / 15, atol=0.07)


def test_turns_of_a_loop_over_experts():
    """Up to 256 rows each distinct expert is a turn. More rows fill blocks of 256 rows of one expert."""
    sizes = MIXTURE.experts
    assert expert_turns(sizes, 256) == sizes.expected_experts(256)
    random = np.random.default_rng(1)
    counts = random.binomial(4096, 2 / 16, (2000, 16))
    by_simulation = np.ceil(counts / 256).sum(1).mean()
    np.testing.assert_allclose(expert_turns(sizes, 4096), by_simulation, rtol=0.01)
    of_devices = np.ceil(counts / 256).reshape(2000, 4, 4).sum(2).max(1).mean()
    np.testing.assert_allclose(expert_turns(sizes, 4096, 4), of_devices, rtol=0.01)
    assert expert_turns(sizes, 300, 4) >= busiest_experts(sizes, 300, 4) == 4
    assert expected_blocks(sizes._replace(routing=Routing(16)), 300, 256) == 32


def shares_on_gpu(config):
    """Return the experts of a target on an H200, and the experts of a row and a kernel in passes over one token."""
    target = of_shapes(config)
    layers, names = target.params["layers"], ("expert_gate", "expert_up", "expert_down")
    read = equivalent_bytes("h200", active_bytes(target), len(layers) * (1 + ROUTER_LAYERS))
    one = num_bytes([layer["mlp"][name] for layer in layers.values() for name in names]) / 16
    return curves.shares_of(target, "h200").experts, one / read, len(layers) * launch_bytes("h200") / read


def test_a_gpu_reads_the_experts_of_pairs_and_then_all_of_them():
    """Eight rows have 16 pairs of 2 of 16 experts. Nine rows are multiplied by all experts, in two more kernels."""
    experts, one, kernel = shares_on_gpu(MIXTURE)
    np.testing.assert_allclose(experts.added(1), 0)
    np.testing.assert_allclose(experts.added(8), (16 - 2) * one)
    np.testing.assert_allclose(experts.added(9), (16 - 2) * one + 2 * kernel)
    np.testing.assert_allclose(experts.added(500), experts.added(9))


def test_quantised_and_stacked_experts_have_other_forms_on_a_gpu():
    """Groups are expanded before a product of all experts, and blocks copy an expert and run kernels per turn."""
    wide = dataclasses.replace(MIXTURE, width=256, experts=MixtureSizes(16, 256, Routing(2)))
    experts, one, kernel = shares_on_gpu(quantized_config(wide, "int4-weights", "gpu"))
    assert experts.has_groups
    np.testing.assert_allclose(experts.added(32), (64 - 2) * one)
    np.testing.assert_allclose(experts.added(33), (4.5 * 16 - 2) * one + 2 * kernel)
    stacked = expert_share(of_shapes(dataclasses.replace(MIXTURE, stacked=True)), "h200")
    turns = 16 + 32 // 16
    of_turn = 3 * stacked.share / 2 + 8.3 * stacked.launch
    np.testing.assert_allclose(stacked.added(16), turns * of_turn - stacked.share)


def test_a_curve_on_a_gpu_has_launches_and_all_experts():
    """The curve of a dense model with as many active bytes is flat, so it would be wrong by a factor."""
    sizes = MixtureSizes(64, 512, Routing(4))
    config = dataclasses.replace(MIXTURE, width=512, num_layers=8, experts=sizes, dtype="bfloat16")
    target = of_shapes(config)
    shares = curves.shares_of(target, "h200")
    without = shares._replace(experts=curves.NO_SHARES.experts)
    ours, dense = (curves.estimated((1, 8, 32), 1, "bfloat16", "h200", one) for one in (shares, without))
    assert ours[2] > 1.3 > 1.15 > dense[2] and ours[1] < ours[2]
    assert shares.experts.share < expert_share(target, "v5e").share, "launches take a part of the time"
