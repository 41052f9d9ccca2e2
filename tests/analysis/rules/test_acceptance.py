"""Acceptance of rules and its bound: golden values, exhaustive search, enumeration through the rules themselves."""

import importlib
import itertools

import jax
import numpy as np
import pytest
from exact import independent_paths, patterns, top_and_sampled, without_replacement
from rules import module as rule_module
from scipy.integrate import quad
from toy import DRAFT_ROWS, ONE_STEP, TARGET_ROWS, template, tiny_llama

from specjax import UsageError, analysis, decode, trees, verifiers
from specjax.analysis import acceptance, optimal_acceptance
from specjax.drafters import autoregressive

KINDS = ("with_replacement", "without_replacement")
EASY = ONE_STEP["p"], ONE_STEP["q"], ONE_STEP["multi_draft"]
HARD = ONE_STEP["multi_draft_hard"]["p"], ONE_STEP["multi_draft_hard"]["q"], ONE_STEP["multi_draft_hard"]


def random_pairs(count, vocab, seed=0, concentration=0.7):
    return np.random.default_rng(seed).dirichlet(np.full(vocab, concentration), (2, count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("p", "q", "golden"), [EASY, HARD], ids=["easy", "hard"])
def test_golden_bounds(p, q, golden, n, kind):
    short = {"with_replacement": "with", "without_replacement": "without"}[kind]
    wanted = golden[f"n={n}"].get(f"optimal_{short}") or golden[f"n={n}"][f"optimal_{kind}"]
    result = optimal_acceptance(p, q, n, kind)
    assert result.acceptance == pytest.approx(wanted["alpha"], abs=1e-6)
    assert result.order[: result.prefix].tolist() == wanted["H"]


@pytest.mark.parametrize("n", [2, 3])
def test_golden_rules(n):
    for p, q, golden in (EASY, HARD):
        wanted = golden[f"n={n}"]
        rrs = [wanted.get(f"rrs_{name}") or wanted[f"rrs_{name}_replacement"] for name in ("with", "without")]
        rrs = [x["accept_test"] if isinstance(x, dict) else x for x in rrs]
        names = ("spectr", "greedy_multi_draft", "specinfer", "recursive_rejection")
        values = [acceptance(name, p, q, n).value for name in names]
        np.testing.assert_allclose(values, [wanted["kseq"]["accept"], wanted["greedy_draft"]["alpha"], *rrs], atol=2e-6)


def all_inside(q, subset, n, kind):
    """P(n draws lie in a set), by summing over ordered draws."""
    if kind == "with_replacement":
        return q[list(subset)].sum() ** n
    total = 0.0
    for order in itertools.permutations(subset, n):
        left, chance = 1.0, 1.0
        for token in order:
            chance *= q[token] / left
            left -= q[token]
        total += chance
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3])
def test_prefix_search_equals_all_subsets(n, kind):
    p, q = random_pairs(100, 6)
    sets = [subset for size in range(7) for subset in itertools.combinations(range(6), size)]
    best = [
        1 + min(p[i][list(subset)].sum() - all_inside(q[i], subset, n, kind) for subset in sets) for i in range(100)
    ]
    np.testing.assert_allclose(optimal_acceptance(p, q, n, kind).acceptance, best, atol=1e-12)


def test_integral_equals_closed_form():
    p, q = random_pairs(20, 40, concentration=0.05)  # masses down to 1e-40
    closed = optimal_acceptance(p, q, 2, KINDS[1]).acceptance
    module = importlib.import_module("specjax.analysis.rules.optimal")
    order = module.order_by_ratio(p, q)
    ordered = np.take_along_axis(q, order, 1)
    outside = np.pad(np.cumsum(ordered[:, ::-1], 1)[:, ::-1], ((0, 0), (0, 1)))
    time = np.exp(np.arange(-16, np.log(40 / outside[outside > 0].min()), module.STEP))
    chance = np.where(outside > 0, module._integrate(ordered, outside, time, 2), 1.0)
    chance[:, :2] = 0.0
    total = np.pad(np.cumsum(np.take_along_axis(p, order, 1), 1), ((0, 0), (1, 0)))
    np.testing.assert_allclose(1 + (total - chance).min(1), closed, atol=1e-9)


