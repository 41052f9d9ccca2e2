"""Every caller of costs counts the experts that a pass over several tokens reads.

Each test compares a mixture with a dense model whose passes over one token read as many bytes. It fails if a caller
drops the experts from the costs.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import controllers, costs, models
from specjax.catalog.defaults import Defaults
from specjax.controllers.by_batch import LADDER
from specjax.costs.experts import expert_leaves
from specjax.drafters.default import default_controller
from specjax.drafters.heads.sized_trees import Sizing
from specjax.drafters.widths import select_passes
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.llama import LlamaConfig
from specjax.models.storage import num_bytes
from specjax.planning import traffic, what_fits
from specjax.planning.abstract import unsharded
from specjax.planning.budget import frontier
from specjax.planning.memory import memory_of
from specjax.planning.workload import make_workload
from specjax.trees.builders.static import branching
from specjax.types import Info, Target

SIZES = MixtureSizes(64, 512, Routing(2, normalized=True))
MIXTURE = LlamaConfig(
    vocab_size=2048, width=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_width=1024, experts=SIZES,
    max_positions=4096, name="mixture",
)  # fmt: skip
DENSE = dataclasses.replace(MIXTURE, experts=None, name="dense")
"""A dense model with as many hidden units as the two experts of a token."""
RATE = 0.7


def of_shapes(config):
    return Target(models.make_model(config), models.abstract_params(config))


@pytest.fixture(scope="module")
def pair():
    """Return the mixture and the dense model. A router is all that a token reads beyond the latter."""
    mixture, dense = of_shapes(MIXTURE), of_shapes(DENSE)
    assert costs.active_bytes(mixture) == pytest.approx(costs.active_bytes(dense), rel=0.03)
    return mixture, dense


def depth_after(controller, steps=60):
    """Return the depth of a controller after steps in which RATE of the drafted tokens were accepted."""
    state, update = controller.init(1), jax.jit(controller.update)
    random = np.random.default_rng(0)
    for _ in range(steps):
        offered = controller.limit(state)
        count = np.minimum(random.geometric(1 - RATE, 1) - 1, np.asarray(offered))
        accepted = jnp.asarray(count, jnp.int32)
        tokens = jnp.zeros((1, 1), jnp.int32)
        state = update(state, Info(tokens, accepted + 1, accepted, offered, offered, accepted >= 0, accepted < 0))
    return int(state.depth)


def test_goodput(pair):
    """`specjax generate --controller goodput` and the default controller read the shares of the target."""
    depths = []
    for target in pair:
        parsed = controllers.parse("goodput", None, "float32", shares=costs.shares_of(target))
        default = default_controller(Defaults("prompt_lookup", controller="goodput"), target, None)
        assert depth_after(default) == depth_after(parsed)
        depths.append(depth_after(parsed))
    assert depths[0] < depths[1] and depths[1] >= 2


def test_budget(pair):
    steps = [controllers.parse("budget", None, "float32", shares=costs.shares_of(target)) for target in pair]
    assert [controller.reads_experts for controller in steps] == [True, False]


def test_by_batch(pair):
    """A dense model has the fixed table. More rows choose more experts anyway, so drafts of a mixture pay there."""

    def parse(target, **more):
        return controllers.parse("by_batch", None, "bfloat16", shares=costs.shares_of(target), **more)

    mixture, dense = ({batch: int(parse(target).init(batch)[0]) for batch, _ in LADDER} for target in pair)
    assert dense == dict(LADDER)
    assert mixture[1] < dense[1] and mixture[64] > mixture[1]
    curve = costs.Curve((1, 8), (1.0, 1.05))
    measured = controllers.parse("by_batch", curve, "bfloat16", shares=costs.shares_of(pair[0]))
    assert int(measured.init(1)[0]) == 7, "a measured curve has the experts already"
    assert int(parse(pair[0], draft_cost=1.0).init(64)[0]) == 0


@pytest.mark.parametrize("platform", ["cpu", "v5e", "h200"])
def test_widths_of_auto_and_of_sized_trees(pair, platform):
    """`auto` and `ddtree:auto` choose among passes whose costs have the experts."""
    select = functools.partial(select_passes, (1, 4, 8, 16), None, 1, MIXTURE.vocab_size, "float32", platform)
    mixture, dense = map(select, pair)
    assert mixture.added.max() > 0 or len(mixture.widths) == 1
    assert not dense.added.any()
    estimate = lambda target: costs.estimated((1, 4, 8, 16), 1, "float32", platform, costs.shares_of(target, platform))
    curve = [estimate(target) for target in pair]
    assert (curve[0][1:] > curve[1][1:] + 0.05).all()
    sized = [Sizing(platform=platform).passes(1, target) for target in pair]
    assert len(sized[0].widths) <= len(sized[1].widths)
    shared = set(sized[0].widths) & set(sized[1].widths) - {1}
    cost = lambda passes, width: passes.costs[passes.widths.index(width)]
    assert all(cost(sized[0], width) > cost(sized[1], width) + 0.05 for width in shared)


def test_costs_of_the_stop_condition_budget(pair):
    builder = branching("4x2x2x1")
    mixture, dense = (Sizing(platform="v5e").pass_costs(1, target, builder) for target in pair)
    assert mixture[-1] > dense[-1] + 0.5


@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_trees_of_fits(pair, chip):
    """A pass over few nodes of a mixture is no longer cheap."""
    topology = f"{chip}:1x1" if chip == "v5e" else f"{chip}:1"
    fits = [what_fits(topology, target=config, dtype="bfloat16", context=1024).models[0] for config in (MIXTURE, DENSE)]
    assert fits[0].num_nodes < fits[1].num_nodes
    assert fits[0].step_seconds == pytest.approx(fits[1].step_seconds, rel=0.05), "a token reads the chosen experts"


def test_plans_within_a_memory_budget():
    """The roofline of a pass within `specjax plan --memory` grows with the experts."""
    growth = []
    for config in (MIXTURE, DENSE):
        work = make_workload(config, "v5e:1x1", context=1024, max_new_tokens=64)
        footprint: Any = SimpleNamespace(target=memory_of(work, unsharded(config)))
        seconds = [frontier._seconds(work, footprint, nodes) for nodes in (1, 16)]
        growth.append(seconds[1] / seconds[0])
    assert growth[0] > growth[1] + 1


def test_bytes_that_a_step_has_to_move():
    """`specjax compile` and `plan` have the expected experts in the minimum of a pass, not all of them."""
    target = unsharded(MIXTURE)
    experts = num_bytes(expert_leaves(target.params))
    moved = lambda **more: traffic.pass_bytes(MIXTURE, target.params, 0.0, 0.0, **more)
    for nodes in (1, 16):
        read = SIZES.expected_experts(nodes) / SIZES.num_experts
        assert moved() - moved(experts=(nodes, 1)) == pytest.approx(experts * (1 - read))
    dense = unsharded(DENSE)
    of_dense = functools.partial(traffic.pass_bytes, DENSE, dense.params, 0.0, 0.0)
    assert of_dense(experts=(1, 1)) == of_dense()
