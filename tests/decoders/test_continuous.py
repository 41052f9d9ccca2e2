"""The card's oracle tests of continuous speculative decoding: Gaussian heads with known distributions."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from scipy.stats import kstest, norm
from tiers import exhaustive
from toy import DATA
from toy_decoders import linear, previous_token

from specjax import UsageError
from specjax.decoders import continuous
from specjax.decoders.continuous import GUARANTEES, aligned_log_ratio, path_log_ratio, sample_path

GOLDEN = json.loads((DATA / "verification_continuous.json").read_text())
HEAD = GOLDEN["two_step_head"]
ROWS = 20_000
ALPHA_ALIGNED = 0.894  # of the two-step head, by the card
ALPHA_COUPLED = 0.852093  # 1 - E TV(N(0, 0.3^2), N(0.9 d, 0.35^2)), d ~ N(0, 0.02): x_1 of the two on the same noise


def two_step(name, link=0.0):
    h = HEAD["params"][name]
    return linear([h["m0"], h["m1"]], [h["s0"], h["s1"]], link=link)


def spread(name):
    """Return the standard deviation of x_0 of a two-step head."""
    h = HEAD["params"][name]
    return (h["m0"] ** 2 * (h["m1"] ** 2 + h["s1"] ** 2) + h["s0"] ** 2) ** 0.5


ONE_STEP = linear([0.0], [1.2], 0.5), linear([0.0], [1.0])  # target, draft
TWO_STEP = two_step("p"), two_step("q")


def one_token(models, seed=0, **options):
    """Decode one token in 20,000 rows; return float[20,000], the acceptance rate, and the result."""
    settings = {"max_new_tokens": 1, "window": 1, "prefill_ratio": 0.0, **options}
    result = continuous(*models, jnp.zeros((ROWS, 0, 1)), key=jax.random.key(seed), **settings)
    return np.asarray(result.tokens)[:, 0, 0], float(result.stats.accepted.mean()), result


def near(value, wanted, of=ROWS):
    return abs(value - wanted) < 4 * (wanted * (1 - wanted) / of) ** 0.5 + 5e-4  # the goldens have three digits


def test_one_step_ratios():
    z = jnp.zeros((1,))
    for x, wanted in GOLDEN["accept_prob_at"].items():
        log_r = path_log_ratio(*ONE_STEP, jnp.array([[0.0], [float(x)]]), z, z)
        assert abs(min(1, np.exp(log_r)) - wanted) < 2e-6
        aligned = aligned_log_ratio(*ONE_STEP, jnp.array([float(x)]), (jnp.zeros(1), jnp.zeros(1)), z, z)
        np.testing.assert_allclose(aligned, log_r, atol=1e-6)  # one step has one path
    for x, wanted in GOLDEN["residual_accept_prob_at"].items():
        log_r = path_log_ratio(*ONE_STEP, jnp.array([[0.0], [float(x)]]), z, z)
        assert abs(max(0, -np.expm1(-log_r)) - wanted) < 2e-6


def test_two_step_ratios():
    z = jnp.zeros((1,))
    noise = jnp.array([[HEAD["x2"]], [HEAD["eps1"]], [HEAD["eps0"]]])
    of_target, of_draft = (sample_path(model, noise, z) for model in TWO_STEP)
    np.testing.assert_allclose(of_draft[1:, 0], [HEAD["draft_x1"], HEAD["draft_x0"]], atol=1e-6)
    np.testing.assert_allclose(of_target[1, 0], HEAD["target_x1_same_noise"], atol=1e-6)
    same = path_log_ratio(*TWO_STEP, of_draft, z, z)
    aligned = aligned_log_ratio(*TWO_STEP, of_draft[-1], (of_target[-2], of_draft[-2]), z, z)
    np.testing.assert_allclose(np.exp([same, aligned]), [HEAD["same_path_ratio"], HEAD["aligned_ratio"]], atol=3e-6)


def test_one_step_outputs_follow_the_target():
    tokens, accepted, result = one_token(ONE_STEP)
    assert kstest(tokens, norm(0.5, 1.2).cdf).pvalue > 1e-3
    assert near(accepted, GOLDEN["exact_acceptance"])
    assert not result.exhausted.any()
    assert (np.asarray(result.stats.target_passes) == 1).all()


def test_the_kolmogorov_smirnov_test_catches_a_missing_residual():
    """Allow one try, which accepts any candidate: the rejected token is drawn from p instead of [p - q]+."""
    tokens, accepted, result = one_token(ONE_STEP, max_tries=1)
    assert kstest(tokens, norm(0.5, 1.2).cdf).pvalue < 1e-6
    assert 0 < result.exhausted.mean() < 1 - accepted


@pytest.mark.parametrize(
    ("ratio", "alpha"),
    [
        ("path", HEAD["path_space_acceptance_3digits"]),
        exhaustive("coupled", ALPHA_COUPLED),
        exhaustive("aligned", ALPHA_ALIGNED),
    ],
)
def test_acceptance_of_the_two_step_head(ratio, alpha):
    tokens, accepted, _ = one_token(TWO_STEP, ratio=ratio)
    assert near(accepted, alpha)
    if GUARANTEES[ratio] == "distribution":
        assert kstest(tokens / spread("p"), "norm").pvalue > 1e-3
    else:
        assert abs(tokens.mean()) < 0.02  # no exact distribution; the bias of these heads is small


@pytest.mark.parametrize("ratio", ["path", "coupled", "aligned"])
def test_wider_early_steps_show_the_bias_of_the_aligned_ratio(ratio):
    draft = linear([0.7, 0.6], [0.4, 1.0], 0.3)
    tokens, _, _ = one_token((TWO_STEP[0], draft), ratio=ratio)
    p_value = kstest(tokens / spread("p"), "norm").pvalue
    assert p_value > 1e-3 if GUARANTEES[ratio] == "distribution" else p_value < 1e-6


@pytest.mark.parametrize("ratio", ["path", "coupled"])
def test_the_joint_law_of_four_tokens(ratio):
    """Decode tokens that depend on each other: innovations are independent normal draws."""
    models = two_step("p", link=0.6), two_step("q", link=0.3)
    prompts = jnp.full((ROWS, 1, 1), 0.5)
    options = {"max_new_tokens": 4, "window": 2, "prefill_ratio": 0.0, "ratio": ratio}
    result = continuous(*models, prompts, key=jax.random.key(1), **options)
    text = np.concatenate([np.asarray(prompts), np.asarray(result.tokens)], 1)[:, :, 0]
    gain = 0.6 * (1 + HEAD["params"]["p"]["m0"])  # z enters both steps
    innovations = (text[:, 1:] - gain * text[:, :-1]) / spread("p")
    for i in range(4):
        assert kstest(innovations[:, i], "norm").pvalue > 1e-3
    correlation = np.corrcoef(innovations.T) - np.eye(4)
    assert np.abs(correlation).max() < 4.5 / ROWS**0.5
    assert 1.5 < float(result.stats.target_passes.mean()) < 3.9  # both rejections and bonus tokens


@pytest.mark.parametrize("ratio", ["path", "aligned"])
def test_identical_models_accept_all(ratio):
    model = linear([0.9, 0.8, 0.7], [0.3, 0.5, 0.4], link=0.5, dim=2)
    options = {"max_new_tokens": 11, "window": 3, "prefill_ratio": 0.25}
    result = continuous(model, model, jnp.zeros((3, 1, 2)), key=jax.random.key(0), ratio=ratio, **options)
    assert result.stats.target_passes.tolist() == [5, 5, 5]  # three tokens of the target alone, then eight
    assert result.stats.accepted.tolist() == [6, 6, 6]
    assert result.stats.drafted.tolist() == [6, 6, 6]
    assert np.isfinite(result.tokens).all()


def conditioned(params, condition, tokens, positions):
    return previous_token(params, (), tokens, positions) + condition[:, None, None]


def test_a_row_alone_equals_the_row_in_a_batch_and_a_second_call_compiles_nothing():
    models = (dataclasses.replace(two_step(name, 0.4), features=conditioned) for name in ("p", "q"))
    prompts, lengths = jax.random.normal(jax.random.key(0), (3, 4, 1)), jnp.array([4, 0, 2])
    keys, condition = jax.random.split(jax.random.key(1), 3), jnp.array([0.0, 1.0, 2.0])
    run = functools.partial(continuous, *models, max_new_tokens=9, window=3)
    batch = run(prompts, lengths=lengths, condition=condition, key=keys)
    for b in range(3):
        row = slice(b, b + 1)
        alone = run(prompts[row], lengths=lengths[row], condition=condition[row], key=keys[row])
        np.testing.assert_allclose(alone.tokens[0], batch.tokens[b], atol=1e-5)
        assert alone.stats.target_passes[0] == batch.stats.target_passes[b]
    other = jax.block_until_ready(condition + 5)
    with compiled_programs() as compiled:
        far = jax.block_until_ready(run(prompts, lengths=lengths, condition=other, key=keys))
    assert compiled == []
    assert (np.asarray(far.tokens) > np.asarray(batch.tokens) + 3).all()  # the condition reaches both backbones


def test_usage_errors():
    run = functools.partial(continuous, *ONE_STEP, jnp.zeros((1, 0, 1)), key=jax.random.key(0), max_new_tokens=1)
    for options, message in [
        ({"window": 0}, "window must be at least 1"),
        ({"prefill_ratio": 2.0}, "prefill_ratio must be from 0 to 1"),
        ({"ratio": "other"}, 'ratio must be "path", "coupled" or "aligned"'),
    ]:
        with pytest.raises(UsageError, match=message):
            run(**options)
    with pytest.raises(UsageError, match="2 steps and the target"):
        continuous(ONE_STEP[0], TWO_STEP[1], jnp.zeros((1, 0, 1)), key=jax.random.key(0), max_new_tokens=1)
