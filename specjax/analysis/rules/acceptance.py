"""Acceptance probability of each rule for n siblings at a node with distributions p and q, and the best possible one.

Most rules have a closed form (the papers are named in each rule's own file):

    standard              sum min(p, q), one draft
    specinfer             1 - prod_j (1 - sum min(r_j, q)), r_1 = p, r_{j+1} = norm([r_j - q]+)
    spectr                1 - (1 - beta(rho))^n
    multipath_block       sum min(p, q'), q' the distribution of the draft with the largest p/q
    greedy_multi_draft    P(T) + sum outside T of min(p, q'), T the n - 1 likeliest drafts
    sample_and_match      P(T), T the n likeliest drafts
    recursive_rejection   like specinfer, but d depends on the rejected tokens: summed over them if they are few, else
                          drawn from their distribution norm([d - r]+), with exact acceptance along each draw
    coupled               shared noise: P(the drafter's top n of log q + G contain the argmax of log p + G)

With one draft, `coupled` is sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), at least (1 - TV) / (1 + TV) (Daliri, Musco,
Suresh: Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024, arXiv 2408.07978). With more
drafts it is simulated.
Every other `Verifier` is simulated on trees of one level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.analysis.rules.optimal import check_distributions, optimal_acceptance, order_by_ratio
from specjax.arrays.modes import jit, with_standard_modes
from specjax.catalog.method import Guarantee
from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.trees.builders.static import How
from specjax.types import Context, Draws, Sampling
from specjax.verifiers import VERIFIERS, Verifier
from specjax.verifiers.exact.spectr import division_factor

SAMPLES = 256
ELEMENTS = 1 << 21
"""Largest number of elements in one array. Sequences of rejected tokens are summed while they fit, else drawn.
Simulations run in parts of this size."""


class Acceptance(NamedTuple):
    """The acceptance of one rule, per row of distributions."""

    rule: str
    draws: Draws
    n: int
    value: np.ndarray  # float64[...], the probability that one of the n drafts is accepted
    standard_error: np.ndarray  # float64[...], 0 where the value is exact


@with_standard_modes
def acceptance(
    rule: str | Verifier,
    p,
    q,
    n: int,
    *,
    draws: Draws | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Acceptance:
    """Return the probability that `rule` accepts one of n siblings.

    Args:
      rule: "coupled", a name of `specjax.verifiers.VERIFIERS`, or a Verifier.
      p, q: distributions float[..., V] of target and draft.
      n: number of siblings.
      draws: the way to draw siblings, for simulated rules that support several. Default: the first that can draw n.
      samples, seed: samples per row and seed of a simulation. Every row has its own randomness.

    Raises: UsageError for arrays that are not distributions, an unknown rule, or more drafts than a rule supports.
    """
    p, q = check_distributions(p, q, n)
    if samples < 2:
        raise UsageError(f"samples must be at least 2, not {samples}")
    shape, rows = p.shape[:-1], (p.reshape(-1, p.shape[-1]), q.reshape(-1, p.shape[-1]))
    name, verifier = _resolve(rule)
    if name == "standard" and n > 1:
        raise UsageError(f"the standard rule verifies one draft per node, not {n}")
    formula = FORMULAS.get(name)
    if formula is not None and verifier is VERIFIERS.get(name) and draws in (None, formula.draws):
        how: Draws = formula.draws
        value, error = formula.function(*rows, n, samples, seed)
    else:
        how = kind = _kind(verifier, n, draws)
        value, error = _simulate(verifier, kind, *rows, n, samples, seed)
    return Acceptance(name, how, n, value.reshape(shape), error.reshape(shape))


@with_standard_modes
def acceptance_curve(rule: str | Verifier, p, q, drafts: Sequence[int] = (1, 2, 3, 4), **options) -> list[Acceptance]:
    """Return `acceptance` for each number of drafts."""
    return [acceptance(rule, p, q, n, **options) for n in drafts]


class Entry(NamedTuple):
    """A rule with n drafts: means over all rows, and the gap to the best possible rule for the same draws."""

    rule: str
    guarantee: Guarantee
    draws: Draws
    n: int
    acceptance: float
    standard_error: float | None  # over rows; None for one row
    bound: float  # best possible acceptance for these draws; greedy_multi_draft and sample_and_match attain theirs
    gap: float
    gap_standard_error: float | None  # over rows, of the difference in each row


class Comparison(NamedTuple):
    """The result of `compare`."""

    entries: list[Entry]
    bounds: dict[str, dict[int, float]]  # mean of `optimal_acceptance` by draws and n
    rows: int


@with_standard_modes
def compare(
    p,
    q,
    drafts: Sequence[int] = (2, 3, 4),
    rules: Sequence[str] | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare rules for every number of drafts on the same distributions float[..., V]. The standard rule has n = 1.

    Raises: UsageError as in `acceptance`, or if drafts is empty.
    """
    if not drafts:
        raise UsageError("drafts is empty; give at least one number of drafts per node")
    p, q = check_distributions(p, q, min(drafts))
    sizes = sorted({1, *drafts})
    kinds: tuple[Literal["with_replacement", "without_replacement"], ...] = ("with_replacement", "without_replacement")
    best: dict[str, dict[int, np.ndarray]]
    best = {kind: {n: optimal_acceptance(p, q, n, kind).acceptance for n in sizes} for kind in kinds}
    entries = []
    for rule in rules if rules is not None else FORMULAS:
        for n in (1,) if rule == "standard" else sorted(set(drafts)):
            result = acceptance(rule, p, q, n, samples=samples, seed=seed)
            bound = best.get("with_replacement" if result.draws == "chain" else result.draws, {}).get(n, result.value)
            errors = [_error_of_mean(x) for x in (result.value, bound - result.value)]
            mean, limit = float(result.value.mean()), float(bound.mean())
            guarantee = VERIFIERS[rule].guarantee if rule in VERIFIERS else "distribution"
            entries.append(Entry(rule, guarantee, result.draws, n, mean, errors[0], limit, limit - mean, errors[1]))
    means = {kind: {n: float(x.mean()) for n, x in by_n.items()} for kind, by_n in best.items()}
    return Comparison(entries, means, p[..., 0].size)


