"""Trials by hand, and plain sampling where there is one."""

import jax.numpy as jnp
import pytest
import texts as lib

from specjax import UsageError, drafters, processors
from specjax.collaborate import segments
from specjax.collaborate.methods.cntp import best_trial, number_of_trials
from specjax.numerics.sampling import fold_in

LARGE = lib.history(1)


def test_numbers_of_trials_by_hand():
    nats = jnp.array([0.755, 0.01, 0.0, 1.5, 9.0])
    assert number_of_trials(nats, 1, 10).tolist() == [5, 1, 1, 10, 10]


def test_the_lowest_mean_wins():
    nll, count = jnp.array([[2.0, 2.2, 0.1], [3.0, 1.0, 0.0]]), jnp.array([[2, 2, 1], [3, 1, 0]])
    tried = jnp.array([[True, True, False], [True, True, True]])
    assert best_trial(nll, count, tried).tolist() == [0, 0]


def test_one_trial_is_plain_sampling():
    result = lib.run("cntp", n_max=1)
    assert result.to_lists() == lib.plain(LARGE, temperature=0.8, top_p=0.9)
    assert result.log.rounds.tolist() == [0, 0, 0] and result.log.tokens.tolist() == [12, 12, 12]


def test_a_round_keeps_the_likeliest_trial():
    """The first round, with the trials as plain decoding draws them, and the next from where it ended."""
    result = lib.run("cntp", n_min=4)
    for row, prompt in enumerate(lib.PROMPTS):
        text, done = list(prompt), result.to_lists()[row]
        while len(text) < len(prompt) + 12:
            left = min(5, len(prompt) + 12 - len(text))
            key = fold_in(lib.KEYS[row], len(text))
            best = None
            for trial in range(4):
                _, tokens, logprobs = sampled(text, fold_in(key, trial), left)
                mean = sum(logprobs) / len(logprobs)
                best = max(best or (-9e9, []), (mean, tokens), key=lambda pair: pair[0])
            text += best[1]
        assert text[len(prompt) :] == done
    assert (result.log.trials == 4 * result.log.rounds).all()


def sampled(text, key, count):
    from specjax import decode

    # one shape for all: three rows, and 12 tokens
    result = decode(
        LARGE, "autoregressive", [text] * 3, key=jnp.stack([key] * 3), max_new_tokens=12, temperature=0.8, top_p=0.9,
        logprobs=True,
    )  # fmt: skip
    tokens, logprobs = result.to_lists()[0][:count], result.logprobs[0].tolist()
    end = next((n + 1 for n, token in enumerate(tokens) if token in lib.ENDS), count)
    return text, tokens[:end], logprobs[:end]


def test_a_trial_may_be_one_token():
    result = lib.run("cntp", n_min=4, punctuation=segments.after_any(range(lib.VOCAB), lib.VOCAB))
    assert result.log.rounds.tolist() == [12, 12, 12] and result.log.tokens.tolist() == [48, 48, 48]


def test_processors_shape_what_is_unsure():
    result = lib.run("cntp", processors=[processors.bias({7: 100.0})])
    assert result.log.rounds.tolist() == [0, 0, 0] and all(set(row) == {7} for row in result.to_lists())


@pytest.mark.exhaustive
def test_with_drafts_the_text_is_the_same():
    drafted = lib.run("cntp", drafter=drafters.two_model(lib.alike(1), 3), sampling="coupled")
    assert drafted.to_lists() == lib.run("cntp").to_lists()


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="n_max must be at least n_min, 3, not 2"):
        lib.run("cntp", n_min=3, n_max=2)
    with pytest.raises(UsageError, match="temperature must be above 0"):
        lib.run("cntp", temperature=0.0)
