"""The law of the particles, by enumeration."""

import itertools

import numpy as np
import pytest
import texts as lib
from tiers import exhaustive
from toy import markov

from specjax import UsageError, decode
from specjax.collaborate.methods.power_smc import power_smc

ROWS = np.array([[0.9, 0.1], [0.5, 0.5]])
COIN = markov(ROWS.astype(np.float32))  # the card's: after b each of the first two tokens
N, PROMPTS = 3_000, [[1], [0, 1], [1, 1]]


def law(count, alpha):
    """Text to p^alpha, not normalised, behind b."""
    texts = {}
    for text in itertools.product((0, 1), repeat=count):
        p, last = 1.0, 1
        for token in text:
            p, last = p * ROWS[last, token], token
        texts[text] = p**alpha
    return texts


def found(sample, count):
    """The weighted law of all particles, and that of each prompt's."""
    w = np.exp(np.asarray(sample.logw, np.float64))
    w /= w.sum(1, keepdims=True)
    number = np.asarray(sample.tokens)[:, :, :count] @ (1 << np.arange(count)[::-1])
    return np.bincount(number.ravel(), w.ravel(), 1 << count) / len(w)


def many(**options):
    settings = {"key": 0, "max_new_tokens": 2, "alpha": 2.0, "particles": N, "block": 1, "ramp": 1} | options
    return power_smc(COIN, PROMPTS, **settings).log


@pytest.mark.parametrize("ramp, n, tolerance", [(1, N, 0.02), (2, N, 0.02), exhaustive(3, 67_000, 0.01)])
def test_the_law_is_the_power_whatever_the_ramp(ramp, n, tolerance):
    wanted = law(2, 2.0)
    total = sum(wanted.values())
    np.testing.assert_allclose([wanted[t] / total for t in sorted(wanted)], [0.6136, 0.0076, 0.1894, 0.1894], atol=5e-5)
    sample = many(ramp=ramp, kappa=1.0, particles=n)
    assert np.abs(found(sample, 2) - [wanted[t] / total for t in sorted(wanted)]).sum() / 2 < tolerance
    assert (sample.resampled > 0).all()
    np.testing.assert_allclose(np.exp(sample.log_z), total, rtol=0.04)


def test_weights_without_resampling_by_hand():
    """log sum_v p^2: .5 for each first token, then .82 behind a and .5 behind b."""
    sample = many(kappa=0.0)
    first = np.asarray(sample.tokens)[:, :, 0]
    np.testing.assert_allclose(np.exp(sample.logw), np.where(first == 0, 0.5 * 0.82, 0.25), rtol=1e-5)
    w = np.exp(np.asarray(sample.logw))
    assert abs(w[first == 0].sum() / w.sum() - 0.6212) < 0.02  # where temperature 1/2 alone gives .5
    spread = w.std() / np.sqrt(w.size)
    assert abs(w.mean() - 0.33) < 3 * spread
    assert sample.resampled.tolist() == [0, 0, 0]


def test_particles_that_end_early_are_brought_up_to_alpha():
    """b ends a text: then b, ab and aab are texts, and the ramp never comes to its end."""
    sample = many(eos=1, ramp=50, max_new_tokens=2, kappa=0.0)
    tokens, w = np.asarray(sample.tokens), np.exp(np.asarray(sample.logw))
    ended = tokens[:, :, 0] == 1
    assert abs(w[ended].sum() / w.size - 0.5**2) < 0.02  # the estimate of p(b)^2
    aa = (tokens[:, :, 0] == 0) & (tokens[:, :, 1] == 0)
    assert abs(w[aa].sum() / w.size - 0.45**2) < 0.02


START, END, A, B, LENGTH = 15, 0, 1, 6, 8


def fork_in_the_road():
    """Two beginnings with p = 1/2: A, two fair coins and the end, or B, two fixed tokens, three fair coins and the end.

    p^4 has A 8 times as often. After three tokens B is far ahead, and A ends while B goes on.
    """
    table = np.zeros((16, 16))
    table[START, [A, B]] = 0.5
    for row, columns in ((A, (2, 3)), (2, (4, 5)), (3, (4, 5)), (8, (9, 10)), (9, (11, 12)), (10, (11, 12))):
        table[row, columns] = 0.5
    table[11, [13, 14]] = table[12, [13, 14]] = 0.5
    table[B, 7] = table[7, 8] = 1.0
    table[[END, 4, 5, 13, 14], END] = 1.0
    return table


