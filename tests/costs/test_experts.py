"""Costs of passes of a mixture of experts, from shapes, against numbers by hand."""

import dataclasses

import numpy as np

from specjax import models
from specjax.costs import curves
from specjax.costs.experts import active_bytes, busiest_experts, expert_share
from specjax.models.bridge import abstract_params
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.llama import LlamaConfig
from specjax.models.storage import num_bytes
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
    assert np.isclose(expert_share(target).share, experts * 2 / 16 / active)
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
