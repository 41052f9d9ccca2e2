"""Votes, pruning and the fit by hand, and the samples of `decode`."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError, decode
from specjax.collaborate.methods.rpc import AnswerMixture, fit, keep, log_likelihood, vote

ALL = np.ones(9, bool)


def test_votes_by_hand():
    equal, texts = np.full(5, 0.4), [(1,), (2,), (3,), (1,), (1,)]
    assert vote(["a", "b", "b", "a", "a"], texts, equal, ALL) == 1  # the majority of distinct samples
    assert vote(["a", "a", "b", "b"], [(1,), (1,), (2,), (3,)], np.array([0.5, 0.5, 0.3, 0.3]), ALL) == 2
    assert vote(["a", "a", "b", "b"], [(1,), (4,), (2,), (3,)], np.array([0.5, 0.5, 0.3, 0.3]), ALL) == 0
    assert vote(["a", "b"], [(1,), (2,)], np.array([0.5, 0.3]), np.array([False, True])) == 1
    assert vote([None, None], [(1,), (2,)], np.array([0.5, 0.3]), ALL) is None


def test_the_fit_is_as_likely_as_the_truth():
    rng = np.random.default_rng(0)
    first = rng.random(5000) < 0.5
    p = np.where(first, 0.2 * rng.weibull(2.0, 5000), 0.8 * rng.weibull(6.0, 5000)).astype(np.float32)
    truth = AnswerMixture(jnp.float32(0.5), jnp.array([2.0, 6.0]), jnp.array([0.2, 0.8]))
    assert log_likelihood(fit(p), p) >= log_likelihood(truth, p) - 2e-3
    mask = keep(p)
    assert mask[p >= p.mean()].all()  # nothing above the mean is left out
    assert mask[first].mean() < 0.2 and mask[~first].mean() > 0.95


def test_it_votes_among_the_samples_of_decode():
    settings = {"max_new_tokens": 12, "temperature": 1.0, "eos": 5, "samples_per_prompt": 4, "logprobs": True}
    samples = decode(lib.history(1), "autoregressive", lib.PROMPTS, key=lib.KEYS, **settings)
    result, decoded = lib.run("rpc", prune=False), samples.to_lists()
    mean = np.exp(np.asarray(samples.logprobs).sum(1) / np.asarray(samples.lengths)).reshape(3, 4)
    np.testing.assert_allclose(result.log.probability, mean, rtol=1e-4)
    for row in range(3):
        texts = decoded[4 * row : 4 * row + 4]
        assert result.log.samples[row] == texts
        best = vote([lib.last_of(text) for text in texts], [tuple(text) for text in texts], mean[row], ALL)
        assert result.log.choices[row] == best and result.to_lists()[row] == texts[best]
    by_path = lib.run("rpc", prune=False, path=True)
    np.testing.assert_allclose(by_path.log.probability.ravel(), np.exp(np.asarray(samples.logprobs).sum(1)), rtol=1e-3)


def test_equal_probabilities_are_all_kept():
    """Whatever their mean is rounded to."""
    assert all(keep(np.full(count, p)).all() for count in (3, 7) for p in (0.1, 0.9999999))


def test_a_prompt_without_an_answer_does_not_lose_the_batch():
    undisturbed = lib.run("rpc", prune=False)
    texts = {tuple(text) for text in undisturbed.log.samples[1]}
    result = lib.run("rpc", prune=False, answer=lambda tokens: None if tuple(tokens) in texts else lib.last_of(tokens))
    assert result.to_lists() == [undisturbed.to_lists()[0], [], undisturbed.to_lists()[2]]
    assert list(result.failures) == [1] and result.log.choices[1] == -1
    assert result.summary(1)["different_answers"] == 0 and undisturbed.summary(1)["surviving_samples"] == 4


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="no sample has an answer; give more samples or max_new_tokens, in every row"):
        lib.run("rpc", answer=lambda tokens: None)
    with pytest.raises(UsageError, match="samples must be at least 1, not 0"):
        lib.run("rpc", samples=0)
    with pytest.raises(UsageError, match=r"samples must be a whole number below 2\^31, not 2\.5"):
        lib.run("rpc", samples=2.5)
