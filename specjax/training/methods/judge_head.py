"""Training Judge's head: which tokens of a text are right, by the target's own features of them (`verifiers.judge`).

Bachmann, Anagnostidis, Pumarola, Georgopoulos, Sanakoyeu, Du, Schönfeld, Thabet, Kohler: Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment (ICLR 2025), arXiv 2501.19309.
Of right and wrong answers to questions, in each of which the first wrong token is known, with h_i the target's feature
of token i once it has read it, and y_i whether the token is right:

    minimise the mean of c(y_i) BCE(sigmoid(w . (h_i - mean) / scale + b), y_i) + l2 |w|^2 / 2

Each class counts as much as the other; mean and scale, of the features, are part of w and b in the end.
Guarantee: that of the rule, which is lossy.
Deviations: what the paper leaves open is our own: tokens behind the first wrong one are left out (`after`), class
weights, the penalty, L-BFGS on all tokens at once, and the threshold, which lets a given share of wrong tokens through.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.validation import check_range
from specjax.training.data.packing import Lesson, Text, pack
from specjax.training.objectives.unroll import one_pass
from specjax.types import Array, Target
from specjax.verifiers.lossy.judge import log_odds_of


class Judged(NamedTuple):
    """An answer, and where it goes wrong."""

    text: Text
    wrong: int | None = None  # the place in the text of its first wrong token; None: all of it is right


class Judge(NamedTuple):
    """Log-odds w . h + b that a token is right: what `verifiers.judge` and `save_judge` take."""

    weight: np.ndarray  # float32[D]
    bias: float

    def __call__(self, features) -> np.ndarray:
        return np.asarray(features, np.float64) @ self.weight + self.bias


def labels_of(judged: Judged, after: Literal["drop", "wrong"] = "drop") -> np.ndarray:
    """int8[T]: 1 right, 0 wrong, -1 not counted, as prompts are. after: what tokens behind a wrong one count for."""
    (tokens, answer), wrong = judged
    if wrong is not None and not answer <= wrong < len(tokens):
        raise UsageError(f"the first wrong token is one of the answer, {answer} to {len(tokens) - 1}, not {wrong}")
    place = np.arange(len(tokens))
    end = len(tokens) if wrong is None else wrong
    label = np.where(place < end, 1, 0 if after == "wrong" else -1)
    label[end : end + 1] = 0
    return np.where(place < answer, -1, label).astype(np.int8)


def examples(
    target: Target, judged: Sequence[Judged], *, rows: int, length: int, after: Literal["drop", "wrong"] = "drop"
) -> tuple[np.ndarray, np.ndarray]:
    """(float32[N, D], int8[N]): features and labels of all tokens that count. Texts are cut at `length`.

    Raises: UsageError without texts.
    """
    if not judged:
        raise UsageError("a judge learns from answers of which the first wrong token is known, and there are none")
    features, labels = [], []
    lessons = pack([one.text for one in judged], rows, length, alone=True)
    for i, lesson in enumerate(lessons):
        hidden = np.asarray(_hidden(target, lesson))
        for row, one in zip(hidden, judged[i * rows :], strict=False):
            label = labels_of(one, after)[:length]
            features.append(row[: len(label)][label >= 0])
            labels.append(label[label >= 0])
    return np.concatenate(features), np.concatenate(labels)


@jax.jit
def _hidden(target: Target, lesson: Lesson) -> Array:
    return one_pass(target.model, target.params, lesson)[0].hidden.astype(jnp.float32)


def loss_of(params: tuple[Array, Array], features: Array, labels: Array, share: Array, l2: float) -> Array:
    """float32[]. features: standardised [N, D]. share: float32[N], what each token counts."""
    weight, bias = params
    odds = features @ weight + bias
    each = jax.nn.softplus(odds) - labels * odds
    return jnp.sum(share * each) / jnp.sum(share) + l2 / 2 * jnp.sum(weight**2)


def fit_judge(features: np.ndarray, labels: np.ndarray, *, l2: float = 1e-3, steps: int = 200) -> Judge:
    """The head of features float32[N, D] and labels int8[N]. Raises: UsageError for labels that are not 0 and 1, or of
    one kind only."""
    labels = np.asarray(labels)
    if not np.isin(labels, (0, 1)).all():
        raise UsageError("labels are 1 of right tokens and 0 of wrong ones; leave out what is not counted")
    labels = labels.astype(np.int8)
    counts = np.bincount(labels, minlength=2)
    if not counts.all():
        raise UsageError(f"a judge learns from right and wrong tokens, and these are {counts[1]} and {counts[0]}")
    features = np.asarray(features, np.float32)
    mean, scale = features.mean(0), np.maximum(features.std(0), 1e-6)
    share = (len(labels) / (2 * counts))[labels].astype(np.float32)
    weight, bias = _fit((features - mean) / scale, labels.astype(np.float32), share, l2, steps)
    weight = np.asarray(weight) / scale
    return Judge(weight, float(bias - weight @ mean))


@functools.partial(jax.jit, static_argnames="steps")
def _fit(features: Array, labels: Array, share: Array, l2: float, steps: int) -> tuple[Array, Array]:
    import optax

    loss = functools.partial(loss_of, features=features, labels=labels, share=share, l2=l2)
    optimizer = optax.lbfgs()
    start = jnp.zeros(features.shape[1]), jnp.zeros(())

    def step(carry, _):
        params, state = carry
        value, gradient = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = optimizer.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (start, optimizer.init(start)), None, steps)[0][0]


SURE = 16.0
"""Log-odds of which the chance is still below 1 in float32."""


def threshold_for(odds: np.ndarray, labels: np.ndarray, *, wrong: float = 0.02) -> float:
    """The lowest chance above which at most a share of the wrong tokens is accepted, of texts never trained on.

    Raises: UsageError for no share, without wrong tokens, or for a judge so sure of them that no chance below 1 in
      float32 tells them.
    """
    check_range("wrong", wrong, lambda x: (x >= 0) & (x <= 1), "a share from 0 to 1")
    bad = np.sort(np.asarray(odds, np.float32)[np.asarray(labels) == 0])[::-1]
    if not len(bad):
        raise UsageError("a threshold is chosen by wrong tokens, and there are none; hold some wrong answers out")
    most = int(wrong * len(bad))
    if most >= len(bad):
        return 0.0
    if bad[most] > SURE:
        raise UsageError(
            f"the judge is so sure of wrong tokens (log-odds {bad[most]:.0f}) that no chance below 1 tells them; train "
            "it with a larger l2, or on more texts"
        )
    chance = max(np.float32(jax.nn.sigmoid(bad[most])), np.finfo(np.float32).tiny)
    while _served(chance) < bad[most]:  # the rule reads float32, whose log-odds are wide apart where they are high
        chance = np.nextafter(chance, np.float32(1))
    return float(chance)


_served = jax.jit(log_odds_of)
