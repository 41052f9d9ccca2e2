"""The card's worked example (C4), and the controller's promises in a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, costs, decode
from specjax.controllers import goodput
from specjax.controllers.goodput import expected_tokens
from specjax.drafters import autoregressive, prompt_lookup, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.types import Info

DEPTHS = (0, 1, 2, 3, 5, 7)


def seconds(batch, k):
    return 1 + 0.01 * batch * (k + 1) + k * (0.2 + 0.001 * batch)


def info(accepted, depth, batch):
    """Return one round in which every row drafted `depth` tokens and accepted `accepted`."""
    row = lambda value: jnp.full((batch,), value, jnp.int32)
    nothing = jnp.zeros((batch, 1), jnp.int32)
    return Info(nothing, row(accepted + 1), row(accepted), row(depth), row(depth), row(1) > 0, row(0) > 0)


@pytest.mark.parametrize(
    ("batch", "depth", "wanted"), [(1, 3, 1.5417), (8, 2, 10.5797), (64, 1, 42.7673), (256, 0, 71.9101)]
)
def test_the_cards_goodput(batch, depth, wanted):
    tokens = expected_tokens(jnp.full((batch, 7), 0.7), DEPTHS)
    values = np.asarray(tokens) / [seconds(batch, k) for k in DEPTHS]
    assert DEPTHS[values.argmax()] == depth
    assert values.max() == pytest.approx(wanted, abs=1e-4)
    # The same choice by the controller, which backs off as the batch grows.
    controller = goodput(DEPTHS, costs=tuple(seconds(batch, k) / seconds(batch, 0) for k in DEPTHS), smoothing=1e-9)
    state = controller.update(controller.init(batch), info(1, 2, batch))
    assert controller.limit(state).tolist() == [depth] * batch


def test_limits_of_acceptance_and_cost():
    rising = lambda per_token: tuple(1 + per_token * k for k in DEPTHS)
    poor, free = goodput(DEPTHS, costs=rising(0.1), start=0.0), goodput(DEPTHS, costs=rising(0.0))
    assert poor.limit(poor.update(poor.init(2), info(0, 1, 2))).tolist() == [0, 0]
    assert free.limit(free.update(free.init(2), info(1, 2, 2))).tolist() == [7, 7]


def test_acceptance_counts_only_positions_that_were_reached():
    controller = goodput(DEPTHS, costs=(1.0,) * 6, smoothing=0.5, start=0.5)
    state = controller.update(controller.init(1), info(1, 3, 1))  # the first accepted, the second not, no third try
    np.testing.assert_allclose(state.rate, [0.75, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert state.visits[0].tolist() == [1, 1, 0, 0, 0, 0, 0]


def test_a_row_that_found_no_draft_counts_as_rejected():
    """Only the first of two rows drafts, and its tokens are accepted, but the pass is paid for both rows."""
    controller = goodput((0, 1, 3), costs=(1.0, 1.7, 2.5), smoothing=0.2)
    row = jnp.array([1, 0])
    state = controller.update(
        controller.init(2),
        info(0, 0, 2)._replace(accepted=row, drafted_depth=row, offered_depth=jnp.ones(2, jnp.int32)),
    )
    np.testing.assert_allclose(state.rate[0], 0.7 + (1 - 0.8**2) * (0.5 - 0.7), atol=1e-6)
    assert int(controller.limit(state)[0]) == 0


def test_what_could_not_be_drafted_does_not_count():
    """Neither steps without drafts, nor tokens beyond the end of a row, nor those after a drafted eos."""
    controller = goodput((0, 1, 3), costs=(1.0, 1.1, 1.2))
    start = controller.init(2)
    plain = controller.update(start, info(0, 0, 2)._replace(offered_depth=jnp.zeros(2, jnp.int32)))
    np.testing.assert_array_equal(plain.rate, start.rate)
    short = controller.update(start, info(1, 1, 2)._replace(offered_depth=jnp.ones(2, jnp.int32)))
    np.testing.assert_array_equal(short.rate[1:], start.rate[1:])
    ended = info(1, 3, 2)._replace(emitted=jnp.ones(2, jnp.int32), hit_eos=jnp.ones(2, bool))
    after_eos = controller.update(start, ended)
    assert after_eos.rate[0] > start.rate[0]
    np.testing.assert_array_equal(after_eos.rate[1:], start.rate[1:])


@pytest.mark.parametrize("length", [4, 8])
def test_short_texts_do_not_bias_the_rates(length):
    """A draft that is always right keeps its rates at 1 in texts of a few tokens, and in steps without drafts."""
    target = tiny_llama()
    controller = goodput((0, 1, 3), costs=(1.0, 1.01, 1.02), start=1.0)
    settings = Settings(controller=controller)
    job = prepare(target, two_model(target, 3), [[1, 2, 3], [4, 5]], settings, key=0, max_new_tokens=length)
    state, done = start(job), False
    while not done:
        state, info, all_done = step(job.parts, state)
        done = bool(all_done)
    np.testing.assert_array_equal(state.control.rate, 1)
    assert int(info.accepted.sum()) > 0 and state.control.visits.sum() > 0
    plain = dataclasses.replace(job.parts, plain=True)
    state, *_ = step(plain, start(job))
    assert state.control.visits.sum() == 0


def test_a_depth_costs_the_next_compiled_width():
    """Two tokens in a pass over two would pay. The drafter's pass has four."""
    curve = costs.Curve((1, 2, 4), (1.0, 1.2, 3.0))
    limits = []
    for widths in (None, (1, 4)):
        controller = goodput((0, 1), costs=curve, widths=widths)
        limits.append(int(controller.limit(controller.update(controller.init(1), info(1, 1, 1)))[0]))
    assert limits == [1, 0]
    fitted = goodput((0, 1), costs=curve).for_widths((1, 4))
    assert fitted is goodput((0, 1), costs=curve).for_widths((1, 4))
    assert fitted.for_widths is None


