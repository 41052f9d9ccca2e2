"""What more training would bring: laws of tokens per pass over budgets, fitted to runs that there are.

Yan, Zhu, Jiang, Wang, Chen, Zhang, Liao, Cui, Zhang, Song, Zhu: Scaling Laws for Speculative Decoding (2025),
arXiv 2505.07858, finds tokens per pass log-linear in the tokens of training, in the draft's capacity and, as speed, in
the batch. Of a budget x, be it tokens, parameters or rows:

    log-linear   y = a ln x + c
    log-log      ln y = a ln x + c

Rule: both by least squares, weighted where the runs have seeds; the law whose fit without the largest budget says best
what that one gave is taken. Its interval is that of a bootstrap: of residuals, each grown by its leverage.
Deviations: the paper's coefficients and exact forms are not known to us; those above, how one is chosen, where it
saturates (`before_saturation`) and the joint law are our own.
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
LEAST = 3  # budgets: two that fit a line, and one that it is to predict
RIDGE = 1e-3  # on the interaction of the joint law, in units in which its term has deviation 1


class Range(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """Tokens per pass, or another positive number, over budgets."""

    form: Form
    slope: float  # a
    start: float  # c
    interval: Range  # of the slope, 95 %
    r2: float  # of ln y for log-log
    error: float  # of the largest budget's y, by the law fitted without it
    budgets: tuple[float, ...]  # that it was fitted to
    slopes: np.ndarray  # float64[N, 2], (a, c) of the bootstrap

    def __call__(self, budget):
        """What a budget gives: float, or an array for an array."""
        return _back(self.form, self.slope * np.log(budget) + self.start)

    def range(self, budget: float) -> Range:
        """Of what a budget gives on average, 95 %."""
        said = _back(self.form, self.slopes @ np.array([np.log(budget), 1.0]))
        return Range(*(float(x) for x in np.quantile(said, [0.025, 0.975])))

    def budget_for(self, value: float) -> float:
        """The budget that gives so much; infinite if none does."""
        if self.slope <= 0:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(np.exp((_forth(self.form, np.float64(value)) - self.start) / self.slope))


def fit(
    budgets: Sequence[float], values: Sequence[float], *, form: Form | None = None, samples: int = 1000, seed: int = 0
) -> Law:
    """The law of runs, of which several may have one budget (seeds); None: the form that predicts the largest better.

    Raises: UsageError for fewer than 3 different budgets, numbers that are not above 0, or an unknown form.
    """
    x, y = _points(budgets, values)
    if form is not None and form not in FORMS:
        raise UsageError(f'form must be {" or ".join(FORMS)}, not "{form}"')
    check_integer("samples", samples)
    check_integer("seed", seed, minimum=0)
    errors = {each: _error_at_last(each, x, y) for each in FORMS}
    chosen = min(FORMS, key=errors.__getitem__) if form is None else form
    t, z = np.log(x), _forth(chosen, y)
    weight = _weights(x)
    slope, start = _line(t, z, weight)
    residual = z - (slope * t + start)
    around = z - np.average(z, weights=weight)
    r2 = 1 - float(np.sum(weight * residual**2)) / max(float(np.sum(weight * around**2)), 1e-300)
    centred = t - np.average(t, weights=weight)
    leverage = weight * (1 / weight.sum() + centred**2 / np.sum(weight * centred**2))
    grown = residual / np.sqrt(np.maximum(1 - leverage, 1e-9))
    drawn = np.random.default_rng(seed).choice(grown - grown.mean(), (samples, len(z)))
    slopes = np.array([_line(t, slope * t + start + noise, weight) for noise in drawn])
    low, high = np.quantile(slopes[:, 0], [0.025, 0.975])
    return Law(chosen, slope, start, Range(float(low), float(high)), r2, errors[chosen], tuple(x.tolist()), slopes)


def before_saturation(
    budgets: Sequence[float], values: Sequence[float], *, tolerance: float = 0.02
) -> tuple[np.ndarray, np.ndarray]:
    """(budgets, values) float64, without those beyond the knee: the last budgets, if they all lie below the law of
    those before by more than `tolerance` of it, and the more so the larger they are."""
    x, y = _points(budgets, values)
    different = np.unique(x)
    for knee in range(LEAST, len(different)):
        below, beyond = x < different[knee], different[knee:]
        law = fit(x[below], y[below], samples=1)
        short = np.array([law(budget) - y[x == budget].mean() for budget in beyond]) / law(beyond)
        if (short > tolerance).all() and (np.diff(short) > 0).all():
            return x[below], y[below]
    return x, y


@dataclass(frozen=True)
class JointLaw:
    """y = c + a ln D + b ln N + d ln D ln N, of tokens of training D and parameters of the draft N."""

    weights: tuple[float, float, float, float]  # c, a, b, d

    def __call__(self, tokens, parameters):
        return np.tensordot(np.array(self.weights), _terms(np.log(tokens), np.log(parameters)), 1)


def fit_joint(
    tokens: Sequence[float], parameters: Sequence[float], values: Sequence[float], *, interaction: bool = True
) -> JointLaw:
    """By least squares, with a ridge on the interaction. Raises: UsageError for runs that do not tell the two apart."""
    d, y = _points(tokens, values, least=2)
    n, _ = _points(parameters, values, least=2)
    columns = _terms(np.log(d), np.log(n)).T[:, : 4 if interaction else 3]
    product = (np.log(d) - np.log(d).mean()) * (np.log(n) - np.log(n).mean())
    ridge = np.zeros((1, columns.shape[1]))
    if interaction:
        ridge[0, 3] = np.sqrt(RIDGE * len(y)) * max(float(product.std()), 1e-12)
    if np.linalg.matrix_rank(columns[:, :3]) < 3:
        raise UsageError("tokens and parameters rise together in these runs; give some in which one alone does")
    weights = np.linalg.lstsq(np.vstack([columns, ridge]), np.append(y, 0.0), rcond=None)[0]
    c, a, b, e = (*weights, 0.0)[:4]
    return JointLaw((float(c), float(a), float(b), float(e)))


class Choice(NamedTuple):
    """How large a draft to train on how many tokens."""

    parameters: float
    tokens: float
    speed: float  # tokens per unit of time


def choose(
    law: Callable[[float, float], float],
    sizes: Sequence[float],
    compute: float,
    *,
    verify: float,
    draft: Callable[[float], float],
    depth: int,
    batch: int = 1,
) -> Choice:
    """What serves fastest of drafts trained with `compute` floating-point operations: 6 N D of them.

    Args:
      law: (tokens, parameters) -> tokens per pass. sizes: parameters of the drafts to choose from.
      verify: time of a pass of the target. draft: parameters -> time of one of the draft, `depth` of which a round has.
    """
    if not len(sizes) or not min(sizes) > 0 or not compute > 0:
        raise UsageError(f"give sizes of drafts and a compute above 0, not {list(sizes)} and {compute}")

    def of(size: float) -> Choice:
        tokens = compute / (6 * size)
        passes = min(max(float(law(tokens, size)), 1.0), depth + 1.0)
        return Choice(size, tokens, passes * batch / (verify + depth * draft(size)))

    return max((of(size) for size in sizes), key=lambda choice: choice.speed)


def _points(budgets: Sequence[float], values: Sequence[float], least: int = LEAST) -> tuple[np.ndarray, np.ndarray]:
    """float64 each, by budget."""
    x, y = np.asarray(budgets, np.float64), np.asarray(values, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise UsageError(f"each budget has one value: there are {x.size} budgets and {y.size} values")
    if not ((x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)).all():
        raise UsageError("budgets and values must be numbers above 0")
    if len(np.unique(x)) < least:
        raise UsageError(f"a law needs runs of {least} different budgets, and these have {len(np.unique(x))}")
    order = np.argsort(x, kind="stable") if least == LEAST else np.arange(len(x))
    return x[order], y[order]


def _weights(x: np.ndarray) -> np.ndarray:
    """Such that every budget counts the same, however many seeds it has."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return 1.0 / count[place]


def _line(t: np.ndarray, z: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """(a, c) of z = a t + c."""
    middle, level = np.average(t, weights=weight), np.average(z, weights=weight)
    slope = np.sum(weight * (t - middle) * (z - level)) / np.sum(weight * (t - middle) ** 2)
    return float(slope), float(level - slope * middle)


def _error_at_last(form: Form, x: np.ndarray, y: np.ndarray) -> float:
    last = x == x[-1]
    slope, start = _line(np.log(x[~last]), _forth(form, y[~last]), _weights(x[~last]))
    return float(abs(_back(form, slope * np.log(x[-1]) + start) - y[last].mean()))


def _terms(d, n) -> np.ndarray:
    return np.stack(np.broadcast_arrays(1.0, d, n, d * n))


def _forth(form: Form, y):
    return np.log(y) if form == "log-log" else y


def _back(form: Form, z):
    return np.exp(z) if form == "log-log" else z
