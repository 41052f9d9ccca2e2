"""`auto` for a target whose pass costs less than a draft: it drafts rarely, unless drafts save more than they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shipped_mixture import shipped_mixture
from toy import markov, tiny_llama

from specjax import UsageError, costs, decode
from specjax.drafters import auto, autoregressive
from specjax.drafters.combined.auto import DRAFTING, LEARN, REST, _learn_every, _pause, make_auto
from specjax.drafters.combined.head_schedule import PROBES
from specjax.drafters.combined.settings import make_config
from specjax.types import Context

WIDTHS = {"widths": (1, 4, 8), "costs": (1.0, 1.1, 1.2)}
CONTEXT = Context(jnp.array([[1, 2, 3, 1, 2, 3, 1, 2]]), jnp.array([8]))


def decoded(target, drafter, new=400, **options):
    return decode(target, drafter, [[0]], key=0, max_new_tokens=new, **options)


def cycle(n):
    return markov(np.eye(n, dtype=np.float32)[(np.arange(n) + 1) % n] * 0.999 + 0.001 / n)


def propose(draft_cost, **record):
    drafter = auto(64, widths=(1, 4), costs=(1.0, 1.01), draft_cost=draft_cost)
    state = drafter.init((), CONTEXT)
    state = state._replace(record=state.record._replace(**record))
    return drafter.propose((), jax.random.split(jax.random.key(0), 1), state, CONTEXT, jnp.array([9]))


@pytest.mark.parametrize(("draft_cost", "pause"), [(None, 0), (1.0, 0), (3.0, 300)])
def test_a_draft_that_saves_less_than_it_costs_is_followed_by_a_pause(draft_cost, pause):
    """The drafts of this text save between 1 and 3 passes."""
    tree, state = propose(draft_cost)
    assert tree.valid.sum() == 4
    assert int(state.record.rest) == pause


def test_probes_take_a_small_part_of_the_time():
    of = lambda cost: make_config(64, None, (1, 4), (1.0, 1.1), "float32", None, None, None, None, cost)
    assert _pause(of(DRAFTING)) == REST and _learn_every(of(DRAFTING)) == LEARN
    for cost in (0.5, 2.3, 40.0):
        assert cost / _pause(of(cost)) <= PROBES


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding(temperature):
    target = tiny_llama()
    ours, plain = (
        decoded(target, drafter, 60, temperature=temperature)
        for drafter in (auto(64, **WIDTHS, draft_cost=0.6), autoregressive())
    )
    assert ours.to_lists() == plain.to_lists()


def test_it_drafts_only_if_drafts_save_more_than_they_cost():
    """Drafts of a cycle save about 6 passes each. The first draft finds nothing, and a pause of 200 steps follows."""
    cheap, dear = (decoded(cycle(9), auto(9, **WIDTHS, draft_cost=cost)) for cost in (2.0, 20.0))
    assert int(cheap.stats.target_passes[0]) < 250
    assert int(dear.stats.target_passes[0]) > 390


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_tiny_mixture_drafts_without_gain_are_rare(temperature):
    """A draft costs nearly three passes there, and drafts of its stories save less. Times: `auto_on_mixture.py`."""
    target = shipped_mixture()
    cost = costs.of_drafting(target, "cpu")
    assert 2 < cost < 4
    prompt = [list(range(40, 60))]
    run = lambda drafter: decode(target, drafter, prompt, key=0, max_new_tokens=320, temperature=temperature)
    frugal, plain = run(make_auto(target, None, draft_cost=cost)), run(autoregressive())
    assert frugal.to_lists() == plain.to_lists()
    assert int(frugal.stats.target_passes[0]) > 310


def test_the_estimate_is_small_for_usual_models_and_large_for_tiny_ones():
    assert costs.of_drafting(tiny_llama(), "cpu") > 1
    assert costs.of_drafting(tiny_llama(), "v5e") < 0.1
    large = tiny_llama(width=512, layers=8, vocab=20_000)
    assert costs.of_drafting(large, "cpu") < 0.2


def test_the_default_is_the_estimate_for_the_target_beside_costs_of_a_device():
    """Numbers as costs are in a unit of the caller, and a usual model has the measured minimum."""
    target = shipped_mixture()
    estimate, config = costs.of_drafting(target), lambda **options: make_auto(target, None, **options).propose.args[0]
    assert estimate > 1
    assert config().draft_cost == config(costs=costs.Curve((1, 16), (1.0, 2.0))).draft_cost == estimate
    assert config(widths=(1, 4), costs=(1.0, 1.2)).draft_cost == DRAFTING
    assert config(draft_cost=0.5).draft_cost == 0.5


@pytest.mark.parametrize("draft_cost", [-0.1, 1e5, float("nan")])
def test_bad_costs(draft_cost):
    with pytest.raises(UsageError, match="draft_cost must be at least 0"):
        auto(9, **WIDTHS, draft_cost=draft_cost)