def exact_law(table, alpha):
    law = {}

    def go(text, p):
        if text[-1] == END:
            law[tuple(text[1:])] = p**alpha
        else:
            for token in np.flatnonzero(table[text[-1]]):
                go([*text, int(token)], p * table[text[-1], token])

    go([START], 1.0)
    return {text: p / sum(law.values()) for text, p in law.items()}


def numpy_law(table, alpha, n, ramp, form, times, seed=0):
    """The mean weighted law of n particles in float64. In the form "early" a particle pays alpha when it ends."""
    rng, law = np.random.default_rng(seed), {}
    q = table**alpha / (table**alpha).sum(1, keepdims=True)
    for _ in range(times):
        texts, log_p, log_q = [[START] for _ in range(n)], np.zeros(n), np.zeros(n)
        logw, previous = np.zeros(n), np.zeros(n)
        for t in range(1, LENGTH + 1):
            for i, text in enumerate(texts):
                if text[-1] != END:
                    token = int(rng.choice(16, p=q[text[-1]]))
                    log_p[i] += np.log(table[text[-1], token])
                    log_q[i] += np.log(q[text[-1], token])
                    text.append(token)
            ended = np.array([text[-1] == END for text in texts])
            level = 1 + (alpha - 1) * min(t / ramp, 1.0)
            a_t = np.where(ended if form == "early" else ended.all(), alpha, level)
            current = a_t * log_p - log_q
            logw, previous = logw + current - previous, current
            w = np.exp(logw - logw.max()) / np.exp(logw - logw.max()).sum()
            if ended.all():
                break
            if 1 / (w**2).sum() < n / 2:
                ancestors = np.minimum(np.searchsorted(np.cumsum(w), (rng.random() + np.arange(n)) / n), n - 1)
                texts = [list(texts[i]) for i in ancestors]
                log_p, log_q, previous, logw = log_p[ancestors], log_q[ancestors], previous[ancestors], np.zeros(n)
        for text, weight in zip(texts, w, strict=True):
            law[tuple(text[1:])] = law.get(tuple(text[1:]), 0.0) + weight / times
    return law


def distance(law, other):
    return sum(abs(law.get(text, 0) - other.get(text, 0)) for text in {*law, *other}) / 2


def test_the_ramp_beats_none_where_particles_end_at_different_times():
    """Ended particles wait at the common exponent. A ramp longer than the text is as long as the text."""
    table = fork_in_the_road()
    wanted, target = exact_law(table, 4.0), markov(table.astype(np.float32))

    def ours(ramp, prompts=600):
        settings = {"max_new_tokens": LENGTH, "eos": END, "particles": 16, "block": 1, "ramp": ramp}
        sample = power_smc(target, [[START]] * prompts, key=0, **settings).log
        law = {}
        w = np.exp(np.asarray(sample.logw, np.float64))
        w /= w.sum(1, keepdims=True) * prompts
        for text, weight in zip(np.asarray(sample.tokens).reshape(-1, sample.tokens.shape[2]), w.ravel(), strict=True):
            text = tuple(text[text >= 0].tolist())
            law[text] = law.get(text, 0.0) + weight
        return law

    ramped, capped, none = ours(8), ours(400), ours(1)
    assert ramped == capped and distance(ramped, wanted) < 0.04 < 0.12 < distance(none, wanted)
    authors, early = (numpy_law(table, 4.0, 16, 8, form, 150) for form in ("common", "early"))
    assert distance(authors, wanted) < 0.07 < 0.15 < distance(early, wanted)  # the test can fail
    assert distance(ramped, authors) < 0.07 < 0.15 < distance(ramped, early)


def test_a_power_of_one_is_plain_sampling():
    result = lib.run("power_smc", alpha=1.0)
    wanted = decode(
        lib.history(1), "autoregressive", lib.PROMPTS, key=lib.KEYS, max_new_tokens=12, temperature=1.0, eos=5,
        samples_per_prompt=4,
    ).tokens  # fmt: skip
    np.testing.assert_allclose(result.log.logw, 0, atol=2e-5)
    assert (np.asarray(result.log.tokens).reshape(12, -1)[:, :12] == wanted).all()


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r"alpha must be at least 1, not 0\.5"):
        many(alpha=0.5)
    with pytest.raises(UsageError, match="kappa must be from 0 to 1, not 2"):
        many(kappa=2)
    with pytest.raises(UsageError, match="temperature is 1 / alpha; leave it out"):
        many(temperature=0.5)
    with pytest.raises(UsageError, match=r"top_p leaves no mass where p\^alpha has some"):
        many(top_p=0.9)
    with pytest.raises(UsageError, match="alpha must be finite, not inf"):
        many(alpha=np.inf)
