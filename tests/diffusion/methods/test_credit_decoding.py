"""Credits, against the numbers of a pass by hand and a loop of numpy."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.credit_decoding import credits
from specjax.diffusion.rules import threshold

TWO = np.log([[[0.6, 0.3, 0.1], [0.3, 0.6, 0.1]]])


def passes_of(score, sequence, opened=((True, True),), entered=(0,)):
    """The logits after each pass."""
    canvas = type("Canvas", (), {"tokens": jnp.zeros((1, 8))})
    state, out = score.init((), canvas, 2, 3), []
    for i, logits in enumerate(sequence):
        changed, state = score.transform(
            (), state, jnp.asarray(logits, jnp.float32), hand_made.window(opened, entered=i in entered)
        )
        out.append(changed)
    return out


def probabilities(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize("slots", [0, 4])
def test_credit_grows_towards_its_limit_and_takes_what_the_threshold_never_would(slots):
    changed = passes_of(credits(0.7, 0.8, 0.2, slots), [TWO] * 60)
    first = [float(probabilities(x)[0, 0, 0]) for x in changed]
    np.testing.assert_allclose(first[:4], [0.7018, 0.7467, 0.7721, 0.7883], atol=5e-5)
    assert first[-1] == pytest.approx(0.8321, abs=5e-5)
    limit = 0.6**0.2 / (1 - 0.8)
    assert first[-1] == pytest.approx(float(probabilities(TWO[0, 0] + [0.7 * np.log1p(limit), 0, 0])[0]), abs=1e-5)
    rule, view = threshold(0.75), hand_made.window([[True, False]])
    taken = [
        bool(rule.select((), (), hand_made.of_logits(x, narrow=True), view, jnp.ones(1, int))[0][0, 0])
        for x in changed[:3]
    ]
    at_least_one = [p >= 0.75 for p in first[:3]]
    assert at_least_one == [False, False, True] and taken == [True] * 3  # the last column is always taken


def test_alternating_words_both_carry_credit_as_a_loop_says():
    other = np.log([[[0.2, 0.7, 0.1], [0.5, 0.2, 0.3]]])
    sequence = [TWO, other] * 4
    credit, expected = np.zeros((2, 3)), []
    for logits in sequence:
        p = probabilities(logits[0])
        credit *= 0.8
        for column in range(2):
            best = p[column].argmax()
            credit[column, best] += p[column, best] ** 0.2
        expected.append(logits[0] + 0.7 * np.log1p(credit))
    for slots in (0, 2, 8):
        for ours, theirs in zip(passes_of(credits(0.7, 0.8, 0.2, slots), sequence), expected, strict=True):
            np.testing.assert_allclose(ours[0], theirs, atol=1e-5)
    assert (credit[0, :2] > 0.5).all()


def test_the_least_credited_word_makes_room_and_decided_columns_gain_nothing():
    rows = [np.log([[[a, b, c], [a, b, c]]]) for a, b, c in ((0.6, 0.3, 0.1), (0.6, 0.3, 0.1), (0.2, 0.5, 0.3))]
    one = passes_of(credits(1.0, 1.0, 1.0, 1), rows)
    np.testing.assert_allclose(one[2] - rows[2], [[[0, np.log1p(0.5), 0]] * 2], atol=1e-6)
    closed = passes_of(credits(1.0, 1.0, 1.0, 1), rows, opened=((True, False),))
    np.testing.assert_allclose(closed[2][0, 1], rows[2][0, 1], atol=1e-6)


@pytest.mark.parametrize("slots", [0, 4])
def test_credit_is_gone_in_the_next_block(slots):
    uninterrupted, again = (passes_of(credits(0.7, 0.8, 0.2, slots), [TWO] * 3, entered=e) for e in ((0,), (0, 2)))
    np.testing.assert_allclose(again[2], uninterrupted[0], atol=1e-6)
    assert np.abs(uninterrupted[2] - uninterrupted[0]).max() > 0.1


def test_without_alpha_it_is_the_threshold_rule():
    denoiser, settings = toys.full(), {"key": 1, "max_new_tokens": 12}
    ours = specjax.denoise(denoiser, methods.credit_decoding(denoiser, alpha=0.0, tau=0.03), [[1, 2, 3]], **settings)
    plain = specjax.denoise(denoiser, methods.fast_dllm(denoiser, tau=0.03), [[1, 2, 3]], **settings)
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    assert ours.stats.target_passes[0] < 12
    with pytest.raises(UsageError, match="slots"):
        methods.credit_decoding(denoiser, slots=-1)