def test_order_of_the_rules():
    p, q = random_pairs(40, 9, seed=1)
    p[0], q[1, :4] = q[0], 0.0  # equal distributions; tokens the draft never gives
    q /= q.sum(-1, keepdims=True)
    one = np.minimum(p, q).sum(1)
    bounds = {(kind, n): optimal_acceptance(p, q, n, kind).acceptance for kind in KINDS for n in range(1, 6)}
    for kind in KINDS:
        np.testing.assert_allclose(bounds[kind, 1], one, atol=1e-12)
        for n in range(1, 5):
            assert np.all(bounds[kind, n + 1] >= bounds[kind, n] - 1e-12)
    for n in range(1, 6):
        assert np.all(bounds[KINDS[1], n] >= bounds[KINDS[0], n] - 1e-12)
        below = [(0, "spectr"), (0, "specinfer"), (0, "multipath_block"), (1, "recursive_rejection")]
        for kind, rule in below:
            result = acceptance(rule, p, q, n)
            assert np.all(result.value <= bounds[KINDS[kind], n] + 2e-6 + 6 * result.standard_error), rule
        guaranteed = (1 - (1 - 1 / n) ** n) * bounds[KINDS[0], n]
        assert np.all(acceptance("spectr", p, q, n).value >= guaranteed - 2e-6)
    for rule in analysis.FORMULAS:
        if rule != "sample_and_match":
            np.testing.assert_allclose(acceptance(rule, p, q, 1).value, _one_draft(rule, p, q, one), atol=2e-6)


def _one_draft(rule, p, q, one):
    if rule != "coupled":
        return one
    ratio = np.maximum(p[:, None] * q[:, :, None], q[:, None] * p[:, :, None])  # p_i q_i max(p_j / p_i, q_j / q_i)
    pq = p * q
    return np.where(pq > 0, pq / ratio.sum(2), 0.0).sum(1)


def test_few_tokens_end_the_drafts():
    """No more drafts than tokens are drawn without replacement; all of them are then drafted."""
    p, q = np.array([0.2, 0.3, 0.5, 0.0]), np.array([0.6, 0.4, 0.0, 0.0])
    for n in (2, 3, 4):
        assert optimal_acceptance(p, q, n, KINDS[1]).acceptance == pytest.approx(0.5)
        assert acceptance("recursive_rejection", p, q, n).value == pytest.approx(0.5)
        assert acceptance("sample_and_match", p, q, n).value == pytest.approx(0.5)
        assert acceptance("greedy_multi_draft", p, q, n).value == pytest.approx(0.5)
    point = np.array([0.0, 1.0, 0.0, 0.0])
    assert optimal_acceptance(p, point, 3, KINDS[1]).acceptance == pytest.approx(0.3)
    assert optimal_acceptance(p, point, 3, KINDS[0]).acceptance == pytest.approx(0.3)


