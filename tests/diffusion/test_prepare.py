"""Tests of what is refused before anything compiles: settings that do nothing, parts that would void what another
promises."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Control, ControlAction, Procedure, methods, rules, schedules
from specjax.diffusion.caches import TOKEN_CAUSAL, WHOLE, guided
from specjax.diffusion.methods.constraint import TokenAutomaton
from specjax.diffusion.methods.dimple import PREFILLED
from specjax.diffusion.prepare import prepare
from specjax.engine.prepare import Settings
from specjax.engine.run import start

END_AT_ONCE = Control(lambda params, state, canvas, proposal, view, wide: (ControlAction(end=canvas.start + 1), state))
PAIRS = TokenAutomaton(np.where(np.arange(64) < 60, [[1], [0]], -1), [True, False])  # an even number of tokens


def refused(denoiser, method, **settings):
    with pytest.raises(UsageError) as error:
        specjax.denoise(denoiser, method, [[1, 2]], key=0, max_new_tokens=4, **settings)
    return str(error.value)


def test_settings_of_the_other_loop_are_refused():
    assert 'does not support sampling="coupled"' in refused(toys.full(), "llada", sampling="coupled", temperature=1.0)
    assert "does not support debug" in refused(toys.full(), "llada", debug=True)


def test_a_denoiser_is_read_as_one_of_the_words_says():
    for wrong, words in (
        ({"attention": "causal"}, "attention must be one of full, block_causal"),
        ({"alignment": "shift"}, "alignment must be one of same, shifted"),
        ({"seeding": "seeded"}, "seeding must be one of all_masked, seed_and_mask"),
        ({"mask_token": 63.0}, "mask_token must be a whole number"),
        ({"attention": "block_causal", "block": 4.0}, "block must be a whole number"),
    ):
        with pytest.raises(UsageError, match=words):
            dataclasses.replace(toys.full(), **wrong)


def test_what_keeps_only_what_is_judged_needs_a_judge():
    denoiser, base = toys.causal(), Procedure(schedules.blocks(4), rules.quota(), TOKEN_CAUSAL)
    assert "works only with linear_spec and s2d2" in refused(denoiser, base)
    assert "works only with" in refused(denoiser, base.replace(memory=guided(TOKEN_CAUSAL, 1.0)))


@pytest.mark.parametrize(
    "parts, words",
    [
        ({"control": END_AT_ONCE}, "does not support a control"),
        ({"score": methods.eoser(toys.causal()).score}, "does not support a score"),
        ({"rule": rules.threshold(0.5)}, "its own schedule and rule"),
        ({"schedule": schedules.blocks(4)}, "its own schedule and rule"),
    ],
)
@pytest.mark.parametrize("name", ["linear_spec", "s2d2"])
def test_what_judges_by_the_model_alone_hears_nothing_else(name, parts, words):
    denoiser = toys.causal()
    assert words in refused(denoiser, getattr(methods, name)(denoiser).replace(**parts))


def test_a_memory_of_all_new_columns_takes_no_blocks():
    denoiser = toys.full()
    assert "the cache `prefilled`" in refused(denoiser, methods.llada(denoiser, block=8).replace(memory=PREFILLED))


def test_a_fill_knows_no_language():
    denoiser = toys.full()
    language = methods.constraint(denoiser, automaton=PAIRS)
    sure = methods.prophet(denoiser).control
    assert "leave the control or the score out" in refused(denoiser, language.replace(control=sure))


def test_a_text_that_ends_with_eos_is_a_word():
    denoiser = toys.full()
    language = methods.constraint(denoiser, automaton=PAIRS)
    assert "pass automaton.closed(eos)" in refused(denoiser, language, eos=5)
    assert "pass automaton.closed(eos)" in refused(denoiser, language, eos=[62, 5])
    ready = lambda automaton, eos: prepare(
        denoiser, methods.constraint(denoiser, automaton=automaton), [[1]], Settings(eos=eos), key=0, max_new_tokens=4
    )
    ready(PAIRS.closed(5), 5), ready(PAIRS, 62), ready(PAIRS, 1000), ready(PAIRS, ())


def test_a_memory_that_went_through_jit_is_the_same():
    """The caller's own jit makes it anew."""
    import jax

    denoiser = toys.full()
    procedure = methods.prophet(denoiser).replace(memory=WHOLE)
    again = jax.tree.unflatten(*reversed(jax.tree.flatten(procedure)))
    assert again.memory is not WHOLE
    prepare(denoiser, again, [[1]], Settings(), key=0, max_new_tokens=4)


def test_what_prompts_are_padded_with_is_not_read():
    denoiser = toys.frozen(np.full(40, 0.5))
    rows = np.array([[1, 2, 7, 8, 9], [1, 2, 3, 4, 5]], np.int32)
    job = prepare(
        denoiser, methods.llada(denoiser), (jnp.asarray(rows), jnp.array([2, 5])), Settings(), key=0,
        max_new_tokens=4,
    )  # fmt: skip
    tokens = np.asarray(start(job).tokens)
    assert tokens[0, :2].tolist() == [1, 2] and tokens[1, :5].tolist() == [1, 2, 3, 4, 5]
    assert np.all(tokens[0, 2:] == denoiser.mask_token) and np.all(tokens[1, 5:] == denoiser.mask_token)


def test_a_control_that_fills_asks_for_what_to_fill_with():
    denoiser = toys.frozen(np.full(40, 0.5))
    fill = Control(lambda params, state, canvas, proposal, view, wide: (ControlAction(fill=canvas.passes == 1), state))
    assert "create it with wide=True" in refused(denoiser, methods.llada(denoiser).replace(control=fill))
