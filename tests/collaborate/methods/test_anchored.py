"""The budget: by hand, by enumeration of a whole law, and in texts."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError
from specjax.collaborate.methods.anchored import fuse, prompt_debt

SAFE, RISKY = lib.history(0), lib.history(1)


def log(*rows):
    return jnp.log(jnp.array(rows, jnp.float32))


def test_the_path_by_hand():
    s, r = log([0.5, 0.5]), log([0.9, 0.1])
    for budget, theta, q, kl in (
        (0.1, 0.4294, (0.7198, 0.2802), 0.1), (0.0, 0.0, (0.5, 0.5), 0.0), (9.0, 1.0, (0.9, 0.1), 0.3681),
    ):  # fmt: skip
        log_q, weights, spent = fuse(s, r, jnp.array([budget]))
        np.testing.assert_allclose(weights, [theta], atol=1e-4)
        np.testing.assert_allclose(jnp.exp(log_q[0]), q, atol=1e-4)
        np.testing.assert_allclose(spent, [kl], atol=1e-4)
    same = fuse(s, s, jnp.array([0.01]))
    assert same[1].tolist() == [1.0] and abs(float(same[2][0])) < 1e-6


def test_it_is_always_on_the_side_of_the_budget():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 2000, 9)) * rng.uniform(0.1, 9, (2, 2000, 1))
    logits[0, ::3, 4] = -np.inf  # what the safe model never says is never said
    logits[1, ::5, 2] = -np.inf
    s, r = (np.array(x - np.logaddexp.reduce(x, -1, keepdims=True)) for x in logits)
    budget = rng.uniform(0, 1, 2000)
    log_q, theta, spent = (np.asarray(x, np.float64) for x in fuse(*map(jnp.float32, (s, r, budget))))
    with np.errstate(invalid="ignore"):
        exact = np.where(log_q > -np.inf, np.exp(log_q) * (log_q - s), 0).sum(1)
    assert (exact <= budget + 1e-6).all() and (spent <= budget.astype(np.float32)).all()
    np.testing.assert_allclose(exact, spent, atol=2e-5)
    interior = (theta > 0) & (theta < 1)
    smooth = interior & (np.arange(2000) % 5 > 0)
    assert interior.sum() > 500 and (budget - exact)[smooth].max() < 1e-2  # and near it


def test_the_divergence_of_the_whole_law_is_bounded():
    """KL(law of 3 tokens || safe law) <= 3 k, by all texts of two Markov chains, with budgets that carry over."""
    rng = np.random.default_rng(1)
    safe, risky = (rng.dirichlet(np.full(3, 0.4), 3) for _ in range(2))
    for k in (0.02, 0.15):
        nodes, total = {(): (1.0, 0.0, 1.0)}, 0.0  # text to (probability, spent, safe probability)
        for t in range(3):
            grown = {}
            for text, (p, spent, ps) in nodes.items():
                last = text[-1] if text else 0
                allowance = jnp.array([max(0.0, (t + 1) * k - spent)])
                log_q, _, kl = fuse(log(safe[last]), log(risky[last]), allowance)
                for token, q in enumerate(np.exp(np.asarray(log_q[0], np.float64))):
                    grown[(*text, token)] = p * q, spent + float(kl[0]), ps * safe[last, token]
            nodes = grown
        total = sum(p * np.log(p / ps) for p, _, ps in nodes.values())
        assert max(spent for _, spent, _ in nodes.values()) <= 3 * k + 1e-5
        assert k < total <= 3 * k + 1e-5  # and no more than that is saved
        assert len(nodes) == 27 == len(list(itertools.product(range(3), repeat=3)))


def test_debt_by_hand():
    s, r = jnp.zeros((1, 4)), jnp.array([[3.0, -2.0, 1.0, 9.0]])
    prompt_mask = jnp.array([[True, True, True, False]])
    np.testing.assert_allclose(prompt_debt(s, r, prompt_mask, 2), [2.0])
    np.testing.assert_allclose(prompt_debt(s, r, prompt_mask, 4), [4 / 3], rtol=1e-6)


def test_without_a_budget_it_is_the_safe_model_and_with_all_the_risky_one():
    assert lib.run("anchored", budget=0.0).to_lists() == lib.plain(SAFE, temperature=1.0)
    unlimited = lib.run("anchored", budget=1e6)
    assert unlimited.to_lists() == lib.plain(RISKY, temperature=1.0) and unlimited.log.theta.tolist() == [12.0] * 3


def test_no_text_spends_more_than_its_budget():
    result = lib.run("anchored")
    assert (result.log.spent + result.log.debt <= np.maximum(12 * 0.3, result.log.debt) + 1e-5).all()
    for row, prompt in enumerate(lib.PROMPTS):
        ratios = []
        for n in range(1, len(prompt)):
            s, r = (lib.table_logits(m, prompt[:n]).astype(np.float64) for m in (SAFE, RISKY))
            of = lambda x, token: x[token] - np.logaddexp.reduce(x)
            ratios.append(max(0.0, of(r, prompt[n]) - of(s, prompt[n])))
        best = sorted(ratios)[-5:]
        np.testing.assert_allclose(result.log.debt[row], np.mean(best), rtol=1e-4)


def test_a_short_prompt_owes_the_mean_of_what_it_has():
    log_s, log_r = jnp.log(jnp.array([[0.5, 0.5, 0.5]])), jnp.log(jnp.array([[0.9, 0.8, 0.25]]))
    debt = prompt_debt(log_s, log_r, jnp.array([[False, True, True]]), 5)
    np.testing.assert_allclose(debt, [np.log(1.6) / 2], rtol=1e-6)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="top_p would change a distribution after its budget is set"):
        lib.run("anchored", top_p=0.9)
    with pytest.raises(UsageError, match="temperature must be above 0"):
        lib.run("anchored", temperature=0.0)
