"""The law of the particles, by enumeration."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import exhaustive
from toy import markov

from specjax import UsageError, decode
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.methods.reward_smc import look_ahead, reward_smc
from specjax.engine.prepare import Settings

ROWS = np.array([[0.9, 0.1], [0.5, 0.5]])
COIN = markov(ROWS.astype(np.float32))
PSI = np.random.default_rng(3).uniform(0.1, 2.0, (3, 8))  # of prefixes of 1, 2, 3 tokens, read as binary numbers
N, PROMPTS = 2_000, [[1], [0, 1], [1, 1]]


def by_table(tokens, start, length, ended):
    """psi of the new tokens, read as a binary number: rows are those of prompts of 1, 2 and 2 tokens."""
    prompt = jnp.repeat(jnp.array([1, 2, 2]), len(length) // 3)
    place = jnp.arange(tokens.shape[1])
    new = (place >= prompt[:, None]) & (place < length[:, None])
    number = jnp.sum(jnp.where(new, tokens << jnp.clip(length[:, None] - 1 - place, 0, 3), 0), 1)
    return jnp.asarray(PSI, jnp.float32)[jnp.clip(length - prompt - 1, 0, 2), number]


def target_law():
    law = []
    for text in itertools.product((0, 1), repeat=3):
        p, last, number = 1.0, 1, 0
        for n, token in enumerate(text):
            number = 2 * number + token
            p, last = p * ROWS[last, token] * PSI[n, number], token
        law.append(p)
    return np.array(law)


def found(sample, count=3):
    w = np.exp(np.asarray(sample.logw, np.float64))
    w /= w.sum(1, keepdims=True)
    number = np.asarray(sample.tokens)[:, :, :count] @ (1 << np.arange(count)[::-1])
    return np.bincount(number.ravel(), w.ravel(), 1 << count) / len(w)


def many(reward=by_table, **options):
    settings = {"key": 0, "max_new_tokens": 3, "particles": N, "block": 1, "kappa": 1.0} | options
    return reward_smc(COIN, PROMPTS, reward=reward, **settings).log


@pytest.mark.parametrize("options", [
    {}, {"lookahead": 2, "move": False}, exhaustive({"move": False, "particles": 10_000}),
    exhaustive({"particles": 10_000}), exhaustive({"lookahead": 2, "particles": 10_000}),
    exhaustive({"temperature": 0.7, "move": False, "particles": 10_000}),
])  # fmt: skip
def test_the_law_is_the_target_whatever_the_variant(options):
    wanted = target_law()
    sample = many(**options)
    assert np.abs(found(sample) - wanted / wanted.sum()).sum() / 2 < (
        0.03 if options.get("particles", N) == N else 0.015
    )
    np.testing.assert_allclose(np.exp(sample.log_z), wanted.sum(), rtol=0.08)
    assert (sample.resampled > 0).all()


def one(tokens, start, length, ended):
    return jnp.ones(length.shape)


def test_each_prompt_has_its_own_temperature():
    """The weight of a text without rewards is p / q, with q at the temperature of its row."""
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)
    log = many(one, temperature=temperatures, particles=4, kappa=0.0, move=False)
    for prompt, temperature, rows, weights in zip(PROMPTS, temperatures, log.tokens, log.logw, strict=True):
        for row, weight in zip(np.asarray(rows)[:, :3], weights, strict=True):
            p = ROWS[[prompt[-1], *row[:-1]]]
            q = p ** (1 / temperature) / np.sum(p ** (1 / temperature), 1, keepdims=True)
            at = np.arange(3), row
            np.testing.assert_allclose(weight, np.sum(np.log(p[at]) - np.log(q[at])), atol=1e-5)


def test_a_look_ahead_weighs_the_first_token_by_what_comes():
    """The card's: .9 at the end behind a first a, .3 behind b, so that P(a) = .75 already after the first token."""

    def at_the_end(tokens, start, length, ended):
        first = tokens[jnp.arange(len(length)), jnp.full(len(length), 1)]
        return jnp.where(ended, jnp.where(first == 0, 0.9, 0.3), 1.0)

    job = lib.job_of([COIN], prompts=[[1], [1]], key=0, max_new_tokens=3, settings=Settings(temperature=1.0))
    text = texts.append(lib.begin(job), jnp.array([[0], [1]]), jnp.array([1, 1]), 0)
    v = look_ahead(job.writers, text, at_the_end, jnp.int32(1), 3, jnp.int32(0))
    np.testing.assert_allclose(jnp.exp(v), [0.9, 0.3], rtol=1e-5)


def test_without_rewards_it_is_plain_sampling():
    result = lib.run("reward_smc", reward=nothing)
    wanted = decode(
        lib.history(1), "autoregressive", lib.PROMPTS, key=lib.KEYS, max_new_tokens=12, temperature=1.0, eos=5,
        samples_per_prompt=4,
    ).tokens  # fmt: skip
    np.testing.assert_allclose(result.log.logw, 0, atol=2e-5)
    assert (np.asarray(result.log.tokens).reshape(12, -1)[:, :12] == wanted).all()


def nothing(tokens, start, length, ended):
    return jnp.ones(length.shape)


def never_a_number(tokens, start, length, ended):
    return jnp.where(jnp.arange(len(length)) == 5, jnp.nan, 1.0)


def always_zero(tokens, start, length, ended):
    return jnp.where(jnp.arange(len(length)) < 8, 1.0, 0.0)


def test_passes_of_moves_count_whether_they_are_taken_or_not():
    result = lib.run("reward_smc", kappa=1.0, eos=99)
    resampled = np.asarray(result.log.resampled)
    assert (result.passes[:, 0] == 4 * 12 + 4 * 4 * resampled).all() and resampled.any()


def a_column(tokens, start, length, ended):
    return jnp.ones((len(length), 1))


def ones(tokens, start, length, ended):
    return jnp.ones(len(length))


def all_zero(tokens, start, length, ended):
    return jnp.zeros(len(length))


@pytest.mark.parametrize(
    ("reward", "row", "reason"),
    [(never_a_number, 1, "a particle's weight is NaN; rewards must"), (always_zero, 2, "no particle is alive")],
)
def test_one_bad_prompt_does_not_lose_the_batch(reward, row, reason):
    undisturbed, result = (lib.run("reward_smc", reward=r, move=False) for r in (ones, reward))
    wanted = undisturbed.to_lists()
    wanted[row] = []
    assert result.to_lists() == wanted and list(result.failures) == [row] and reason in result.failures[row]
    assert result.finish_reasons[row] == "failed" and result.authors[row].tolist() == [-1] * 12


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r"no particle is alive, as every reward was 0; .*, in every row"):
        lib.run("reward_smc", reward=all_zero, move=False)
    with pytest.raises(UsageError, match=r"reward must return one number per row, \(12,\), not \(12, 1\)"):
        lib.run("reward_smc", reward=a_column, move=False)
    with pytest.raises(UsageError, match="temperature must be above 0"):
        lib.run("reward_smc", temperature=0)
    with pytest.raises(UsageError, match="top_k leaves no mass where the target law has some; leave it out"):
        lib.run("reward_smc", top_k=2)
    with pytest.raises(UsageError, match=r"block must be a whole number below 2\^31, not 2147483648"):
        lib.run("reward_smc", block=1 << 31)
