"""Judge's head: labels, features, the fit, its gradient, and the threshold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from specjax import UsageError
from specjax.models.loading.decision_heads import read_judge, save_judge
from specjax.training import JudgedResponse, TrainingText
from specjax.training.methods.judge_head import compute_loss, fit_judge, label_tokens, make_examples, threshold_for
from specjax.verifiers.lossy.judge import log_odds_of


def separable(count=200, width=6, seed=0):
    """Features of unlike means and scales, and labels that a plane tells apart."""
    rng = np.random.default_rng(seed)
    features = (rng.normal(size=(count, width)) * [1, 10, 0.1, 1, 1, 5] + [0, 30, 0, -2, 0, 9]).astype(np.float32)
    odds = (features - features.mean(0)) / features.std(0) @ np.array([1.0, -2, 0.5, 0, 1, 0])
    keep = abs(odds - 0.8) > 0.2
    return features[keep], (odds[keep] > 0.8).astype(np.int8)


def test_labels_end_at_the_first_wrong_token():
    text = TrainingText((5, 6, 7, 8, 9, 10), 2)
    assert label_tokens(JudgedResponse(text)).tolist() == [-1, -1, 1, 1, 1, 1]
    assert label_tokens(JudgedResponse(text, 3)).tolist() == [-1, -1, 1, 0, -1, -1]
    assert label_tokens(JudgedResponse(text, 3), after_error="wrong").tolist() == [-1, -1, 1, 0, 0, 0]
    for outside in (1, 6):
        with pytest.raises(UsageError, match=f"2 to 5, not {outside}"):
            label_tokens(JudgedResponse(text, outside))


def test_prompts_of_later_turns_have_no_label():
    text = TrainingText((5, 6, 7, 8, 9, 10), 2, ((3, 5),))
    assert label_tokens(JudgedResponse(text)).tolist() == [-1, -1, 1, -1, -1, 1]
    assert label_tokens(JudgedResponse(text, 2), after_error="wrong").tolist() == [-1, -1, 0, -1, -1, 0]
    with pytest.raises(UsageError, match="2 to 2 or 5 to 5, not 3"):
        label_tokens(JudgedResponse(text, 3))


def test_what_a_plane_tells_apart_is_told_apart():
    """T8 (c)."""
    features, labels = separable()
    head = fit_judge(features, labels, l2=1e-5)
    np.testing.assert_array_equal(head(features) > 0, labels == 1)
    heldout, truth = separable(seed=1)
    assert np.mean((head(heldout) > 0) == (truth == 1)) > 0.93


def test_a_class_weighs_as_much_as_the_other_however_many_it_has():
    """T8 (d)."""
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(-0.5, 1, (100, 3)), rng.normal(0.5, 1, (100, 3))]).astype(np.float32)
    labels = np.repeat([0, 1], 100).astype(np.int8)
    loss = lambda share: jax.jit(jax.grad(compute_loss))((jnp.ones(3), jnp.zeros(())), features, labels, share, 0.0)
    twice = np.concatenate([features[:100], features]), np.concatenate([labels[:100], labels])
    doubled = jax.grad(compute_loss)((jnp.ones(3), jnp.zeros(())), *twice, np.ones(300), 0.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), doubled, loss(np.where(labels, 1.0, 2.0)))
    few = np.append(np.arange(100, 200), np.arange(20))
    assert np.mean(fit_judge(features[few], labels[few])(features[:100]) < 0) > 0.6  # not all held to be right


def test_the_gradient_is_that_of_the_card():
    """T8 (g): c (sigma - y) f."""
    f, y = jnp.array([[0.5, -1.0]]), jnp.array([1.0])
    weight, bias = jax.grad(compute_loss)((jnp.array([0.3, 0.2]), jnp.float32(0.1)), f, y, jnp.array([3.0]), 0.0)
    sigma = 1 / (1 + np.exp(-(0.5 * 0.3 - 0.2 + 0.1)))
    np.testing.assert_allclose(weight, (sigma - 1) * f[0], rtol=1e-5)
    assert float(bias) == pytest.approx(sigma - 1, rel=1e-5)


def test_features_are_those_behind_the_token_itself():
    """T8 (e), through the rows that texts are packed into."""
    target = toy.tiny_llama()
    rng = np.random.default_rng(0)
    judged = [
        JudgedResponse(TrainingText(tuple(rng.integers(0, 64, n).tolist()), 3), wrong)
        for n, wrong in ((9, None), (7, 5), (8, 3))
    ]
    features, labels = make_examples(target, judged, rows=2, length=10)
    assert features.shape == (6 + 3 + 1, 32) and labels.tolist() == [1] * 6 + [1, 1, 0] + [0]
    tokens = list(judged[0].text.tokens)
    tokens[5] = (tokens[5] + 1) % 64
    changed, _ = make_examples(target, [JudgedResponse(TrainingText(tuple(tokens), 3)), *judged[1:]], rows=2, length=10)
    moved = abs(changed - features).max(-1) > 1e-6
    assert moved.tolist() == [False, False, True, True, True, True] + [False] * 4


def test_a_threshold_lets_few_wrong_tokens_through():
    rng = np.random.default_rng(0)
    odds, labels = rng.normal(size=1000), rng.integers(0, 2, 1000)
    chance = 1 / (1 + np.exp(-odds))
    threshold = threshold_for(odds, labels, wrong=0.05)
    let = np.mean(chance[labels == 0] > threshold + 1e-9)
    assert 0.04 < let <= 0.05
    assert threshold_for(odds, labels, wrong=1.0) == 0
    with pytest.raises(UsageError, match=r"so sure of wrong tokens \(log-odds 19\)"):
        threshold_for(np.array([20.0, 19.0, 30.0, 18.0]), np.array([0, 0, 1, 0]), wrong=0.4)
    assert np.float32(threshold_for(np.array([16.0]), np.array([0]))) < 1
    with pytest.raises(UsageError, match="there are none"):
        threshold_for(odds, np.ones(1000))


def test_no_more_wrong_tokens_pass_the_rule_than_were_allowed():
    """The threshold holds in the rule's own float32, in which chances near 1 are far apart."""
    rng = np.random.default_rng(0)
    passed = jax.jit(lambda odds, threshold: jnp.mean(odds > log_odds_of(threshold)))
    draws = [rng.normal(size=100) * scale for scale in (1, 3, 5) for _ in range(20)]
    draws.append(np.r_[16, 15.99, 15.98, 15.97, 15.96, np.zeros(95)])
    draws.append(np.full(100, -900.0))
    for odds in draws:
        odds = odds.astype(np.float32)
        for wrong in (0.0, 0.1):
            threshold = threshold_for(odds, np.zeros(100, int), wrong=wrong)
            assert passed(odds, jnp.float32(threshold)) <= wrong
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="wrong must be a share from 0 to 1"):
            threshold_for(draws[0], np.zeros(100, int), wrong=wrong)


def test_labels_that_are_none_are_refused():
    features, labels = separable()
    with pytest.raises(UsageError, match="labels must be 1 for correct tokens and 0 for wrong ones"):
        fit_judge(features, np.where(labels == 0, -1, labels))
    np.testing.assert_array_equal(fit_judge(features, labels == 1).weight, fit_judge(features, labels.tolist()).weight)
    with pytest.raises(UsageError, match="there are none"):
        make_examples(None, [], rows=2, length=10)


def test_it_is_read_back_by_what_serves_it(tmp_path):
    features, labels = separable()
    head = fit_judge(features, labels)
    save_judge(tmp_path / "judge.safetensors", head.weight, head.bias, threshold_for(head(features), labels))
    read = read_judge(tmp_path / "judge.safetensors")
    np.testing.assert_allclose(features @ read.weight + read.bias, head(features), rtol=1e-3, atol=1e-3)
    with pytest.raises(UsageError, match="correct and wrong tokens, but there are 0 and 4"):
        fit_judge(features[:4], np.zeros(4, np.int8))
