"""Edits."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.llada21 import State, edits
from specjax.diffusion.rules import threshold


def one_pass(rule, words, sure, opened, tokens, *, post=0, entered=False, revisable=None):
    view = hand_made.window(
        [opened], tokens=[tokens], entered=entered, revisable=None if revisable is None else [revisable]
    )
    state = State(jnp.array([post]), jnp.array([False]))
    proposal = hand_made.proposal([sure], [words], narrow=True)
    take, _, state = rule.select((), state, proposal, view, jnp.ones(1, int))
    return hand_made.places(take)[0], bool(rule.settled((), state)[0]), int(state.post[0])


OPEN, FULL = [True, True, False, False], [False] * 4


def test_sure_masks_and_surer_changes():
    rule, words = edits(0.8, 0.7, 3), [1, 2, 3, 4]
    run = lambda sure, opened=OPEN, tokens=(0, 0, 9, 4), **more: one_pass(
        rule, words, sure, opened, list(tokens), **more
    )
    assert run([0.9, 0.5, 0.75, 0.9]) == ([0, 2], False, 0)  # the last column has its word already
    assert run([0.4, 0.5, 0.6, 0.9]) == ([1], False, 0)  # at least one
    assert run([0.9, 0.9, 0.6, 0.9]) == ([0, 1], False, 0)  # full now, and looked at once more
    assert run([0.9, 0.9, 0.75, 0.9], revisable=[False] * 4) == ([0, 1], False, 0)  # the prompt is not changed
    assert run([0.9] * 4, FULL, (1, 2, 9, 4)) == ([2], False, 1)
    assert run([0.9] * 4, FULL, (1, 2, 3, 4)) == ([], True, 1)
    assert run([0.9] * 4, FULL, (1, 2, 9, 4), post=2) == ([2], True, 3)
    assert run([0.9] * 4, FULL, (1, 2, 9, 4), post=7, entered=True) == ([2], False, 1)


@pytest.mark.parametrize("denoiser", [toys.full(), toys.causal()])
def test_without_edits_it_is_the_threshold_rule(denoiser):
    settings, prompts = {"key": 1, "max_new_tokens": 14}, [[1, 2, 3], [4, 5, 6, 7, 8]]
    method = methods.llada21(denoiser, block=4, tau=0.04, edit_tau=1.0)
    ours = specjax.denoise(denoiser, method, prompts, **settings)
    base = method.replace(rule=threshold(0.04))
    plain = specjax.denoise(denoiser, base, prompts, **settings)
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    assert 4 <= ours.stats.target_passes[0] < 14


def test_a_word_that_was_wrong_is_corrected_before_anything_behind_it_begins():
    """The coupled pairs must differ: decided at once they are often equal, and an edit parts them."""
    denoiser, prompts = toys.coupled(), [[2]] * 64
    settings = {"key": 0, "max_new_tokens": 4, "temperature": 1.0}
    run = lambda method: specjax.denoise(denoiser, method, prompts, **settings)
    differ = lambda result: np.mean(np.asarray(result.tokens[:, 0::2]) != np.asarray(result.tokens[:, 1::2]))
    at_once = run(methods.llada21(denoiser, block=2, tau=0.1, edit_tau=1.0))
    assert 0.3 < differ(at_once) < 0.7 and at_once.stats.target_passes.tolist() == [2] * 64
    edited = run(methods.llada21(denoiser, block=2, tau=0.1, edit_tau=0.9, post_steps=1))
    changed = np.asarray(at_once.tokens[:, :2]) != np.asarray(edited.tokens[:, :2])
    equal = np.asarray(at_once.tokens[:, 0]) == np.asarray(at_once.tokens[:, 1])
    assert (changed == equal[:, None]).all()  # both of an equal pair see the other and change
    assert edited.stats.target_passes.tolist() == [4] * 64 and edited.decided_at[0].tolist() == [0, 0, 2, 2]


def test_what_it_refuses():
    with pytest.raises(UsageError, match="post_steps"):
        methods.llada21(toys.full(), post_steps=-1)
