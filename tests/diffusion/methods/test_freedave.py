"""FreeDave: the text of the static procedure in fewer passes."""

import jax
import numpy as np
import pytest
import tiers
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Control, Procedure, methods, rules, schedules
from specjax.diffusion.caches import WHOLE
from specjax.diffusion.loop import get_canvas
from specjax.diffusion.methods.freedave import ahead
from specjax.diffusion.prepare import prepare
from specjax.diffusion.types import CanvasCache, ControlAction
from specjax.engine.prepare import Settings
from specjax.engine.run import start, step

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]


def both(denoiser, static, drafts, prompts=PROMPTS, seed=3, count=18, **settings):
    """(the static procedure's result, FreeDave's)."""
    return tuple(
        specjax.denoise(denoiser, method, prompts, key=seed, max_new_tokens=count, **settings)
        for method in (static, static.replace(verify=ahead(drafts)))
    )


def same(static, ours):
    assert ours.to_lists() == static.to_lists() and ours.finish_reasons == static.finish_reasons
    assert np.all(ours.stats.target_passes <= static.stats.target_passes)
    order = np.argsort(static.decided_at, 1, kind="stable")  # what is decided earlier there is never later here
    assert np.all(np.diff(np.take_along_axis(np.asarray(ours.decided_at), order, 1), axis=1) >= 0)


@pytest.mark.parametrize(
    "kind, temperature, drafts",
    [
        ("full", 0.8, 4),
        ("causal", 0.8, 4),
        *(
            tiers.exhaustive(kind, t, d)
            for kind in ("shifted", "seeded", "causal", "full")
            for t, d in ((0.0, 8), (1.0, 2))
        ),
    ],
)  # fmt: skip
def test_the_text_is_that_of_the_static_procedure(kind, temperature, drafts):
    denoiser = {
        "full": toys.full, "shifted": lambda: toys.full("shifted"), "causal": toys.causal,
        "seeded": lambda: toys.causal(4, "seed_and_mask"),
    }[kind]()  # fmt: skip
    rows = np.random.default_rng(drafts).integers(0, 60, (24, 9))
    prompts = [list(map(int, row[: 3 + n % 7])) for n, row in enumerate(rows)]
    settings = {"temperature": temperature, "eos": 17, "logprobs": True}
    static, ours = both(denoiser, methods.llada(denoiser, block=8), drafts, prompts, **settings)
    same(static, ours)
    np.testing.assert_allclose(ours.logprobs, static.logprobs, atol=2e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [1, 2, 4, 8])
def test_of_three_hundred_models(drafts):
    base = toys.full()
    static = methods.llada(base, block=8)
    for seed in range(75):
        shaken = jax.tree.map(
            lambda x, seed=seed: x + 0.3 * x.std() * jax.random.normal(jax.random.key(seed), x.shape, x.dtype),
            base.params,
        )
        same(*both(base.replace(params=shaken), static, drafts, seed=seed, temperature=0.5))


@pytest.mark.parametrize("drafts, passes", [(4, 5), (5, 4), tiers.exhaustive(1, 16)])
def test_sixteen_columns_whose_logits_stand_still(drafts, passes):
    denoiser = toys.frozen(np.linspace(0.9, 0.5, 18))
    static, ours = both(denoiser, methods.llada(denoiser, block=None), drafts, [[1, 2]], count=16)
    same(static, ours)
    assert static.stats.target_passes.tolist() == [16] and ours.stats.target_passes.tolist() == [passes]
    assert ours.columns.tolist() == [passes * drafts * 18]


def test_two_tokens_that_hang_together_are_never_decided_by_marginals():
    denoiser = toys.coupled()
    static, ours = both(denoiser, methods.llada(denoiser, block=2), 2, [[2]] * 400, count=2, temperature=1.0)
    assert ours.to_lists() == static.to_lists()
    tokens = np.asarray(ours.tokens[:, :2])
    assert np.all(tokens[:, 0] != tokens[:, 1]) and 1 < np.mean(ours.stats.target_passes) <= 2


def test_a_draft_that_is_wrong_ends_the_chain_before_it():
    """The chain ends before the second of three right drafts, which is spoilt after the model looked at it as it
    was."""
    denoiser = toys.frozen(np.linspace(0.9, 0.5, 18))
    cache = WHOLE

    def spoilt(denoiser, state, canvases, window):
        output, state = cache.several(denoiser, state, canvases, window)
        return output._replace(hidden=output.hidden.at[1].set(jax.numpy.roll(output.hidden[1], 1, 1))), state

    memory = CanvasCache(cache.look, "full", True, cache.init, "spoilt", cache.axes, spoilt)
    method = methods.freedave(denoiser, block=None, drafts=4).replace(memory=memory)
    job = prepare(denoiser, method, [[1, 2]], Settings(), key=0, max_new_tokens=16)
    state, counts = start(job), []
    for _ in range(3):
        state, _, _ = step(job.parts, state)
        counts.append(int(get_canvas(state).decided[0]))
    assert counts == [1, 3, 4]  # the exact step and the spoilt one behind it; by that one the next drafts are wrong


@pytest.mark.parametrize("name", ["quota_two", tiers.exhaustive("threshold"), tiers.exhaustive("control")])
def test_any_rule_schedule_and_control_can_be_drafted(name):
    denoiser = toys.full()
    filled = Control(
        lambda params, state, canvas, proposal, view, wide: (ControlAction(fill=canvas.passes == 5), state), wide=True
    )
    static = {
        "quota_two": Procedure(schedules.blocks(16, steps=8, sub_block=8), rules.quota("random")),
        "threshold": Procedure(schedules.blocks(8), rules.threshold(0.1)),
        "control": methods.llada(denoiser, block=8).replace(control=filled),
    }[name]
    same(*both(denoiser, static, 3, temperature=0.7, logprobs=True))


def test_a_memory_that_cannot_is_refused():
    denoiser = toys.full()
    method = methods.freedave(denoiser)
    look = lambda *_: None
    for memory, words in (
        (CanvasCache(look, "full", False), "needs an exact cache"),
        (CanvasCache(look, "full", True), "several canvases per pass"),
    ):
        with pytest.raises(UsageError, match=words):
            specjax.denoise(denoiser, method.replace(memory=memory), [[1]], key=0, max_new_tokens=4)
    with pytest.raises(UsageError, match="at least 1"):
        methods.freedave(denoiser, drafts=0)