def enumerated(rule, rows, start, n, target_rows):
    """The acceptance of the root's children, through the rule's own core."""
    if rule in ("specinfer", "spectr", "multipath_block"):
        tree, weights = independent_paths(rows, start, n, 1)
    elif rule == "greedy_multi_draft":
        tree, weights = top_and_sampled(rows, start, template((n,)))
    else:
        tree, weights = without_replacement(rows, start, template((n,)))
    core = rule_module(rule).core
    if rule == "multipath_block":
        rule_core = core
        core = lambda u, tree, logits: rule_core(u, tree, logits, paths=n)
    with np.errstate(divide="ignore"):
        logits = np.log(target_rows)[tree.tokens].astype(np.float32)
    probability, end = patterns(core, tree, jax.numpy.asarray(logits))
    return float((np.asarray(weights)[:, None] * probability * (end.num_nodes > 1)).sum())


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("rule", [r for r in analysis.FORMULAS if r not in ("coupled", "sample_and_match")])
def test_acceptance_equals_the_rule_itself(rule, n):
    if rule == "standard" and n > 1:
        with pytest.raises(UsageError, match="one draft"):
            acceptance(rule, TARGET_ROWS[0], DRAFT_ROWS[0], n)
        return
    p, q = random_pairs(4, 4, seed=5)
    result = acceptance(rule, p[0], q[0], n).value
    assert result == pytest.approx(enumerated(rule, q.astype(np.float32), 0, n, p), abs=2e-5)


def test_drawn_rejections_equal_the_sum(monkeypatch):
    p, q = random_pairs(6, 12, seed=2)
    exact = acceptance("recursive_rejection", p, q, 3)
    assert not exact.standard_error.any()
    monkeypatch.setattr(
        importlib.import_module("specjax.analysis.rules.acceptance"), "ELEMENTS", 240
    )  # parts of 20 samples
    drawn = acceptance("recursive_rejection", p, q, 3, samples=4000)
    assert np.all(drawn.standard_error > 0) and np.all(drawn.standard_error < 2e-3)
    assert np.all(abs(drawn.value - exact.value) < 4 * drawn.standard_error)


def test_coupled():
    p, q = random_pairs(200, 7, seed=3)
    tv = 0.5 * abs(p - q).sum(1)
    one = acceptance("coupled", p, q, 1).value
    assert np.all(one >= (1 - tv) / (1 + tv) - 1e-12)
    assert np.all(one <= 1 - tv + 1e-12)

    p, q = p[0, :3] / p[0, :3].sum(), q[0, :3] / q[0, :3].sum()
    missed = 0.0  # with 3 tokens and 2 drafts: the target's token, which rings first for it at t, is the draft's last
    for i in range(3):
        rates = np.maximum(np.delete(q, i) * p[i] / q[i] - np.delete(p, i), 0)
        missed += p[i] * quad(lambda t, rates=rates: np.exp(-t) * np.prod(-np.expm1(-t * rates)), 0, np.inf)[0]
    result = acceptance("coupled", p, q, 2, samples=40_000)
    assert abs(result.value - (1 - missed)) < 4 * result.standard_error


def test_any_verifier_is_simulated():
    p, q, golden = HARD
    for verifier, n, wanted in (
        (verifiers.traversal, 2, golden["n=2"]["rrs_without"]),
        (verifiers.block, 1, ONE_STEP["multi_draft_hard"]["sd_acceptance"]),
    ):
        copy = verifiers.Verifier(verifier.name, verifier.rule, verifier.draws, "distribution", "a copy")
        result = acceptance(copy, p, q, n, samples=8000)
        assert result.standard_error > 0
        assert abs(result.value - wanted) < 4 * result.standard_error
    with pytest.raises(UsageError, match="block supports drafts drawn chain"):
        acceptance("block", p, q, 2)


def test_bad_input():
    p, q = TARGET_ROWS[0], DRAFT_ROWS[0]
    for arguments, words in (
        ((p, q, 0), "at least 1"),
        ((p, q[:2], 2), "one shape"),
        ((p * 2, q, 2), "p is not a distribution"),
        ((p, q * np.nan, 2), "q is not a distribution"),
        ((p, q, 2, "sideways"), "draws"),
    ):
        with pytest.raises(UsageError, match=words):
            optimal_acceptance(*arguments)
    with pytest.raises(UsageError, match="unknown rule"):
        acceptance("nonsense", p, q, 2)
    with pytest.raises(UsageError, match="drafts is empty"):
        analysis.compare(p, q, ())


