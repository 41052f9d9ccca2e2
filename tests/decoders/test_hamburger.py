"""The card's tests of HAMburger (drafters, B8), its training, and its draft head."""

from __future__ import annotations

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_runs import random_params
from heads import layer_of, tiny_head
from rules import takes_all
from toy import chi_square, markov, pairs_after, tiny_llama

from specjax import UsageError, decoders, drafters, trees
from specjax.models.heads.blocks import bind
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.hamburger import HamburgerConfig, Merge, hamburger_head
from specjax.models.heads.kinds import init_head
from specjax.training.data.segments import score_tokens, split_by_entropy
from specjax.training.methods.hamburger import compute_logits, compute_losses, to_macro_steps, train_hamburger

NEW = 12


@functools.cache
def lesson():
    """Return prompts with the base model's continuation, int32[B, T], and the lengths of both."""
    texts = [prompt + answer for prompt, answer in zip(depths.PROMPTS, greedy(), strict=True)]
    size = max(map(len, texts))
    tokens = jnp.asarray([text + [0] * (size - len(text)) for text in texts])
    return tokens, *(jnp.asarray([*map(len, rows)]) for rows in (depths.PROMPTS, texts))


@functools.cache
def greedy():
    return depths.texts(tiny_llama(), max_new_tokens=NEW)


def test_segments_of_the_cards_entropies():
    starts = split_by_entropy(jnp.asarray([[1.0, 0.2, 0.4, 0.01, 0.02, 0.03, 2.0]]))
    assert np.diff([*np.flatnonzero(starts[0]), 7]).tolist() == [2, 4, 1]
    # The largest entropy of a segment is that of all of it, not of its first token.
    starts = split_by_entropy(jnp.asarray([[0.04, 0.049, 0.0147, 0.2]]), threshold=0.05)
    assert np.diff([*np.flatnonzero(starts[0]), 4]).tolist() == [3, 1]


def test_positions_of_the_cards_segments():
    """Check a prompt of P = 3 tokens and segments of 2, 4, 1: positions P - 1, P + 1, P + 5, P + 6."""
    starts = jnp.asarray([[1, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1]], bool)
    macro = to_macro_steps(jnp.arange(11)[None] + 50, jnp.array([10]), starts, 4)
    assert macro.last[0, 2:6].tolist() == [2, 4, 8, 9]
    assert macro.size[0].tolist() == [1, 1, 1, 2, 4, 1, 0, 0, 0, 0, 0]
    assert macro.tokens[0, 4].tolist() == [55, 56, 57, 58]


def test_merging():
    config = HamburgerConfig(layer_of(tiny_llama()), (1, 2), merge_heads=2)
    embedded = jax.random.normal(jax.random.key(0), (5, 4, 32))
    count = jnp.array([1, 2, 3, 4, 1])
    mean = np.asarray([embedded[i, :n].mean(0) for i, n in enumerate(count)])
    merge = lambda params, x: bind(Merge, config)(params)(x, count)
    params = random_params("hamburger", config)["merge"]
    idle = params | {"o": {"weight": np.zeros((32, 32), np.float32)}}
    np.testing.assert_allclose(merge(idle, embedded), mean, atol=1e-6)
    merged = merge(params, embedded)
    np.testing.assert_array_equal(merged[jnp.array([0, 4])], embedded[jnp.array([0, 4]), 0])
    assert not np.allclose(merged[1:4], mean[1:4], atol=0.1)
    np.testing.assert_allclose(merge(params, embedded.at[1, 2:].set(9.0))[1], merged[1], atol=1e-6)
    swapped = merge(params, embedded.at[3].set(embedded[3, ::-1]))
    assert not np.allclose(swapped[3], merged[3])  # the order counts


@functools.cache
def trained():
    """Return pairs of tokens, segments of two."""
    tokens, prompt, length = lesson()
    config = HamburgerConfig(layer_of(tiny_llama()), (1, 2), merge_heads=2)
    head = init_head("hamburger", config, jax.random.key(1))
    behind = jnp.arange(tokens.shape[1]) - prompt[:, None]
    starts = (behind < 0) | (behind % 2 == 0)
    rates = {"steps": 120, "base_rate": 3e-3, "learning_rate": 1e-2}
    return *train_hamburger(tiny_llama(), head, tokens, prompt, length, starts=starts, **rates), starts


