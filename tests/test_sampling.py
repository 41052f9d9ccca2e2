"""Warping against a sort-based reference, golden values, ties and the distribution of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from toy import ONE_STEP

from specjax.sampling import draw, warp
from specjax.types import Sampling

WARP = jax.jit(warp)


def reference(logits, temperature, k, top_p):
    """Sorting, as in the cards: stable, ties to the lower id."""
    x = logits.astype(np.float32) / np.float32(temperature)
    order = np.argsort(-x, kind="stable")
    keep = np.zeros(len(x), bool)
    keep[order[:k]] = True
    x = np.where(keep, x, -np.inf)
    p = np.exp(x - x.max())
    p = p / p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:  # a sum that rounds to 1 before the last token would drop it
        keep[order[before >= top_p]] = False
    return np.where(keep, x, -np.inf)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=12, max_size=12),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, 13),
    st.sampled_from([0.05, 0.3, 0.71, 0.95, 1.0]),
)
def test_equals_sorting_with_many_ties(values, temperature, k, top_p):
    logits = np.array(values, np.float32)
    sampling = Sampling(jnp.float32(temperature), jnp.int32(k), jnp.float32(top_p))
    ours = np.asarray(WARP(jnp.asarray(logits)[None, None], sampling))[0, 0]
    wanted = reference(logits, temperature, k, top_p)
    p = np.exp(wanted - wanted.max())
    mass = np.sort(p / p.sum())[::-1].cumsum()
    if np.abs(mass - top_p).min() > 1e-5 or top_p == 1.0:  # not a rounding tie of the nucleus itself
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted))
    np.testing.assert_allclose(ours[np.isfinite(ours)], (logits / temperature)[np.isfinite(ours)], rtol=1e-6)


def test_random_logits_of_a_large_vocabulary():
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32) * 3
    for k, top_p in ((1, 1.0), (50, 0.9), (50_000, 0.5), (1000, 0.999)):
        ours = WARP(jnp.asarray(logits)[None], Sampling(jnp.float32(0.7), jnp.int32(k), jnp.float32(top_p)))[0]
        kept, wanted = (np.isfinite(np.asarray(x)) for x in (ours, reference(logits, 0.7, k, top_p)))
        assert (kept != wanted).sum() <= 1  # the crossing token, within the rounding of a sum of 50,000


@pytest.mark.parametrize("name", ["temperature_0.5", "temperature_2.0", "top_k_2"])
def test_golden_values(name):
    golden = ONE_STEP[name]
    value = jnp.float32(float(name.rsplit("_", 1)[1]))
    one = jnp.float32(1.0)
    sampling = Sampling(one, jnp.int32(2)) if name == "top_k_2" else Sampling(value)
    p, q = (jax.nn.softmax(warp(jnp.log(jnp.array([ONE_STEP[x]])), sampling), -1)[0] for x in "pq")
    np.testing.assert_allclose(p, golden["p"], atol=1e-6)
    np.testing.assert_allclose(q, golden["q"], atol=1e-6)
    np.testing.assert_allclose(jnp.minimum(p, q).sum(), golden["acceptance"], atol=1e-6)


def test_top_p_keeps_the_crossing_token():
    golden = ONE_STEP["target_top_p_0.7_draft_untouched"]
    p = jax.nn.softmax(warp(jnp.log(jnp.array([ONE_STEP["p"]])), Sampling(jnp.float32(1), None, jnp.float32(0.7))))[0]
    np.testing.assert_allclose(p, golden["p"], atol=1e-6)


def test_settings_are_per_row_and_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 20)), jnp.float32)
    rows = WARP(logits, Sampling(jnp.array([0.0, 0.5, 2.0]), jnp.array([20, 3, 20]), jnp.array([1.0, 1.0, 0.5])))
    assert np.isfinite(rows[0]).sum(-1).tolist() == [1, 1]
    assert rows[0].argmax(-1).tolist() == logits[0].argmax(-1).tolist()
    assert np.isfinite(rows[1]).sum(-1).tolist() == [3, 3]
    for b, (t, k, p) in enumerate([(0.0, 20, 1.0), (0.5, 3, 1.0), (2.0, 20, 0.5)]):
        alone = WARP(logits[b : b + 1], Sampling(jnp.array([t]), jnp.array([k]), jnp.array([p])))
        np.testing.assert_array_equal(alone[0], rows[b])


def test_draws_have_the_law_of_the_logits():
    distribution = np.array([0.5, 0.3, 0.15, 0.05])
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = draw(keys, jnp.broadcast_to(jnp.log(jnp.asarray(distribution, jnp.float32)), (20_000, 4)))
    counts = np.bincount(tokens, minlength=4)
    assert chisquare(counts, distribution * 20_000).pvalue > 1e-3
    assert chisquare(counts, np.array([0.48, 0.32, 0.15, 0.05]) * 20_000).pvalue < 1e-3  # the test can fail
