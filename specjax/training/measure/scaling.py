"""Scaling laws of tokens per pass over training budgets. They are fitted to finished runs and predict larger budgets.

Yan, Zhu, Jiang, Wang, Chen, Zhang, Liao, Cui, Zhang, Song, Zhu: Scaling Laws for Speculative Decoding (2025),
arXiv 2505.07858. Their tokens per pass are log-linear in the training tokens and in the draft's capacity, and their
speed is log-linear in the batch size. For a budget x of tokens, parameters or rows:

    log-linear   y = a ln x + c
    log-log      ln y = a ln x + c

Rule: both forms are fitted by least squares. All budgets have the same weight, regardless of their number of seeds. The
form that predicts the largest budget best from the other budgets is used. Its interval comes from a bootstrap of the
residuals, scaled by their leverage.
Deviations: we do not know the paper's coefficients and exact forms. The forms above, the selection between them, the
detection of saturation (`drop_saturated`) and the joint law are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.numerics.validation import check_integer

Form = Literal["log-linear", "log-log"]
FORMS: tuple[Form, ...] = ("log-linear", "log-log")
MIN_BUDGETS = 3  # two fit a line, and the third tests its prediction
RIDGE = 1e-3  # penalty on the interaction of the joint law, whose term is scaled to deviation 1


class Interval(NamedTuple):
    """An interval of real numbers."""

    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """Tokens per pass, or another positive number, as a function of the budget."""

    form: Form
    slope: float  # a
    intercept: float  # c
    interval: Interval  # 95 % interval of the slope
    r2: float  # coefficient of determination of y, or of ln y for log-log
    error: float  # absolute error at the largest budget of the law that is fitted without it
    budgets: tuple[float, ...]  # budgets of the fitted runs
    bootstrap: np.ndarray  # float64[N, 2], samples of (a, c)

    def __call__(self, budget):
        """Return the prediction for a budget, or an array for an array."""
        return _untransform(self.form, self.slope * np.log(budget) + self.intercept)

    def predict_interval(self, budget: float) -> Interval:
        """Return the 95 % interval of the mean at a budget."""
        samples = _untransform(self.form, self.bootstrap @ np.array([np.log(budget), 1.0]))
        return Interval(*(float(x) for x in np.quantile(samples, [0.025, 0.975])))

    def budget_for(self, value: float) -> float:
        """Return the budget at which the law reaches a value, or infinity."""
        if self.slope <= 0:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(np.exp((_transform(self.form, np.float64(value)) - self.intercept) / self.slope))


def fit(
    budgets: Sequence[float], values: Sequence[float], *, form: Form | None = None, samples: int = 1000, seed: int = 0
) -> ScalingLaw:
    """Fit a law to runs. Several runs (seeds) may have the same budget.

    Args: form: None selects the form that predicts the largest budget better. samples: size of the bootstrap.

    Raises: UsageError for fewer than 3 different budgets, numbers that are not above 0, or an unknown form.
    """
    x, y = _check_points(budgets, values)
    if form is not None and form not in FORMS:
        raise UsageError(f'form must be {" or ".join(FORMS)}, not "{form}"')
    check_integer("samples", samples)
    check_integer("seed", seed, minimum=0)
    errors = {each: _error_at_largest(each, x, y) for each in FORMS}
    best = min(FORMS, key=errors.__getitem__) if form is None else form
    t, z = np.log(x), _transform(best, y)
    weight = _equal_weights(x)
    slope, intercept = _fit_line(t, z, weight)
    residual = z - (slope * t + intercept)
    deviation = z - np.average(z, weights=weight)
    r2 = 1 - float(np.sum(weight * residual**2)) / max(float(np.sum(weight * deviation**2)), 1e-300)
    centred = t - np.average(t, weights=weight)
    leverage = weight * (1 / weight.sum() + centred**2 / np.sum(weight * centred**2))
    scaled = residual / np.sqrt(np.maximum(1 - leverage, 1e-9))
    noises = np.random.default_rng(seed).choice(scaled - scaled.mean(), (samples, len(z)))
    bootstrap = np.array([_fit_line(t, slope * t + intercept + noise, weight) for noise in noises])
    low, high = np.quantile(bootstrap[:, 0], [0.025, 0.975])
    interval = Interval(float(low), float(high))
    return ScalingLaw(best, slope, intercept, interval, r2, errors[best], tuple(x.tolist()), bootstrap)


def drop_saturated(
    budgets: Sequence[float], values: Sequence[float], *, tolerance: float = 0.02
) -> tuple[np.ndarray, np.ndarray]:
    """Return (budgets, values), float64, without the budgets after saturation.

    A law is fitted to the smaller budgets. The larger ones are dropped if all their values are lower by a share of
    more than `tolerance`, and if this share grows with the budget.
    """
    x, y = _check_points(budgets, values)
    different = np.unique(x)
    for knee in range(MIN_BUDGETS, len(different)):
        is_smaller, larger = x < different[knee], different[knee:]
        law = fit(x[is_smaller], y[is_smaller], samples=1)
        gap = np.array([law(budget) - y[x == budget].mean() for budget in larger]) / law(larger)
        if (gap > tolerance).all() and (np.diff(gap) > 0).all():
            return x[is_smaller], y[is_smaller]
    return x, y


@dataclass(frozen=True)
class JointScalingLaw:
    """A law for training tokens D and draft parameters N: y = c + a ln D + b ln N + d ln D ln N."""

    weights: tuple[float, float, float, float]  # c, a, b, d

    def __call__(self, tokens, parameters):
        """Return the prediction for tokens and parameters."""
        return np.tensordot(np.array(self.weights), _joint_terms(np.log(tokens), np.log(parameters)), 1)


def fit_joint(
    tokens: Sequence[float], parameters: Sequence[float], values: Sequence[float], *, interaction: bool = True
) -> JointScalingLaw:
    """Fit a joint law by least squares, with a ridge on the interaction.

    Raises: UsageError for runs in which tokens and parameters cannot be separated.
    """
    d, y = _check_points(tokens, values, minimum=2)
    n, _ = _check_points(parameters, values, minimum=2)
    columns = _joint_terms(np.log(d), np.log(n)).T[:, : 4 if interaction else 3]
    product = (np.log(d) - np.log(d).mean()) * (np.log(n) - np.log(n).mean())
    ridge = np.zeros((1, columns.shape[1]))
    if interaction:
        ridge[0, 3] = np.sqrt(RIDGE * len(y)) * max(float(product.std()), 1e-12)
    if np.linalg.matrix_rank(columns[:, :3]) < 3:
        raise UsageError("tokens and parameters grow together in these runs; add runs in which only one changes")
    weights = np.linalg.lstsq(np.vstack([columns, ridge]), np.append(y, 0.0), rcond=None)[0]
    c, a, b, e = (*weights, 0.0)[:4]
    return JointScalingLaw((float(c), float(a), float(b), float(e)))


class DraftSizeChoice(NamedTuple):
    """The size of a draft model and its training budget."""

    parameters: float
    tokens: float
    speed: float  # tokens per unit of time


def choose_draft_size(
    law: Callable[[float, float], float],
    sizes: Sequence[float],
    compute: float,
    *,
    verify: float,
    draft: Callable[[float], float],
    depth: int,
    batch: int = 1,
) -> DraftSizeChoice:
    """Return the fastest draft model that can be trained with `compute` = 6 N D floating-point operations.

    Args:
      law: (tokens, parameters) -> tokens per pass. sizes: parameters of the candidates.
      verify: time of a target pass. draft: parameters -> time of a draft pass. depth: draft passes per round.
    """
    if not len(sizes) or not min(sizes) > 0 or not compute > 0:
        raise UsageError(f"give sizes of drafts and a compute budget above 0, not {list(sizes)} and {compute}")

    def evaluate(size: float) -> DraftSizeChoice:
        tokens = compute / (6 * size)
        per_pass = min(max(float(law(tokens, size)), 1.0), depth + 1.0)
        return DraftSizeChoice(size, tokens, per_pass * batch / (verify + depth * draft(size)))

    return max((evaluate(size) for size in sizes), key=lambda choice: choice.speed)


def _check_points(
    budgets: Sequence[float], values: Sequence[float], minimum: int = MIN_BUDGETS
) -> tuple[np.ndarray, np.ndarray]:
    """Check points, and return (budgets, values), float64. They are sorted, except for joint laws (`minimum` 2)."""
    x, y = np.asarray(budgets, np.float64), np.asarray(values, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise UsageError(f"each budget needs one value, but there are {x.size} budgets and {y.size} values")
    if not ((x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)).all():
        raise UsageError("budgets and values must be numbers above 0")
    if len(np.unique(x)) < minimum:
        raise UsageError(f"a law needs runs of {minimum} different budgets, but these have {len(np.unique(x))}")
    order = np.argsort(x, kind="stable") if minimum == MIN_BUDGETS else np.arange(len(x))
    return x[order], y[order]


def _equal_weights(x: np.ndarray) -> np.ndarray:
    """Return weights that give every budget the same total weight for any number of seeds."""
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    return 1.0 / count[index]


def _fit_line(t: np.ndarray, z: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return (a, c) of z = a t + c."""
    mean_t, mean_z = np.average(t, weights=weight), np.average(z, weights=weight)
    slope = np.sum(weight * (t - mean_t) * (z - mean_z)) / np.sum(weight * (t - mean_t) ** 2)
    return float(slope), float(mean_z - slope * mean_t)


def _error_at_largest(form: Form, x: np.ndarray, y: np.ndarray) -> float:
    """Return the absolute error at the largest budget of the law that is fitted without it."""
    largest = x == x[-1]
    slope, intercept = _fit_line(np.log(x[~largest]), _transform(form, y[~largest]), _equal_weights(x[~largest]))
    return float(abs(_untransform(form, slope * np.log(x[-1]) + intercept) - y[largest].mean()))


def _joint_terms(d, n) -> np.ndarray:
    return np.stack(np.broadcast_arrays(1.0, d, n, d * n))


def _transform(form: Form, y):
    return np.log(y) if form == "log-log" else y


def _untransform(form: Form, z):
    return np.exp(z) if form == "log-log" else z
