"""Draws under top-k and top-p without a threshold, against draws from the sorted reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from toy_logits import logits_of

from specjax.numerics import filtered_draws
from specjax.numerics.filtered_draws import draw_warped, expected_races
from specjax.numerics.sampling import noise
from specjax.types import Sampling

ROWS, VOCAB = 64, 300
FILTERS = {
    "top_p": {"top_p": 0.9}, "small top_p": {"top_p": 0.05}, "top_k": {"top_k": 5}, "all": {"top_p": 1.0, "top_k": 400},
    "both": {"top_k": 30, "top_p": 0.7}, "min_p": {"top_p": 0.95, "min_p": 0.1},
    "k and min_p": {"top_k": 9, "min_p": 0.1},
}  # fmt: skip


def kept_by_sorting(x, temperature, top_k=None, top_p=1.0, min_p=0.0):
    """The kept tokens of a row in float64, and the distance of top-p's mass from its threshold."""
    scaled = x.astype(np.float64) / temperature
    order = np.argsort(-x, kind="stable")
    rank = np.argsort(order)
    inside = rank < (top_k or len(x))
    p = np.where(inside, np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    mass_above = (np.cumsum(p[order]) - p[order])[rank]
    keep = inside & ((mass_above < top_p) | (top_p >= 1)) & (p >= min_p * p.max() * (1 - 1e-7))
    return keep, 1.0 if top_p >= 1 else np.abs(mass_above - top_p).min()


@functools.cache
def compiled():
    return jax.jit(draw_warped)


def sampling_of(temperature, top_k=None, top_p=None, min_p=None) -> Sampling:
    options = [(temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32), (min_p, jnp.float32)]
    return Sampling(*(None if value is None else jnp.asarray(value, dtype) for value, dtype in options))


@pytest.mark.parametrize("name", FILTERS)
def test_a_draw_is_the_winner_among_the_tokens_that_a_sort_keeps(name):
    options, keys = FILTERS[name], jax.random.split(jax.random.key(1), ROWS)
    gumbel = np.asarray(noise(keys, VOCAB), np.float64)
    compared = 0
    for kind in ("normal", "ties", "flat", "sharp", "banned"):
        x = logits_of(kind, ROWS, VOCAB)
        drawn = np.asarray(compiled()(keys, x, sampling_of(0.7, **options)))
        for row in range(ROWS):
            keep, distance = kept_by_sorting(x[row], 0.7, **options)
            scores = np.where(keep, x[row].astype(np.float64) / 0.7 + gumbel[row], -np.inf)
            best, second = np.sort(scores)[:-3:-1]
            if distance > 1e-6 and best - second > 1e-4:
                assert drawn[row] == scores.argmax(), (kind, row)
                compared += 1
    assert compared > 200


def test_settings_are_per_row_and_zero_is_greedy():
    x, keys = logits_of("normal", ROWS, VOCAB)[:3], jax.random.split(jax.random.key(2), 3)
    many = Sampling(jnp.array([0.0, 0.7, 2.0]), None, jnp.array([0.5, 1.0, 0.3]))
    drawn = compiled()(keys, x, many)
    assert drawn[0] == x[0].argmax()
    for row in range(3):
        alone = jax.tree.map(lambda value, row=row: value[row : row + 1], many)
        assert compiled()(keys[row : row + 1], x[row : row + 1], alone)[0] == drawn[row]


def test_rows_without_numbers_end():
    x = np.zeros((4, VOCAB), np.float32)
    x[0], x[1, 3], x[2] = np.nan, np.nan, -np.inf
    x[3, 7] = np.inf
    for name in ("top_p", "top_k", "both"):
        drawn = compiled()(jax.random.split(jax.random.key(0), 4), x, sampling_of(1.0, **FILTERS[name]))
        assert ((drawn >= 0) & (drawn < VOCAB)).all()


def p_value(few: int = 2_000) -> float:
    """Return the p-value of a chi-square test of draws under top-p against the exact distribution."""
    p = np.array([0.35, 0.3, 0.2, 0.1, 0.05])
    keys = jax.random.split(jax.random.key(5), few)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (few, 5))
    counts = np.bincount(
        jax.jit(lambda *inputs: draw_warped(*inputs))(keys, logits, sampling_of(1.0, top_p=0.8)), minlength=5
    )
    wanted = p[:3] / p[:3].sum() * few
    return 0.0 if counts[3:].any() else chisquare(counts[:3], wanted).pvalue


def test_draws_have_the_distribution_of_the_nucleus():
    assert p_value() > 1e-3


def test_a_race_among_all_tokens_without_a_check_is_caught(monkeypatch):
    monkeypatch.setattr(filtered_draws, "_first_kept", lambda logits, scores, sampling: jnp.argmax(scores, -1))
    assert p_value() < 1e-3


def test_a_repetition_that_keeps_the_likeliest_token_is_caught(monkeypatch):
    """It has the right support but the wrong distribution."""
    right = filtered_draws._first_kept

    def wrong(logits, scores, sampling):
        drawn = jnp.argmax(scores, -1)
        return jnp.where(right(logits, scores, sampling) == drawn, drawn, jnp.argmax(logits, -1))

    monkeypatch.setattr(filtered_draws, "_first_kept", wrong)
    assert p_value() < 1e-3


def test_the_number_of_races_follows_the_kept_mass(monkeypatch):
    """The slowest of 64 rows takes 2.3 races for a mass of 0.9. Races of flat and of sharp rows are counted."""
    assert expected_races(0.9, 1) == pytest.approx(1 - np.log(0.9), abs=1e-3)
    races = []
    loop = jax.lax.while_loop

    def counting(go_on, body, state):
        races.append(0)

        def count(state):
            races[-1] += 1
            return body(state)

        return loop(go_on, count, state)

    monkeypatch.setattr(jax.lax, "while_loop", counting)
    with jax.disable_jit():
        for seed in range(10):
            x = np.random.default_rng(seed).normal(size=(ROWS, 2_000)).astype(np.float32) * (1 + 2 * (seed % 2))
            draw_warped(jax.random.split(jax.random.key(seed), ROWS), x, sampling_of(1.0, top_p=0.9))
    assert expected_races(0.9, ROWS) == pytest.approx(2.29, abs=0.02)
    assert abs(np.mean(races) - expected_races(0.9, ROWS)) < 0.5


def test_the_reduction_for_tpus_draws_alike(monkeypatch):
    keys = jax.random.split(jax.random.key(1), ROWS)
    for_tpus = lambda *arrays, tpu=None, default=None, **others: (tpu or default)(*arrays)
    for name in ("top_p", "both"):
        sampling = sampling_of(0.7, **FILTERS[name])
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", for_tpus)
            in_one_pass = jax.jit(lambda *inputs: draw_warped(*inputs))
            drawn = [in_one_pass(keys, logits_of(kind, ROWS, VOCAB), sampling) for kind in ("normal", "ties", "banned")]
        wanted = [compiled()(keys, logits_of(kind, ROWS, VOCAB), sampling) for kind in ("normal", "ties", "banned")]
        np.testing.assert_array_equal(drawn, wanted)