def _error_of_mean(x: np.ndarray) -> float | None:
    return float(x.std(ddof=1) / np.sqrt(x.size)) if x.size > 1 else None


def _resolve(rule: str | Verifier) -> tuple[str, Verifier | None]:
    if isinstance(rule, Verifier):
        return rule.name, rule
    if rule not in FORMULAS and rule not in VERIFIERS:
        raise UsageError(f'unknown rule "{rule}"; choose one of {", ".join({**FORMULAS, **VERIFIERS})}')
    return rule, VERIFIERS.get(rule)


def _exact(function):
    """Wrap a closed form (p, q, n) -> float64[R] as a `Formula` with standard error 0."""

    @functools.wraps(function)
    def with_error(p, q, n, samples, seed):
        value = np.clip(function(p, q, n), 0.0, 1.0)
        return value, np.zeros_like(value)

    return with_error


def _norm(x: np.ndarray) -> np.ndarray:
    total = x.sum(-1, keepdims=True)
    return np.where(total > 0, x / np.where(total > 0, total, 1.0), 0.0)


def _likeliest(q: np.ndarray, n: int) -> np.ndarray:
    """Return bool[R, V], the n most probable tokens of q. Ties go to the lower id; tokens without mass are left out."""
    selected = np.zeros(q.shape, bool)
    if n:
        np.put_along_axis(selected, np.argsort(-q, 1, kind="stable")[:, :n], True, 1)
    return selected & (q > 0)


@_exact
def _standard(p, q, n):
    return np.minimum(p, q).sum(1)


@_exact
def _specinfer(p, q, n):
    r, rejected = p, np.ones(len(p))
    for _ in range(n):
        rejected = rejected * (1 - np.minimum(r, q).sum(1))
        r = _norm(np.maximum(r - q, 0.0))
    return 1 - rejected


