"""Tests of the costs of drafting with heads that run layers of the target."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from specjax import Target, costs
from specjax.models import LlamaConfig, abstract_params, make_model
from specjax.models.heads.kinds import KINDS, abstract_head

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
