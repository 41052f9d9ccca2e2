"""Costs that follow the experts which passes really read, and decisions of `auto` that follow these costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import costs, models, stream
from specjax.controllers import goodput
from specjax.costs.sharing import (
    RATE,
    UNSEEN,
    ExpertSharing,
    corrected_costs,
    init_sharing,
    observe_sharing,
    update_sharing,
)
from specjax.drafters import auto, prompt_lookup
from specjax.drafters.combined.auto import make_auto
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.llama import LlamaConfig
from specjax.trees import operations
from specjax.types import Context, Info, Output, Target, Verdict

SIZES = MixtureSizes(64, 96, Routing(2, normalized=True))
MIXTURE = LlamaConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, experts=SIZES
)
WIDTH = 4


@pytest.fixture(scope="module")
def target():
    return Target(models.make_model(MIXTURE), models.init_params(MIXTURE, jax.random.key(0)))


def test_a_ratio_is_that_of_the_experts_beyond_those_of_one_row():
    expected = SIZES.expected_experts(4) - 2
    observed = observe_sharing(SIZES, jnp.float32(2 + expected / 4), 1, 4)
    np.testing.assert_allclose(observed, [UNSEEN, 0.25], rtol=1e-6)
    assert observe_sharing(SIZES, jnp.float32(2), 1, 1).tolist() == [UNSEEN, UNSEEN]  # one row shares with no other
    plain = observe_sharing(SIZES, jnp.float32(2), 4, 1)
    np.testing.assert_allclose(plain, [0, UNSEEN], atol=1e-6)
    ratio = update_sharing(init_sharing(), observed).ratio
    np.testing.assert_allclose(ratio, [1, 1 - RATE * 0.75], rtol=1e-6)


def test_costs_without_sharing_are_the_estimated_ones(target):
    widths, shares = (1, 4, 16), costs.shares_of(target, "cpu")
    estimated = costs.estimated(widths, 2, platform="cpu", shares=shares)
    added = costs.added_by_experts(None, widths, 2, platform="cpu", shares=shares)
    np.testing.assert_allclose(corrected_costs(estimated, added, widths, init_sharing()), estimated, rtol=1e-6)
    dense = costs.estimated(widths, 2, platform="cpu", shares=shares._replace(experts=costs.NO_SHARES.experts))
    shared = corrected_costs(estimated, added, widths, ExpertSharing(jnp.zeros(2)))
    np.testing.assert_allclose(shared, dense, rtol=1e-5)
    assert not costs.added_by_experts((1.0, 2.0, 3.0), widths, 2, platform="cpu", shares=shares).any()


def state_after(drafter, target, experts, passes=60):
    """Return the state of `auto` after wide passes that read this number of experts per layer."""
    context = Context(jnp.array([[1, 2, 3, 1, 2, 3, 1, 2]]), jnp.array([8]), target=target)
    state = drafter.init((), context)
    tree = operations.chain(jnp.array([[2, 3, 1, 2]]), jnp.ones((1, WIDTH), bool))
    verdict = Verdict(jnp.array([[0, -1, -1, -1]]), jnp.array([1]), jnp.array([4]))
    output = Output(jnp.zeros((1, WIDTH, 64)), None, experts=experts)

    @jax.jit
    def after(state):
        return drafter.update((), state, drafter.observe((), state, context, tree, verdict, output), verdict)

    for _ in range(passes):
        state = after(state)
    return context, state


@pytest.mark.parametrize(("experts", "drafts"), [(2.0, True), (SIZES.expected_experts(WIDTH), False)])
def test_auto_learns_that_drafts_which_share_experts_are_cheaper(target, experts, drafts):
    """Both states have seen the same text, but only passes whose tokens share experts save time."""
    drafter = make_auto(target, None, widths=(1, WIDTH), platform="cpu")
    shares = costs.shares_of(target, "cpu")
    assert costs.estimated((1, WIDTH), 1, platform="cpu", shares=shares)[1] > 2.5
    context, state = state_after(drafter, target, jnp.float32(experts))
    state = state._replace(record=state.record._replace(rest=jnp.int32(0)))  # the passes above lost, so it pauses
    tree, _ = drafter.propose((), jax.random.split(jax.random.key(0), 1), state, context, jnp.array([9]))
    assert bool(tree.valid[0, 1:].any()) == drafts


def test_nothing_is_added_to_models_without_experts_or_given_costs(target):
    context = Context(jnp.array([[1, 2, 3]]), jnp.array([3]))
    dense = tiny_llama()
    assert auto(64).init((), context._replace(target=dense)).sharing == ()
    assert auto(64, widths=(1, 4), costs=(1.0, 2.0)).init((), context._replace(target=target)).sharing == ()
    assert isinstance(auto(64).init((), context._replace(target=target)).sharing, ExpertSharing)


def info(experts, width, accepted):
    row = jnp.full((1,), accepted, jnp.int32)
    nothing = jnp.zeros((1, 1), jnp.int32)
    read = jnp.array([[experts, width]], jnp.float32)
    return Info(nothing, row + 1, row, row, row, row >= 0, row < 0, experts=read)


@pytest.mark.parametrize(("experts", "depth"), [(2.0, 3), (SIZES.expected_experts(4), 0)])
def test_goodput_learns_that_drafts_which_share_experts_are_cheaper(target, experts, depth):
    """All drafts are accepted. Four tokens of independent rows cost more than four passes, equal ones less than two."""
    controller = goodput((0, 3), shares=costs.shares_of(target, "cpu"), start=0.5)
    assert controller.reads_experts
    state = controller.init(1)
    update = jax.jit(controller.update)
    for _ in range(80):
        state = update(state, info(experts, 4, 1))
    assert int(state.depth) == depth


def test_the_engine_reports_the_experts_of_a_pass_to_goodput_alone(target):
    shares = costs.shares_of(target, "cpu")
    run = functools.partial(stream, target, prompt_lookup(num_tokens=3), [[1, 2, 3, 1, 2]], key=0, max_new_tokens=24)
    steps = run(controller=goodput((0, 3), shares=shares))
    read = np.concatenate([step.info.experts for step in steps])
    assert set(read[:, 1]) <= {1.0, 4.0}
    assert (read[read[:, 1] == 1, 0] == 2).all()
    assert (read[:, 0] >= 2).all() and (read[:, 0] <= 8).all()
    assert all(step.info.experts is None for step in run())
    assert not goodput((0, 3)).reads_experts
    assert not goodput((0, 3), costs=(1.0, 2.0), shares=shares).reads_experts
