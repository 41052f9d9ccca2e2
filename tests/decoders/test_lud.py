"""The card's tests of Lexical Unit Decoding (drafters, B9), its training examples, and its drafter."""

from __future__ import annotations

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import UsageError, decode, decoders, drafters
from specjax.models.heads.ppd import prompts_of_token
from specjax.training.data.segments import split_by_confidence
from specjax.training.methods.lexical_units import hide_unit, train_lud, unit_loss

NEW, PAD, SLOTS = 12, 63, 3


@functools.cache
def greedy():
    return depths.texts(tiny_llama(), max_new_tokens=NEW)


@functools.cache
def lesson():
    texts = [prompt + answer for prompt, answer in zip(depths.PROMPTS, greedy(), strict=True)]
    assert not any(PAD in text for text in texts)
    size = max(map(len, texts))
    return jnp.asarray([text + [0] * (size - len(text)) for text in texts]), jnp.asarray([*map(len, texts)])


def test_units_of_the_cards_confidences():
    starts = split_by_confidence(jnp.asarray([[0.5, 0.95, 0.97, 0.6, 0.99]]), threshold=0.9)
    assert np.diff([*np.flatnonzero(starts[0]), 5]).tolist() == [3, 2]
    longer = split_by_confidence(jnp.full((1, 5), 0.95), max_length=2)
    assert np.flatnonzero(longer[0]).tolist() == [0, 2, 4]


def test_a_lesson_hides_one_unit_but_its_first_token():
    starts = jnp.asarray([[1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 0]], bool)
    tokens, length = jnp.arange(14).reshape(2, 7), jnp.array([7, 6])
    hidden_units = {
        tuple(np.flatnonzero(np.asarray(row == PAD)).tolist())
        for seed in range(20)
        for row in hide_unit(jax.random.key(seed), tokens, length, starts, PAD)
    }
    assert hidden_units == {(1, 2), (4,), (6,), ()}  # of the second text nothing: its last token is not its own
    inputs = hide_unit(jax.random.key(0), tokens, length, starts, PAD)
    assert (inputs[1] == tokens[1]).all()


def test_slots_change_nothing_before_them():
    target = tiny_llama()
    tokens = jnp.asarray([[3, 1, 4, PAD, PAD]])
    model, params = target.model, target.params
    forward = lambda tokens: model.forward(
        params, tokens, model.init_cache(params, None, 1, 0), positions=jnp.arange(tokens.shape[1])[None],
        mask=jnp.tril(jnp.ones((1, *[tokens.shape[1]] * 2), bool)),
    )[0].logits  # fmt: skip
    np.testing.assert_allclose(forward(tokens)[:, :3], forward(tokens[:, :3]), atol=1e-5)


@functools.cache
def tuned():
    """Train with units of the maximum length."""
    return train_lud(
        tiny_llama(), *lesson(), pad_token=PAD, key=jax.random.key(0), slots=SLOTS, threshold=0.0, steps=150,
        learning_rate=1e-2,
    )  # fmt: skip


def run(target, **options):
    options = {"max_new_tokens": NEW, "pad_token": PAD, "slots": SLOTS, "threshold": 0.5} | options
    return decoders.lud(target, depths.PROMPTS, **options)


def test_a_tuned_model_fills_several_places_at_once():
    target, losses = tuned()
    assert losses[-1] < 0.25 * losses[0]
    result = run(target)
    assert result.to_lists() == greedy()
    assert result.stats.target_passes.sum() <= 3 * NEW / 2


def test_without_slots_or_above_any_threshold_it_is_plain_decoding():
    eos = greedy()[0][4]
    plain = depths.texts(tiny_llama(), max_new_tokens=NEW, eos=eos)
    for options in ({"slots": 0}, {"threshold": 1.1}):
        assert run(tiny_llama(), eos=eos, **options).to_lists() == plain
    assert run(tiny_llama(), threshold=0.0).to_lists() != greedy()
    assert run(tiny_llama(), threshold=0.0, repeats=99).stats.target_passes.tolist() == [NEW // (SLOTS + 1)] * 3


def test_a_token_is_not_repeated_for_ever():
    """Use a model that always predicts one token with confidence: a pass accepts `repeats` more."""
    same = jnp.tile(jnp.array([[0.02, 0.96, 0.02]]), (3, 1))
    passes = {
        repeats: decoders.lud(
            markov(np.asarray(same)), [[1]], max_new_tokens=12, pad_token=2, slots=3, repeats=repeats
        ).stats.target_passes.tolist()
        for repeats in (0, 1, 2, 9)
    }
    assert passes == {0: [12], 1: [12], 2: [6], 9: [3]}


def test_the_verified_form_has_the_text_of_the_tuned_model():
    target, _ = tuned()
    head = prompts_of_token(target, PAD, SLOTS)
    drafter = drafters.ppd(head, 8, accuracy=((0.9,), (0.9,), (0.9,)), costs=(1.0,) * 8)
    result = decode(target, drafter, depths.PROMPTS, key=0, max_new_tokens=NEW)
    plain = decode(target, "autoregressive", depths.PROMPTS, key=0, max_new_tokens=NEW)
    assert result.to_lists() == plain.to_lists()
    assert result.stats.target_passes.sum() < 0.7 * 3 * NEW


def test_hidden_places_are_what_is_learnt():
    """Train on hidden positions: their loss falls; without hidden tokens it is the usual loss of a language model."""
    target, _ = tuned()
    tokens, length = lesson()
    starts = split_by_confidence(jnp.ones(tokens.shape), max_length=SLOTS + 1)
    hidden = hide_unit(jax.random.key(9), tokens, length, starts, PAD)
    of = lambda params, inputs: float(unit_loss(target.model, params, inputs, tokens, length))
    assert of(target.params, hidden) < 0.3 * of(tiny_llama().params, hidden)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pad_token": 64}, "pad_token must be a token of the model, below 64, not 64"),
        ({"slots": -1}, "slots must be a whole number from 0 to 2048, not -1"),
        ({"slots": 1.5}, "slots must be a whole number from 0 to 2048, not 1.5"),
        ({"repeats": 0.5}, "repeats must be a whole number of at least 0, not 0.5"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UsageError, match=words):
        run(tiny_llama(), **options)


def test_a_seed_will_do_and_half_a_step_will_not():
    settings = {"pad_token": PAD, "key": 0, "slots": SLOTS, "threshold": 0.0, "steps": 150, "learning_rate": 1e-2}
    np.testing.assert_array_equal(train_lud(tiny_llama(), *lesson(), **settings)[1], tuned()[1])
    for wrong in ({"steps": 1.5}, {"slots": 1.5}):
        with pytest.raises(UsageError, match=r"(steps|slots) must be a whole number of at least ., not 1\.5"):
            train_lud(tiny_llama(), *lesson(), **settings | wrong)
    tokens, length = lesson()
    for wrong, length_of, words in (
        ({"threshold": float("nan")}, length, "threshold must be from 0 to 1"),
        ({"steps": 0}, length, "steps must be a whole number of at least 1"),
        ({}, jnp.ones_like(length), "no text has two tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            train_lud(tiny_llama(), tokens, length_of, **settings | wrong)