@_exact
def _spectr(p, q, n):
    as_device = lambda x: jnp.asarray(x, jnp.float32)
    rho = np.asarray(division_factor(as_device(p), as_device(q), jnp.full(len(p), n)), np.float64)
    beta = np.minimum(np.minimum(q, p / rho[:, None]).sum(1), 1.0)
    return 1 - (1 - beta) ** n


@_exact
def _multipath_block(p, q, n):
    order = order_by_ratio(p, q)
    in_order = np.take_along_axis(q, order, 1)
    below = np.pad(np.minimum(np.cumsum(in_order, 1), 1.0), ((0, 0), (1, 0))) ** n
    return np.minimum(np.take_along_axis(p, order, 1), np.diff(below, axis=1)).sum(1)


@_exact
def _greedy_multi_draft(p, q, n):
    fixed = _likeliest(q, n - 1)
    sampled = _norm(np.where(fixed, 0.0, q))
    return np.where(fixed, p, np.minimum(p, sampled)).sum(1)


@_exact
def _sample_and_match(p, q, n):
    return np.where(_likeliest(q, n), p, 0.0).sum(1)


def _recursive_rejection(p, q, n, samples, seed):
    rows = [_reject_all(p[i], q[i], n, samples, np.random.default_rng((seed, i))) for i in range(len(p))]
    rejected, error = np.array(rows).T
    return np.clip(1 - rejected, 0.0, 1.0), error


def _reject_all(p: np.ndarray, q: np.ndarray, n: int, samples: int, rng) -> tuple[float, float]:
    """Return the probability that all n siblings drawn without replacement are rejected, and its standard error."""
    n = min(n, int((q > 0).sum()))  # no more drafts than tokens with mass
    count = float((q > p).sum()) * float((q > 0).sum()) ** max(n - 2, 0)
    if n == 1 or count * len(p) <= ELEMENTS:
        return float(_rejection_weights(p, q, n, 1, None).sum()), 0.0
    weights = np.concatenate([_rejection_weights(p, q, n, part, rng) for part in _parts(samples, len(p))])
    return float(weights.mean()), float(weights.std(ddof=1) / np.sqrt(samples))


def _rejection_weights(p: np.ndarray, q: np.ndarray, n: int, ways: int, rng) -> np.ndarray:
    """Return float64[ways], the probability that all n are rejected along each sequence of rejected tokens.

    Without `rng` all sequences are enumerated, and each weight includes the probability of its sequence.
    """
    r, d, weight = p[None].repeat(ways, 0), q[None].repeat(ways, 0), np.ones(ways)
    for num_drafts in range(n, 0, -1):
        weight = weight * np.maximum(1 - np.minimum(r, d).sum(1), 0.0)
        if num_drafts == 1:
            break
        distribution = _norm(np.maximum(d - r, 0.0))  # of a rejected token
        if rng is None:
            way, token = np.nonzero(distribution)
            weight = weight[way] * distribution[way, token]
        else:
            way, token = np.arange(ways), (np.cumsum(distribution, 1) < rng.random((ways, 1))).sum(1)
            token = np.minimum(token, distribution.shape[1] - 1)
        r, d = _norm(np.maximum(r - d, 0.0))[way], d[way]
        d[np.arange(len(way)), token] = 0.0
        d = _norm(d)
    return weight