def test_trained_parts_write_two_tokens_a_pass():
    base, head, losses, _ = trained()
    assert losses[-1] < 0.05 < 1 < losses[0]
    result = decoders.hamburger(base, head, depths.PROMPTS, max_new_tokens=NEW, confidence=0.5)
    assert result.to_lists() == greedy()
    assert result.stats.target_passes.tolist() == [NEW // 2] * 3


def test_the_loss_is_that_of_the_steps_that_decoding_takes():
    """Compute the loss for segments of one token: only the base model's first tokens count."""
    tokens, prompt, length = lesson()
    head = tiny_head("hamburger", tiny_llama())
    alone = to_macro_steps(tokens, length, jnp.ones(tokens.shape, bool), 4)
    ours = compute_losses(tiny_llama().model, head.head, tiny_llama().params, head.params, alone, prompt).tokens
    place = jnp.arange(tokens.shape[1])
    counts = (place >= prompt[:, None]) & (place < length[:, None])
    surprise = -jnp.log(score_tokens(tiny_llama(), tokens)[0])
    np.testing.assert_allclose(ours, jnp.sum(jnp.where(counts, surprise, 0)) / counts.sum(), rtol=1e-4)


@functools.cache
def of_four():
    """Return a text in whole segments, as decoded, and in macro steps, as trained."""
    head, prompt = tiny_head("hamburger", tiny_llama()), depths.PROMPTS[0]
    result = decoders.hamburger(tiny_llama(), head, [prompt], max_new_tokens=NEW, confidence=0.0)
    assert result.stats.target_passes.tolist() == [NEW // 4]
    tokens = jnp.asarray([prompt + result.to_lists()[0]])
    behind = jnp.arange(tokens.shape[1])[None] - len(prompt)
    return head, to_macro_steps(tokens, jnp.array([tokens.shape[1]]), (behind < 0) | (behind % 4 == 0), 4)


def names(macro):
    """Return the most likely tokens of the last three segments, int32[3, 4]."""
    head, target = of_four()[0], tiny_llama()
    logits = jax.jit(functools.partial(compute_logits, target.model, head.head))(target.params, head.params, macro)
    begin, end = len(depths.PROMPTS[0]) - 1, len(depths.PROMPTS[0]) + 2
    best = jnp.concatenate([logits.first[:, :, None], logits.later], 2)[0, begin:end]
    return np.asarray(jnp.argmax(best, -1)), np.asarray(macro.tokens[0, begin + 1 : end + 1])


def test_one_reading_is_the_decoding():
    """Check that other caches differ: entries at the position of their first token, or of other merged tokens."""
    _, macro = of_four()
    np.testing.assert_array_equal(*names(macro))
    for mutant in (
        macro._replace(last=macro.last - macro.size + 1),
        macro._replace(size=jnp.minimum(macro.size, 3)),
        macro._replace(last=jnp.arange(macro.last.shape[1])[None]),
    ):
        ours, text = names(mutant)
        assert (ours != text).any()


def test_one_token_a_segment_is_the_base():
    """Compare texts at any temperature, and with an eos."""
    eos = greedy()[0][4]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9}):
        ours = decoders.hamburger(
            tiny_llama(), tiny_head("hamburger", tiny_llama()), depths.PROMPTS, max_new_tokens=NEW, confidence=1.1,
            eos=eos, **options,
        )  # fmt: skip
        assert ours.to_lists() == depths.texts(tiny_llama(), max_new_tokens=NEW, key=0, eos=eos, **options)


def drafter_for(target, taps=(1, 3)):
    config = HamburgerConfig(layer_of(target), taps, merge_heads=2)
    return drafters.head_drafter(
        DraftHead(hamburger_head(config), random_params("hamburger", config)),
        2,
        stop=trees.stops.drafter_confidence(0.0),
    )


@pytest.mark.parametrize("rule", ["exact", "a mutant"])
def test_sampled_text_of_the_verified_form_has_the_joint_law_of_the_target(rule):
    counts, law, _ = pairs_after(drafter_for, verifier=None if rule == "exact" else takes_all)
    assert (chi_square(counts, law) > 1e-3) == (rule == "exact")


def test_what_does_not_fit():
    head = tiny_head("hamburger", tiny_llama())
    run = lambda target, head: decoders.hamburger(target, head, [[1, 2]], max_new_tokens=2)
    with pytest.raises(UsageError, match="hamburger needs a head of kind hamburger, not medusa"):
        run(tiny_llama(), tiny_head("medusa", tiny_llama()))
    with pytest.raises(UsageError, match="llama cannot read segments: it has windows"):
        run(tiny_llama(window=8), head)
    with pytest.raises(UsageError, match="the head reads layer 3, but markov has 2 layers"):
        run(markov(), DraftHead(hamburger_head(HamburgerConfig(layer_of(markov()), (1, 3))), {}))
    with pytest.raises(UsageError, match="the head reads hidden states of width 32, but narrow has 16"):
        run(tiny_llama(width=16, num_heads=2, name="narrow"), head)


def test_segments_that_cannot_be_learnt():
    tokens, prompt, length = lesson()
    head = tiny_head("hamburger", tiny_llama())
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for starts in (place % 5 == 0, place % 4 == 1):
        with pytest.raises(UsageError, match="no segment may exceed the 4 tokens that the head merges"):
            train_hamburger(tiny_llama(), head, tokens, prompt, length, starts=starts)
    with pytest.raises(UsageError, match="steps must be a whole number of at least 1, not 0"):
        train_hamburger(tiny_llama(), head, tokens, prompt, length, steps=0)
