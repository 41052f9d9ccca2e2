"""SpecKV: a small network chooses the draft length from statistics of the drafter's distributions.

SpecKV: Adaptive Speculative Decoding with Compression-Aware Gamma Selection (2026), arXiv 2605.02888.

Rule: a(g) = MLP(mean entropy, mean confidence, largest entropy, smallest confidence, compression code, g) predicts the
share of accepted tokens in a draft of g tokens. The next draft has argmax_g (a(g) g + 1) tokens. With costs, the
objective is (a(g) g + 1) / cost(g).
Guarantee: distribution, as for every controller.
Deviations: the paper evaluates its rule offline, on the statistics of the same draft whose length it chooses. Here they
come from the previous step, from its accepted tokens and its first rejected one. The first step drafts `start` tokens.
The paper's objective assumes equal costs for all lengths, so it nearly always chooses the longest draft; set
`round_costs` to avoid that. Activation (ReLU), loss (binomial) and feature scaling are ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit
from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.trained_arrays import find_file, read_array, write_arrays
from specjax.numerics.validation import check_integer
from specjax.types import Array, Controller, Info, Signals

HIDDEN = 16
SHAPES: dict[str, tuple[int, ...]] = {"w1": (6, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN,), "b2": ()}
"""The shapes of the network's arrays."""


class Weights(NamedTuple):
    """Parameters of the network: 6 features, 16 hidden units, one output."""

    w1: Array | np.ndarray  # float32[6, 16]
    b1: Array | np.ndarray  # float32[16]
    w2: Array | np.ndarray  # float32[16]
    b2: Array | np.ndarray  # float32[]


def spec_kv(
    weights: Weights,
    *,
    gammas: tuple[int, ...] = (2, 4, 6, 8),
    start: int = 4,
    code: int = 0,
    round_costs: tuple[float, ...] | None = None,
) -> Controller:
    """Build a controller that drafts one of `gammas` tokens, per row. The drafter must return its distributions.

    The weights become constants of the program, so other weights compile another program.

    Args:
      weights: the result of `fit_spec_kv` or `read_spec_kv`.
      code: compression of the drafter: 0 float16, 1 int8, 2 nf4.
      round_costs: cost of a step with each of `gammas`, draft and target together, in any unit. None selects the
        paper's objective.

    Raises: UsageError for weights of other shapes, gammas below 1, another code, or costs that are not one positive
      number for each.
    """
    shapes = [np.shape(x) for x in weights]
    if shapes != list(SHAPES.values()):
        raise UsageError(f"weights must have the shapes (6, {HIDDEN}), ({HIDDEN},), ({HIDDEN},) and (), not {shapes}")
    if not gammas or min(*gammas, start) < 1:
        raise UsageError(f"gammas and start must be at least 1, not {gammas} and {start}")
    if code not in (0, 1, 2):
        raise UsageError(f"code must be 0, 1 or 2, not {code}")
    if round_costs is not None and not (len(round_costs) == len(gammas) and all(0 < c < math.inf for c in round_costs)):
        raise UsageError(f"round_costs must contain one positive number for each of {gammas}, not {round_costs}")
    packed = tuple(np.asarray(x, np.float32).tobytes() for x in weights)
    return _functions(packed, gammas, start, code, round_costs)


@functools.cache
def _functions(packed: tuple[bytes, ...], gammas, start, code, round_costs) -> Controller:
    w1, b1, w2, b2 = (np.frombuffer(x, np.float32) for x in packed)
    weights = Weights(w1.reshape(6, HIDDEN), b1, w2, b2[0])

    def update(gamma: Array, info: Info) -> Array:
        assert info.signals is not None
        has_signals = jnp.any(info.signals.judged, 1)
        x = jnp.repeat(features(info.signals, code)[:, None], len(gammas), 1)  # [B, G, 5]
        lengths = jnp.broadcast_to(jnp.asarray(gammas, jnp.float32)[:, None], (*x.shape[:2], 1))
        best = choose(predict(weights, jnp.concatenate([x, lengths], -1)), gammas, round_costs)
        return jnp.where(info.active & has_signals, best, gamma)

    return Controller(
        init=lambda batch: jnp.full((batch,), start, jnp.int32),
        limit=lambda gamma: gamma,
        update=update,
        reads_signals=True,
    )


def read_spec_kv(source: str | Path) -> Weights:
    """Read the network of a .safetensors or PyTorch file, as float32. Raises: UsageError for a file of other arrays."""
    file = find_file(source, "SpecKV's network")
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        for name, shape in SHAPES.items():
            if name not in tensors or tensors[name].shape != shape:
                raise UsageError(f"{file} has no array {name} of shape {list(shape)}, which SpecKV's network needs")
        unknown = sorted(tensors.keys() - SHAPES)
        if unknown:
            raise UsageError(
                f"{file} has {quote(unknown[0])}, which is not part of SpecKV's network; give its own file"
            )
        return Weights(*(read_array(tensors, name, file) for name in SHAPES))


def save_spec_kv(file: str | Path, weights: Weights) -> None:
    """Write a .safetensors file for `read_spec_kv`. Raises: UsageError if it cannot be written."""
    write_arrays(file, {name: np.array(x, np.float32) for name, x in weights._asdict().items()})