def _parts(samples: int, vocab: int) -> list[int]:
    """Split `samples` into parts of at most ELEMENTS numbers."""
    size = max(1, ELEMENTS // vocab)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _coupled(p, q, n, samples, seed):
    if n == 1:
        value = _coupled_one(p, q)
        return value, np.zeros_like(value)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
    counts = np.zeros(len(p))
    for row in range(len(p)):
        rng = np.random.default_rng((seed, row))
        for part in _parts(samples, p.shape[1]):
            noise = rng.gumbel(size=(part, p.shape[1]))
            token = np.argmax(log_p[row] + noise, 1)[:, None]
            scores = log_q[row] + noise
            score = np.take_along_axis(scores, token, 1)
            counts[row] += np.sum((score[:, 0] > -np.inf) & ((scores > score).sum(1) < n))
    return _fraction(counts, samples)


def _fraction(counts: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    value = counts / samples
    return value, np.sqrt(value * (1 - value) / (samples - 1))


def _coupled_one(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return float64[R]. The sums over j split at p_j / q_j = p_i / q_i, so they are cumulative in that order."""
    order = order_by_ratio(p, q)
    p, q = (np.take_along_axis(x, order, 1) for x in (p, q))
    above = np.pad(np.cumsum(p[:, ::-1], 1)[:, ::-1], ((0, 0), (0, 1)))[:, 1:]
    both = (p > 0) & (q > 0)
    safe = lambda x: np.where(both, x, 1.0)
    with np.errstate(over="ignore"):
        rate = above / safe(p) + np.cumsum(q, 1) / safe(q)
    return np.where(both, 1 / rate, 0.0).sum(1)


class Formula(NamedTuple):
    """A closed form: (p[R, V], q[R, V], n, samples, seed) -> (float64[R], standard error float64[R])."""

    function: Callable[..., tuple[np.ndarray, np.ndarray]]
    draws: Draws


FORMULAS: dict[str, Formula] = {
    "standard": Formula(_standard, "chain"),
    "specinfer": Formula(_specinfer, "with_replacement"),
    "spectr": Formula(_spectr, "with_replacement"),
    "multipath_block": Formula(_multipath_block, "with_replacement"),
    "recursive_rejection": Formula(_recursive_rejection, "without_replacement"),
    "greedy_multi_draft": Formula(_greedy_multi_draft, "top_and_sampled"),
    "coupled": Formula(_coupled, "without_replacement"),
    "sample_and_match": Formula(_sample_and_match, "point_mass"),
}
"""The rules that `compare` compares."""


def _kind(verifier: Verifier | None, n: int, draws: Draws | None) -> How | Literal["chain"]:
    """Return the way to draw n siblings for a rule."""
    if verifier is None:
        raise UsageError("the coupled rule only supports drafts drawn without_replacement; leave draws out")
    kinds: tuple[How, ...] = ("without_replacement", "with_replacement", "top_and_sampled", "point_mass")
    one: tuple[Literal["chain"], ...] = ("chain",) if n == 1 else ()
    possible = [kind for kind in (*one, *kinds) if kind in verifier.draws and draws in (None, kind)]
    if not possible:
        raise UsageError(
            f"rule {verifier.name} supports drafts drawn {', '.join(verifier.draws)}, "
            f"not {n} drawn {draws or 'together'}"
        )
    return possible[0]


def _simulate(verifier, draws: How | Literal["chain"], p, q, n, samples, seed):
    how: How = "without_replacement" if draws == "chain" else draws
    builder, key = trees.branching((n,), how), threefry(seed)
    as_device = lambda x: jnp.asarray(x, jnp.float32)
    counts = [
        int(_accepted(verifier, as_device(p[row]), as_device(q[row]), jax.random.fold_in(key, row), builder, samples))
        for row in range(len(p))
    ]
    return _fraction(np.array(counts), samples)


@jit(static_argnames=("builder", "samples"))
def _accepted(verifier: Verifier, p, q, key, builder: trees.Builder, samples: int):
    """Return int32, the number of `samples` one-level trees with an accepted node."""
    keys = jax.random.split(key, (2, samples))
    zeros = jnp.zeros((samples,), jnp.int32)
    context = Context(zeros[:, None], zeros + 1, Sampling(temperature=jnp.float32(1.0)))
    logits = jnp.broadcast_to(jnp.log(q), (samples, q.shape[0]))
    grown, _ = trees.grow(
        builder, None, (), zeros, logits, keys[0], context, zeros + 1
    )  # one level needs no forward pass
    target_logits = jnp.broadcast_to(jnp.log(p), (*grown.tree.tokens.shape, p.shape[0]))
    return jnp.sum(verifier(keys[1], grown.tree, target_logits).num_nodes > 1)