def test_probes_take_their_share_of_the_time():
    """A draft that costs one more pass comes in every twentieth step for a share of 0.05."""
    controller = goodput((0, 1), costs=(1.0, 2.0), start=0.0, probe_share=0.05)
    state, limits = controller.init(1), []
    for _ in range(61):
        limits.append(int(controller.limit(state)[0]))
        state = controller.update(state, info(0, limits[-1], 1))
    assert sum(limits[1:]) == 3


@pytest.mark.parametrize(("margin", "depth"), [(1.03, 1), (1.02, 3)])
def test_a_small_gain_does_not_change_the_depth(margin, depth):
    """Acceptance .5: depths of 1 and 3 give 1.5 and 1.875 tokens, 2.5 per cent apart at these prices."""
    price = 1.5 / (1.875 / 1.025)
    controller = goodput((0, 1, 3), costs=(9.0, 1.0, 1 / price), start=0.5, smoothing=1e-9, margin=margin)
    state = controller.update(controller.init(1), info(0, 1, 1))
    assert controller.limit(state).tolist() == [depth]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_it_is_nearly_as_good_as_the_best_depth(acceptance):
    """Simulated rounds of two rows, every drafted token accepted with one chance, over a thousand rounds."""
    cost = np.array([1 + 0.12 * k for k in DEPTHS])
    controller = goodput(DEPTHS, costs=tuple(cost))
    luck = np.random.default_rng(0).random((1000, 2, 7)) < acceptance
    run = np.cumprod(luck, 2).sum(2)  # how many of any number of drafts would be accepted

    def body(state, run):
        limit = controller.limit(state)
        accepted = jnp.minimum(run, limit)
        zero = jnp.zeros((2, 1), jnp.int32)
        new = controller.update(state, Info(zero, accepted + 1, accepted, limit, limit, limit >= 0, limit < 0))
        return new, (limit[0], jnp.sum(accepted + 1))

    _, (limits, tokens) = jax.lax.scan(body, controller.init(2), jnp.asarray(run, jnp.int32))
    spent = cost[np.searchsorted(DEPTHS, np.asarray(limits))].sum()
    best = max((np.minimum(run, k) + 1).sum() / (len(run) * c) for k, c in zip(DEPTHS, cost, strict=True))
    assert tokens.sum() / spent > 0.9 * best


def test_where_nothing_is_drafted_it_probes():
    controller = goodput((0, 1, 4), costs=(1.0, 2.0, 3.0), start=0.0, probe_share=0.25)
    state, limits = controller.init(1), []
    for _ in range(9):
        limits.append(int(controller.limit(state)[0]))
        state = controller.update(state, info(0, limits[-1], 1))
    assert limits == [1, 0, 0, 1, 0, 0, 0, 1, 0]


def test_text_is_that_of_plain_decoding_and_dear_passes_are_not_run():
    target, prompts = tiny_llama(), [[1, 2, 3, 1, 2, 3, 1], [5, 6]]
    run = lambda drafter, **options: decode(
        target, drafter, prompts, key=jax.random.key(0), max_new_tokens=24, temperature=0.8, **options
    )
    plain = run(autoregressive())
    drafter = prompt_lookup(7, min_ngram=1)
    cheap = run(drafter, controller=goodput(DEPTHS, costs=(1.0, 1.01, 1.02, 1.03, 1.04, 1.05)))
    dear = run(drafter, controller=goodput(DEPTHS, costs=(1.0, 20.0, 30.0, 40.0, 50.0, 60.0)))
    assert cheap.to_lists() == dear.to_lists() == plain.to_lists()
    assert cheap.stats.drafted.sum() > 4 * dear.stats.drafted.sum()


def test_bad_settings():
    with pytest.raises(UsageError, match="depths must increase from 0"):
        goodput((1, 2))
    with pytest.raises(UsageError, match="one positive number per depth"):
        goodput((0, 1), costs=(1.0,))
    with pytest.raises(UsageError, match="probe_share must be above 0"):
        goodput((0, 1), probe_share=0.0)


def test_rows_that_have_ended_have_no_vote():
    """Seven rows that accepted everything and ended kept the depth at 5 for one that accepts nothing."""
    controller = goodput(DEPTHS, costs=tuple(1 + 0.15 * k for k in DEPTHS))
    is_last = jnp.arange(8) == 7
    together = info(5, 5, 8)._replace(accepted=jnp.where(is_last, 0, 5))
    state = controller.init(8)
    for _ in range(60):
        state = controller.update(state, together)
    assert int(controller.limit(state)[0]) >= 5
    for _ in range(60):
        state = controller.update(state, info(0, 5, 8)._replace(active=is_last))
    assert int(controller.limit(state)[0]) == 0
