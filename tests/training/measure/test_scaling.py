"""Laws over budgets: slopes found again, exact data extrapolated, the right form, the knee, the best budget."""

import numpy as np
import pytest

from specjax import UsageError
from specjax.training.measure.scaling import choose_draft_size, drop_saturated, fit, fit_joint

BUDGETS = 1e5 * 2.0 ** np.arange(5)


def test_a_slope_lies_in_its_interval():
    """T7 (a), with three seeds a budget; and over many data sets about 95 % of them do."""
    rng = np.random.default_rng(0)
    x = np.repeat(BUDGETS, 3)
    inside = []
    for i in range(60):
        law = fit(x, 0.35 * np.log(x) + 1.2 + rng.normal(0, 0.01, len(x)), form="log-linear", samples=200, seed=i)
        inside.append(law.interval.low <= 0.35 <= law.interval.high)
        assert law.slope == pytest.approx(0.35, abs=0.02)
        assert law.interval.high - law.interval.low < 0.03
    assert 0.85 <= np.mean(inside) < 1


@pytest.mark.parametrize("form", ["log-linear", "log-log"])
def test_exact_data_are_extrapolated_exactly_by_the_law_that_made_them(form):
    """T7 (b), (d)."""
    t = 0.13 * np.log(BUDGETS)
    y = np.exp(t - 1) if form == "log-log" else t + 0.2
    law = fit(BUDGETS, y)
    assert law.form == form and law.r2 == pytest.approx(1) and law.error == pytest.approx(0, abs=1e-9)
    four = 4 * BUDGETS[-1]
    expected = np.exp(0.13 * np.log(four) - 1) if form == "log-log" else 0.13 * np.log(four) + 0.2
    assert law(four) == pytest.approx(expected) and law.budget_for(expected) == pytest.approx(four)
    assert law.predict_interval(four) == pytest.approx((expected, expected))
    np.testing.assert_allclose(law(BUDGETS), y)


def test_a_law_that_falls_reaches_nothing():
    assert fit(BUDGETS, 3 - 0.1 * np.log(BUDGETS)).budget_for(9.0) == float("inf")
    slow = fit(BUDGETS, 1 + 1e-4 * np.log(BUDGETS), form="log-linear")
    assert slow.budget_for(2.0) > 1e300


def test_many_seeds_of_one_budget_do_not_outweigh_the_others():
    y = 0.3 * np.log(BUDGETS) + 1
    y[0] += 0.2
    once = fit(BUDGETS, y, form="log-linear")
    often = fit(np.append(BUDGETS, [BUDGETS[0]] * 50), np.append(y, [y[0]] * 50), form="log-linear")
    assert often.slope == pytest.approx(once.slope) and often.intercept == pytest.approx(once.intercept)


def test_what_lies_beyond_the_knee_is_left_out():
    """T7 (e)."""
    x = 1e5 * 2.0 ** np.arange(9)
    rising = 0.3 * np.log(x) - 2
    flat = np.minimum(rising, rising[5])
    unsaturated, values = drop_saturated(x, flat)
    np.testing.assert_array_equal(unsaturated, x[:6])
    assert fit(unsaturated, values).slope == pytest.approx(0.3) and fit(x, flat, form="log-linear").slope < 0.27
    np.testing.assert_array_equal(drop_saturated(x, rising)[0], x)
    one_bad = rising.copy()
    one_bad[6] *= 0.9  # a run that failed is no knee
    np.testing.assert_array_equal(drop_saturated(x, one_bad)[0], x)


@pytest.mark.parametrize("interaction", [False, True])
def test_a_joint_law_is_found_again(interaction):
    d, n = (grid.ravel() for grid in np.meshgrid(1e5 * 2.0 ** np.arange(4), 1e6 * 2.0 ** np.arange(4)))
    weight = 0.02 if interaction else 0.0
    y = 20 + 0.3 * np.log(d) - 0.1 * np.log(n) + weight * np.log(d) * np.log(n)
    law = fit_joint(d, n, y, interaction=interaction)
    np.testing.assert_allclose(law(d, n), y, rtol=2e-3)
    if not interaction:
        np.testing.assert_allclose(law.weights, [20, 0.3, -0.1, 0], atol=1e-6)
    with pytest.raises(UsageError, match="grow together"):
        fit_joint(BUDGETS, 3 * BUDGETS, np.arange(1, 6))


def test_the_best_of_a_budget_is_that_of_the_grid():
    """T7 (c)."""
    law = lambda tokens, parameters: 0.2 * np.log(tokens) + 0.15 * np.log(parameters) - 4.5
    draft = lambda parameters: parameters / 1e8
    sizes = np.geomspace(1e6, 3e8, 60)
    choice = choose_draft_size(law, sizes, 6e15, verify=1.0, draft=draft, depth=4, batch=8)
    speeds = [8 * min(max(law(1e15 / size, size), 1), 5) / (1.0 + 4 * draft(size)) for size in sizes]
    assert choice.parameters == sizes[np.argmax(speeds)] and choice.speed == pytest.approx(max(speeds))
    assert choice.tokens == pytest.approx(1e15 / choice.parameters)


@pytest.mark.parametrize(
    ("budgets", "values", "words"),
    [
        ([1, 2, 2], [1, 2, 3], "runs of 3 different budgets, but these have 2"),
        ([1, 2, 0], [1, 2, 3], "numbers above 0"),
        ([1, 2, 3], [1, float("nan"), 3], "numbers above 0"),
        ([1, 2, 3], [1, 2], "3 budgets and 2 values"),
    ],
)
def test_runs_that_say_nothing_are_refused(budgets, values, words):
    with pytest.raises(UsageError, match=words):
        fit(budgets, values)


def test_settings_that_mean_nothing_are_refused():
    for options, words in (
        ({"form": "loglog"}, "form must be log-linear or log-log"), ({"samples": 0}, "samples must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            fit([1, 2, 3], [1, 2, 3], **options)
    with pytest.raises(UsageError, match="give sizes of drafts"):
        choose_draft_size(lambda tokens, size: 2.0, [0], 1e9, verify=1.0, draft=lambda size: 0.1, depth=3)
