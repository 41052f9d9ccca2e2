"""Warping against a sort-based reference, golden values, ties and the distribution of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare
from toy import ONE_STEP

from specjax.numerics import sampling
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import draw, row_keys, warp
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
    mass_above = np.cumsum(p[order]) - p[order]
    if top_p < 1:  # a sum that rounds to 1 before the last token would drop it
        keep[order[mass_above >= top_p]] = False
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
        survivors, wanted = (np.isfinite(np.asarray(x)) for x in (ours, reference(logits, 0.7, k, top_p)))
        assert (survivors != wanted).sum() <= 1  # the crossing token, within the rounding of a sum of 50,000


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


@pytest.mark.parametrize("temperature", [1e-37, 1.2e-38, [1e-37, 1.0]])
def test_a_tiny_temperature_leaves_the_likeliest_tokens(temperature):
    """60 / 1e-37 is no float32: everything was NaN."""
    logits = jnp.array([[60.0, 90.0, -60.0, 90.0], [0.0, -1.0, 1.0, 0.5]])
    for top_p in (None, jnp.float32(0.9)):
        warped = WARP(logits, Sampling(jnp.asarray(temperature, jnp.float32), None, top_p))
        np.testing.assert_allclose(jax.nn.softmax(warped[0]), [0.0, 0.5, 0.0, 0.5])
        assert jnp.isfinite(warped[0, 1]) and not jnp.isnan(warped).any()
    plain = logits[1] / jnp.float32(0.7)
    np.testing.assert_array_equal(WARP(logits, Sampling(jnp.array([1e-37, 0.7])))[1], plain)


@pytest.mark.parametrize("filters", [{"min_p": 1.0}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.5}])
def test_a_filter_at_a_tiny_temperature_keeps_the_likeliest_token(filters):
    """A scaled logit of 5e5 has steps of 0.03, and one of 5e9 has steps of 512. A filter must not drop all tokens."""
    logits = 5 * jax.random.normal(jax.random.key(0), (64, 50))
    temperature = jnp.geomspace(1e-4, 1e-12, 64)
    sampling = Sampling(temperature, **{name: jnp.asarray(value) for name, value in filters.items()})
    warped, drawn = jax.jit(lambda x, s: (warp(x, s), draw_warped(row_keys(0, 64), x, s)))(logits, sampling)
    np.testing.assert_array_equal(np.isfinite(warped).sum(-1), 1)
    np.testing.assert_array_equal(np.argmax(warped, -1), np.argmax(logits, -1))
    np.testing.assert_array_equal(drawn, np.argmax(logits, -1))


def test_top_k_takes_equal_zeros_of_both_signs_by_id():
    logits = jnp.array([[-0.0, 0.0, -1.0, 0.0]])
    mask_of = jax.jit(lambda x, k: warp(x, Sampling(jnp.float32(1), k)) > -jnp.inf)
    assert mask_of(logits, jnp.int32(2)).tolist() == [[True, True, False, False]]


def test_draws_have_the_law_of_the_logits():
    distribution = np.array([0.5, 0.3, 0.15, 0.05])
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = draw(keys, jnp.broadcast_to(jnp.log(jnp.asarray(distribution, jnp.float32)), (20_000, 4)))
    counts = np.bincount(tokens, minlength=4)
    assert chisquare(counts, distribution * 20_000).pvalue > 1e-3
    assert chisquare(counts, np.array([0.48, 0.32, 0.15, 0.05]) * 20_000).pvalue < 1e-3  # the test can fail


# ---------------------------------------------------------------------------------------------- the tail of the noise

LARGE, TAIL, DRAWS = 262_144, 0.02, 1_600
LOW_BITS = lambda bits: -jnp.log(-jnp.log((bits >> 9).astype(jnp.float32) * 2.0**-23 + jnp.finfo(jnp.float32).tiny))
"""What `jax.random.gumbel` does by default."""


def tail_of_draws():
    """Return the p-value of a binomial test of how often one of 262,143 tokens of 7.6e-8 each, of 0.02 together, is
    drawn."""
    logits = jnp.full(LARGE, jnp.log(TAIL / (LARGE - 1))).at[LARGE // 2].set(jnp.log1p(-TAIL))
    keys = jax.random.split(jax.random.key(0), (DRAWS // 4, 4))
    some = lambda keys: draw(keys, jnp.broadcast_to(logits, (4, LARGE)))
    optimised = {"xla_backend_optimization_level": 3}  # ten times as fast as what tests compile otherwise
    tokens = jax.jit(lambda keys: jax.lax.map(some, keys), compiler_options=optimised)(keys)
    return binomtest(int((tokens != LARGE // 2).sum()), DRAWS, TAIL).pvalue


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should():
    assert tail_of_draws() > 1e-3


def test_the_tail_check_sees_noise_of_23_bits(monkeypatch):
    monkeypatch.setattr(sampling, "gumbel", LOW_BITS)
    assert tail_of_draws() < 1e-3


RESOLUTION = [(1e-5, 1.0), (1e-7, 1.0), (1e-8, 1.0), (1e-9, 0.998), (2.0**-32, 0.96), (1e-10, 0.81)]


def chance_of(p, noise_of):
    """Return how often a token of probability p beats the rest of the mass, over how often it should, by quadrature.

    It does where its exponential number is below p times that of the rest (a race); of its 2^32 noises the last 2^20
    and the rest's quantiles are enumerated.
    """
    bits = jnp.asarray((2**32 - 1 - np.arange(2**20)).astype(np.uint32))
    exponentials = np.exp(-np.asarray(noise_of(bits), np.float64))  # rising
    quantiles = -np.log1p(-(np.arange(20_000) + 0.5) / 20_000) / (1 - p)
    return np.mean(np.searchsorted(exponentials, p * quantiles)) / 2**32 / p


@pytest.mark.parametrize(("p", "ratio"), RESOLUTION)
def test_the_resolution_that_is_left(p, ratio):
    """The ratios are those that the docs state."""
    assert abs(chance_of(p, sampling.gumbel) - ratio) < 0.005


@pytest.mark.parametrize(("p", "ratio"), [(1e-6, 0.94), (1e-7, 0.52), (3e-8, 0.08)])
def test_the_resolution_of_23_bits(p, ratio):
    """The defect: the same measure finds it."""
    assert abs(chance_of(p, LOW_BITS) - ratio) < 0.02


def test_noise_is_the_quantile_of_its_bits():
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2**23, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 2**26, 2**32 - 2**26 - 1], np.uint32)
    bits = np.concatenate([ends, rng.integers(0, 2**32, 100_000, np.uint32), ~rng.integers(0, 2**20, 1000, np.uint32)])
    x = (np.float64(~bits) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-x))
    np.testing.assert_allclose(jax.jit(sampling.gumbel)(bits), exact, atol=2e-5, rtol=1e-6)
    assert np.isfinite(exact).all() and exact.max() > 22.8


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_uniforms_lie_between_0_and_1_and_normals_are_their_quantiles(bits):
    ours = sampling._centred(jnp.uint32(bits))
    exact = (bits + 0.5) / 2**32
    wanted = exact if exact < 0.5 else exact - 1
    assert abs(float(ours) - wanted) <= abs(wanted) * 2.0**-23


def test_draws_are_those_of_jax_to_their_bits():
    """The draws are those of JAX from the same keys, but for the bits that are left out."""
    key = jax.random.key(7)
    ours, u = sampling.noise(key[None], 100_003)[0], sampling.uniform(key[None], 1000)[0]
    theirs = jax.random.gumbel(key, (100_003,), jnp.float32)
    np.testing.assert_allclose(jnp.exp(-jnp.exp(-ours)), jnp.exp(-jnp.exp(-theirs)), atol=4e-7)
    np.testing.assert_allclose(u, jax.random.uniform(key, (1000,)), atol=2.0**-23)
    normals = sampling.normal(key[None], 1000)[0]
    np.testing.assert_allclose(normals, jax.random.normal(key, (1000,)), atol=1e-4)
    assert sampling.uniform(key, 1)[0] == sampling.uniform(key, 9)[0]


def test_uniforms_reach_below_23_bits_and_never_0_or_1(monkeypatch):
    ends = np.array([0, 1, 2**32 - 1, 2**31, 2**31 - 1], np.uint32)
    monkeypatch.setattr(sampling, "_bits", lambda keys, count: jnp.asarray(ends))
    u = np.asarray(sampling.uniform(jax.random.key(0), 5), np.float64)
    np.testing.assert_allclose(u, [2**-33, 1.5 * 2**-32, 1 - 2**-24, 0.5, 0.5])
    assert sampling.normal(jax.random.key(0), 5).max() > 6.2 and sampling.normal(jax.random.key(0), 5).min() < -6.2


def test_min_p_is_that_of_transformers():
    """After the temperature, per row; 0 keeps all, 1 the likeliest ones."""
    torch, of = pytest.importorskip("torch"), pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).normal(size=(4, 1, 50)).astype(np.float32) * 3
    shares = np.array([0.0, 0.03, 0.4, 1.0], np.float32)
    ours = np.asarray(WARP(jnp.asarray(logits), Sampling(jnp.float32(1.5), min_p=jnp.asarray(shares))))
    for row, share in enumerate(shares):
        wanted = of.MinPLogitsWarper(float(share))(None, torch.tensor(logits[row] / 1.5)).numpy()
        np.testing.assert_allclose(ours[row], wanted, rtol=1e-6)
    greedy = WARP(jnp.asarray(logits), Sampling(jnp.float32(0.0), min_p=jnp.float32(0.5)))
    assert (np.isfinite(greedy).sum(-1) == 1).all()


def test_at_an_infinite_temperature_all_tokens_are_alike_that_may_be_drawn():
    logits = jnp.array([[3.0, -jnp.inf, -1.0, 0.0]])
    for more, left in (({}, [0, 2, 3]), ({"top_k": jnp.int32(2)}, [0, 3])):
        warped = np.asarray(warp(logits, Sampling(temperature=jnp.float32(jnp.inf), **more)))[0]
        assert np.flatnonzero(warped > -np.inf).tolist() == left and np.allclose(warped[left], 0)