def predict(weights: Weights, x: Array) -> Array:
    """Predict the share of accepted tokens, float32[...], from features float32[..., 6]. The last feature is g."""
    return jax.nn.sigmoid(jax.nn.relu(x @ weights.w1 + weights.b1) @ weights.w2 + weights.b2)


def choose(acceptance: Array, gammas: Sequence[int], round_costs: Sequence[float] | None = None) -> Array:
    """Return the best of `gammas`, int32[...], given their acceptance rates float32[..., G]. Ties go to the first."""
    return jnp.asarray(gammas, jnp.int32)[jnp.argmax(scores(acceptance, gammas, round_costs), -1)]


def scores(acceptance: Array, gammas: Sequence[int], round_costs: Sequence[float] | None = None) -> Array:
    """Return the expected tokens of a step, float32[..., G], or tokens per unit of cost if costs are given."""
    tokens = acceptance * jnp.asarray(gammas, jnp.float32) + 1
    return tokens if round_costs is None else tokens / jnp.asarray(round_costs, jnp.float32)


def features(signals: Signals, code: int = 0) -> Array:
    """Return float32[B, 5]: mean entropy, mean confidence, largest entropy, smallest confidence, compression code."""
    judged = signals.judged
    count = jnp.maximum(jnp.sum(judged, 1), 1)
    mean = lambda x: jnp.sum(jnp.where(judged, x, 0.0), 1) / count
    return jnp.stack(
        [
            mean(signals.entropy),
            mean(signals.confidence),
            jnp.max(jnp.where(judged, signals.entropy, 0.0), 1),
            jnp.min(jnp.where(judged, signals.confidence, 1.0), 1),
            jnp.full(count.shape, code, jnp.float32),
        ],
        1,
    )


def records(rounds: Iterable[Info], code: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Collect training data for `fit` from the `info` of successive steps of `stream`.

    The controller of that run must have `reads_signals`, such as `fixed(g)._replace(reads_signals=True)`. Record one
    run for every g. Each step is paired with the features of the previous step of its row.

    Returns: features float32[R, 5], gamma float32[R] and accepted tokens float32[R].
    """
    samples: list[tuple] = []
    previous = has_previous = None
    for info in rounds:
        assert info.signals is not None
        drafted, accepted, active = (np.asarray(x) for x in (info.drafted_depth, info.accepted, info.active))
        current, has_signals = np.asarray(features(info.signals, code)), np.asarray(jnp.any(info.signals.judged, 1))
        if previous is None or has_previous is None:
            previous, has_previous = current, has_signals
            continue
        use = has_previous & active & (drafted > 0)
        samples += zip(previous[use], drafted[use], accepted[use], strict=True)
        previous, has_previous = np.where(has_signals[:, None], current, previous), has_previous | has_signals
    columns = zip(*samples, strict=True) if samples else ((), (), ())
    x, gamma, taken = (np.array(column, np.float32) for column in columns)
    return x.reshape(-1, 5), gamma, taken


def fit(
    x: np.ndarray, gamma: np.ndarray, accepted: np.ndarray, *, key: Array, steps: int = 500, learning_rate: float = 0.02
) -> Weights:
    """Train the network on logged steps: features float32[R, 5], drafted tokens gamma [R] and accepted tokens [R].

    The optimizer is full-batch Adam on the binomial log-likelihood of `accepted` out of `gamma`.
    Raises: UsageError for no data, arrays of different lengths, or a number of steps below 0.
    """
    check_integer("steps", steps, 0)
    if not len(x) or not len(x) == len(gamma) == len(accepted):
        raise UsageError(f"fit needs as many gammas and accepted counts as features: {len(x)}, {len(gamma)} and "
                         f"{len(accepted)}")  # fmt: skip
    rows = np.concatenate([np.asarray(x, np.float32), np.asarray(gamma, np.float32)[:, None]], 1)
    mean, scale = rows.mean(0), rows.std(0)
    scale = np.where(scale > 1e-6, scale, 1.0)
    start = Weights(
        jax.random.normal(key, (6, HIDDEN)) * (2 / 6) ** 0.5, jnp.zeros(HIDDEN), jnp.zeros(HIDDEN), jnp.zeros(())
    )
    trained = _train((rows - mean) / scale, gamma, accepted, start, learning_rate, steps)
    w1 = trained.w1 / scale[:, None]
    return trained._replace(w1=w1, b1=trained.b1 - mean @ w1)


@jit(static_argnames="steps")
def _train(rows, gamma, accepted, start: Weights, learning_rate, steps: int) -> Weights:
    import optax  # imported here because no other decoding code needs it

    optimiser = optax.adam(learning_rate)

    def loss(weights: Weights) -> Array:
        a = jnp.clip(predict(weights, rows), 1e-6, 1 - 1e-6)
        return -jnp.sum(accepted * jnp.log(a) + (gamma - accepted) * jnp.log1p(-a)) / jnp.sum(gamma)

    def step(carry, _):
        weights, state = carry
        updates, state = optimiser.update(jax.grad(loss)(weights), state)
        return (optax.apply_updates(weights, updates), state), None

    return jax.lax.scan(step, (start, optimiser.init(start)), None, steps)[0][0]