def test_compare_and_plot():
    result = analysis.compare(TARGET_ROWS, DRAFT_ROWS, (3, 2))
    assert {entry.rule for entry in result.entries} == set(analysis.FORMULAS)
    assert [entry.n for entry in result.entries if entry.rule == "spectr"] == [2, 3]
    standard = result.entries[0]
    assert (standard.n, standard.gap) == (1, pytest.approx(0, abs=1e-9))
    assert analysis.plot(result, "toy").startswith(b"\x89PNG")
    curve = analysis.acceptance_curve("specinfer", TARGET_ROWS, DRAFT_ROWS)
    assert np.all(np.diff([x.value for x in curve], axis=0) >= 0)


def test_block_efficiency_of_constant_distributions():
    """The golden one-step acceptance a gives 1 + a + a^2 on two levels; a row of the toy by its last token."""
    p, q, golden = HARD
    alpha = golden["n=2"]["rrs_without"]
    result = analysis.block_efficiency(None, trees.branching("2x2"), p, q, key=jax.random.key(0), max_new_tokens=200)
    assert abs(result.mean - (1 + alpha + alpha**2)) < 4 * result.standard_error + 0.01
    np.testing.assert_allclose(result.by_depth, [alpha, alpha**2], atol=0.02)
    with pytest.raises(UsageError, match="both be models"):
        analysis.block_efficiency(None, trees.chain(1), p, tiny_llama(), key=jax.random.key(0))
    with pytest.raises(UsageError, match="not valid for drafts"):
        analysis.block_efficiency(verifiers.spectr, trees.branching("2x2"), p, q, key=jax.random.key(0))


def test_record_holds_the_laws_of_both_models(tmp_path):
    target, other = tiny_llama(layers=1), tiny_llama(1, layers=1)
    prompts, key = [[1, 2, 3], [9, 8, 7, 6, 5]], jax.random.key(3)
    options = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 20}
    full = analysis.record(target, other, prompts, key=key, **options, keep=64)
    assert full.p.shape[0] == 12 and full.prompt.tolist() == [0] * 6 + [1] * 6
    assert np.all((full.p > 0).sum(1) <= 20) and not full.dropped.max() > 1e-6
    for tokens, mass in zip(full.tokens, full.p + full.q, strict=True):
        support = int((tokens >= 0).sum())
        assert np.all(np.diff(tokens[:support]) > 0) and np.all((mass > 0) == (np.arange(len(tokens)) < support))

    # The text is that of `decode`; each token has mass in the distribution of its position.
    one = lambda number: decode(target, autoregressive(), prompts[number : number + 1], key=keys[number], **options)
    keys = [jax.random.fold_in(key, number)[None] for number in range(2)]
    text = [one(number).to_lists()[0] for number in range(2)]
    for row, (number, position) in enumerate(zip(full.prompt, full.position, strict=True)):
        assert full.p[row][full.tokens[row] == text[number][position]] > 0

    # A short record drops what it says.
    short = analysis.record(target, other, prompts, key=key, **options, keep=3)
    assert short.p.shape[1] == 6
    for row in range(12):
        support = np.isin(full.tokens[row], short.tokens[row])
        assert short.dropped[row, 0] == pytest.approx(full.p[row][~support].sum(), abs=1e-5)

    analysis.save_record(tmp_path / "a.npz", short)
    for ours, read in zip(short, analysis.load_record(tmp_path / "a.npz"), strict=True):
        np.testing.assert_array_equal(ours, read)
    with pytest.raises(UsageError, match="temperature must be above 0"):
        analysis.record(target, other, prompts, key=key, max_new_tokens=2, temperature=0.0)
    with pytest.raises(UsageError, match="prompts is missing"):
        analysis.block_efficiency(None, trees.chain(1), target, other, key=key)
    with pytest.raises(UsageError, match="64 token ids and the draft has 65"):
        analysis.record(target, tiny_llama(vocab=65), prompts, key=key, max_new_tokens=2)
