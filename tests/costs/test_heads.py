"""Tests of the costs of drafting with heads that run layers of the target."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from specjax import Target, costs
from specjax.arrays import platforms
from specjax.models import LlamaConfig, abstract_params, make_model
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.storage import num_bytes, quantized_config

CONFIG = LlamaConfig(64, 32, 8, 4, 2, 8, 64, tied=False)


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_of_the_target_that_are_skipped_cost_nothing(stacked):
    """The cost by hand is the share of layers that run, the head's own products, and the target's head once."""
    config = dataclasses.replace(CONFIG, stacked=stacked)
    target = Target(make_model(config), abstract_params(config))
    weights = sum(x.size for x in jax.tree.leaves(target.params))
    cost = lambda kind, passes, **changes: costs.of_head(
        target, abstract_head(kind, KINDS[kind].of_target(config, **changes)), passes
    )
    head, adapter, transfers = 64 * 32, 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 32
    one = 3 / 8 + (adapter + head) / weights
    assert cost("kangaroo", 1, exit_layer=3) == pytest.approx(one)
    assert cost("kangaroo", 3, exit_layer=3) == pytest.approx(3 * one)
    assert cost("hidden_transfer", 3, behind=5) == pytest.approx(3 / 8 + (transfers + head) / weights)


def shapes_of(scheme: str, **changes) -> Target:
    """The shapes of a model with 64 inputs, whose matrices have a scheme, as on a TPU."""
    config = quantized_config(LlamaConfig(256, 64, 8, 4, 2, 16, 128, tied=False, **changes), scheme, "tpu")
    return Target(make_model(config), abstract_params(config))


@pytest.mark.parametrize(("scheme", "head_bytes"), [("int4-weights", 256 * 64 / 2), ("int8", 256 * 64)])
def test_weights_cost_the_bytes_of_their_formats(scheme, head_bytes):
    """The adapter of the head is bfloat16, and the target's head is stored in few bits, with a scale per row."""
    target = shapes_of(scheme, dtype="bfloat16", stacked=scheme == "int8")
    adapter = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    head = abstract_head("kangaroo", KINDS["kangaroo"].of_target(target.model.config, exit_layer=3))
    cost = costs.of_head(target, head, 2)
    assert cost == pytest.approx(2 * (3 / 8 + (adapter + head_bytes) / num_bytes(target.params)))
    float_bytes = 2 * (256 * 64) + adapter
    assert cost < 2 * (3 / 8 + float_bytes / num_bytes(target.params))


def test_a_draft_model_costs_the_bytes_of_its_format():
    target, draft = shapes_of("int8"), shapes_of("int4-weights")
    assert costs.of_draft(target, draft) == pytest.approx(num_bytes(draft.params) / num_bytes(target.params))
    assert costs.of_draft(target, draft) < 0.65


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_modules_with_experts_read_the_chosen_ones(platform, monkeypatch):
    """The programs of both platforms differ: a loop over the experts, and experts that are gathered for one row.

    The first level reads the output layer alone, and the second one the layer of the module.
    """
    monkeypatch.setattr(platforms, "of_program", lambda: platform)
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    target = Target(make_model(config), abstract_params(config))

    def read(num_chosen: int) -> float:
        module = KINDS["mtp"].of_target(config)
        sizes = MixtureSizes(16, 24, Routing(num_chosen))
        module = dataclasses.replace(module, layer=dataclasses.replace(module.layer, experts=sizes))
        return costs.of_head(target, abstract_head("mtp", module), 2, "v5e") * num_bytes(target.params)

    assert read(6) - read(2) == pytest.approx(4 * 3 * 24 * 32 * 2)
