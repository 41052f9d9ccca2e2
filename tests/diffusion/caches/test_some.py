"""Memories that compute some columns: exact where nothing that they keep could have changed, and of fewer columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.caches import delayed, phases, prefix, some
from specjax.diffusion.schedules import sliding
from specjax.diffusion.types import Canvas, Window

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]
NEW = 18
SLIDING = sliding(6, 24)


def texts(denoiser, memory, schedule=None):
    method = methods.llada(denoiser, block=8).replace(memory=memory)
    method = method.replace(schedule=schedule) if schedule else method
    return specjax.denoise(denoiser, method, PROMPTS, key=3, max_new_tokens=NEW, temperature=0.8)


@pytest.mark.parametrize(
    ("memory", "schedule", "alignment"),
    [
        (prefix(), None, "same"),
        exhaustive(prefix(), None, "shifted"),
        (delayed(None), None, "shifted"),
        (delayed(None, "fresh"), None, "same"),
        exhaustive(delayed(None), None, "same"),
        exhaustive(delayed(5, "fresh"), None, "shifted"),
        (phases(24, 6, 50), SLIDING, "same"),
        exhaustive(phases(24, 6, 50), SLIDING, "shifted"),
    ],
)
def test_with_one_layer_they_are_exact_and_compute_less(memory, schedule, alignment):
    denoiser = toys.full(alignment, layers=1)
    plain, ours = texts(denoiser, None, schedule), texts(denoiser, memory, schedule)
    assert ours.to_lists() == plain.to_lists() and np.all(ours.decided_at == plain.decided_at)
    assert ours.stats.target_passes.tolist() == plain.stats.target_passes.tolist()
    assert int(ours.columns.sum()) < int(plain.columns.sum())


@pytest.mark.parametrize(
    ("always", "rarely", "schedule"),
    [
        (prefix(1), prefix(), None),
        (delayed(1), delayed(None), None),
        exhaustive(delayed(1, "fresh"), delayed(None, "fresh"), None),
        (phases(24, 24, 1), phases(12, 6, 50), sliding(24, 24)),
    ],
)
def test_with_two_layers_they_are_exact_if_refreshed_in_every_pass_and_only_then(always, rarely, schedule):
    denoiser = toys.full()
    plain, ours, other = (texts(denoiser, memory, schedule) for memory in (None, always, rarely))
    assert ours.to_lists() == plain.to_lists() != other.to_lists()
    assert np.all(ours.columns == plain.columns)


@pytest.mark.parametrize("alignment", ["same", "shifted"])
def test_a_look_computes_what_is_live_and_keeps_what_is_kept(alignment):
    """Logits of live columns are those of a pass in which the others have the keys that were left."""
    target = toy.tiny_llama(layers=1)
    denoiser = specjax.Denoiser(target.model, target.params, toys.MASK, alignment=alignment)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 32)), jnp.int32)
    column, count = jnp.arange(32), jnp.array([20, 30])
    opened = (column >= 12) & (column < count[:, None])
    canvas = Canvas(tokens, opened, jnp.array([12, 12]), count, count * 0, jnp.where(opened, -1, -2), count * 0)
    window = Window(jnp.array([12, 14]), count > 0, count > 0, 4)
    left, existing = some.empty(denoiser, canvas), some.exists(canvas)
    look = jax.jit(lambda left, canvas, plan: some.look(denoiser, left, canvas, window, plan))
    initial, left = look(left, canvas, some.PassPlan(existing, existing, existing))
    changed = canvas._replace(tokens=tokens.at[:, 3].set(60).at[:, 5].set(61).at[:, 7].set(62))
    within = some.in_window(canvas, window)
    live = within.at[:, [3, 7]].set(True)
    ours, updated = look(left, changed, some.PassPlan(live, existing, within.at[:, 3].set(True) & ~within))
    full_pass = lambda tokens: look(left, canvas._replace(tokens=tokens), some.PassPlan(existing, existing, existing))[
        0
    ]
    expected = full_pass(tokens.at[:, 3].set(60).at[:, 7].set(62))
    np.testing.assert_allclose(ours.hidden, expected.hidden, atol=1e-4)
    assert ours.predicted.all() and initial.columns.tolist() == [20, 30] and initial.computed.tolist() == [32, 32]
    live_columns = 4 + 2 + (alignment == "shifted")  # shifted models read the column before the window
    assert ours.columns.tolist() == [live_columns] * 2 and ours.computed.tolist() == [8, 8]
    # It kept what it made of column 3, not of 7, and nothing of 5, which was not live.
    expected = full_pass(tokens.at[:, 3].set(60))
    again, _ = look(updated, canvas, some.PassPlan(within, existing, within & False))
    np.testing.assert_allclose(again.hidden, expected.hidden, atol=1e-4)
    assert float(jnp.max(jnp.abs(initial.hidden - expected.hidden))) > 1e-2


def test_what_they_do_not_fit_is_refused():
    causal, full = toys.causal(), toys.full()
    for memory in (prefix(), delayed(), phases()):
        with pytest.raises(UsageError, match="full attention"):
            specjax.denoise(causal, methods.sdar(causal).replace(memory=memory), PROMPTS, key=0, max_new_tokens=4)
        with pytest.raises(UsageError, match="needs an exact cache"):
            specjax.denoise(full, methods.freedave(full).replace(memory=memory), PROMPTS, key=0, max_new_tokens=4)
    for make in (prefix, delayed, lambda refresh: phases(4, 4, refresh)):
        with pytest.raises(UsageError, match="at least 1"):
            make(0)
    with pytest.raises(UsageError, match="inner must be from 1 to outer"):
        phases(4, 5)
    with pytest.raises(UsageError, match="frozen or fresh"):
        delayed(2, "cold")
    for method in (methods.dkv_cache, methods.window_diffusion, methods.ete):
        with pytest.raises(UsageError, match="choose sdar"):
            method(causal)
