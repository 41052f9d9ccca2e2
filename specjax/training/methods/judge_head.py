"""Training of the head of Judge Decoding, which classifies tokens as correct from the target's features.

Bachmann, Anagnostidis, Pumarola, Georgopoulos, Sanakoyeu, Du, Schönfeld, Thabet, Kohler: Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment (ICLR 2025), arXiv 2501.19309.
The data are correct and wrong responses to questions, with the first wrong token of each. h_i is the target's feature
at token i, and y_i is 1 if the token is correct:

    minimise the mean of c(y_i) BCE(sigmoid(w . (h_i - mean) / scale + b), y_i) + l2 |w|^2 / 2

Both classes have the same total weight. The mean and scale of the features become part of w and b.
The verifier `verifiers.judge` uses the head.
Guarantee: lossy, like the verifier.
Deviations: the paper leaves several choices open. Our own choices are the class weights, the penalty, and L-BFGS on all
tokens in one batch. Tokens after the first wrong one are left out by default (`after_error`). The threshold accepts a
given share of wrong tokens.

    responses = [JudgedResponse(TrainingText(tokens, prompt_length), first_wrong), ...]
    features, labels = make_examples(target, responses, rows=8, length=512)
    judge = fit_judge(features, labels)
    threshold = threshold_for(judge(held_out_features), held_out_labels, wrong=0.02)
    specjax.decode(target, drafter, prompts, verifier=specjax.verifiers.judge(judge.weight, judge.bias, threshold))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.errors import UsageError
from specjax.numerics.validation import check_integer, check_range
from specjax.training.data.judged_files import JudgedResponse
from specjax.training.data.packing import PackedBatch, pack
from specjax.training.objectives.unroll import forward_packed
from specjax.types import Array, Target
from specjax.verifiers.lossy.judge import log_odds_of


class JudgeClassifier(NamedTuple):
    """A classifier for `verifiers.judge` and `save_judge`: w . h + b are the log-odds that a token is correct."""

    weight: np.ndarray  # float32[D]
    bias: float

    def __call__(self, features) -> np.ndarray:
        """Return the log-odds of features [..., D]."""
        return np.asarray(features, np.float64) @ self.weight + self.bias


def label_tokens(response: JudgedResponse, after_error: Literal["drop", "wrong"] = "drop") -> np.ndarray:
    """Return int8[T]: 1 for correct tokens, 0 for wrong ones, -1 for tokens that do not count, such as prompts.

    Args: after_error: "drop" leaves out the tokens after the first wrong one, and "wrong" labels them as wrong.
    """
    text, wrong = response
    count = len(text.tokens)
    is_response = np.zeros(count, bool)
    for begin, end in text.responses:
        is_response[begin:end] = True
    if wrong is not None and not (0 <= wrong < count and is_response[wrong]):
        places = " or ".join(f"{begin} to {end - 1}" for begin, end in text.responses if begin < end)
        raise UsageError(f"the first wrong token must be in a response, at {places or 'no place'}, not {wrong}")
    error = count if wrong is None else wrong
    label = np.where(np.arange(count) < error, 1, 0 if after_error == "wrong" else -1)
    label[error : error + 1] = 0
    return np.where(is_response, label, -1).astype(np.int8)


@with_standard_modes
def make_examples(
    target: Target, responses: Sequence[JudgedResponse], *, rows: int, length: int,
    after_error: Literal["drop", "wrong"] = "drop",
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return (float32[N, D] features, int8[N] labels) of all labelled tokens. Texts are cut at `length`.

    Raises: UsageError if there are no responses.
    """
    if not responses:
        raise UsageError("a judge needs responses with their first wrong tokens, but there are none")
    features, labels = [], []
    batches = pack([response.text for response in responses], rows, length, one_per_row=True)
    for i, packed in enumerate(batches):
        hidden = np.asarray(_run_target(target, packed))
        for row, response in zip(hidden, responses[i * rows :], strict=False):
            label = label_tokens(response, after_error)[:length]
            features.append(row[: len(label)][label >= 0])
            labels.append(label[label >= 0])
    return np.concatenate(features), np.concatenate(labels)


@jit
def _run_target(target: Target, packed: PackedBatch) -> Array:
    return forward_packed(target.model, target.params, packed)[0].hidden.astype(jnp.float32)


def compute_loss(params: tuple[Array, Array], features: Array, labels: Array, weights: Array, l2: float) -> Array:
    """Return the loss float32[]. Args: features: standardised [N, D]. weights: float32[N], one per token."""
    weight, bias = params
    odds = features @ weight + bias
    each = jax.nn.softplus(odds) - labels * odds
    return jnp.sum(weights * each) / jnp.sum(weights) + l2 / 2 * jnp.sum(weight**2)


@with_standard_modes
def fit_judge(features: np.ndarray, labels: np.ndarray, *, l2: float = 1e-3, steps: int = 200) -> JudgeClassifier:
    """Fit a head to features float32[N, D] and labels int8[N].

    Raises: UsageError for settings out of range, and labels other than 0 and 1, or of only one class.
    """
    check_integer("steps", steps, 0)
    check_range("l2", l2, lambda x: (x >= 0) & (x < np.inf), "a number of at least 0")
    labels = np.asarray(labels)
    if not np.isin(labels, (0, 1)).all():
        raise UsageError("labels must be 1 for correct tokens and 0 for wrong ones; leave other tokens out")
    labels = labels.astype(np.int8)
    counts = np.bincount(labels, minlength=2)
    if not counts.all():
        raise UsageError(f"a judge needs correct and wrong tokens, but there are {counts[1]} and {counts[0]}")
    features = np.asarray(features, np.float32)
    mean, scale = features.mean(0), np.maximum(features.std(0), 1e-6)
    weights = (len(labels) / (2 * counts))[labels].astype(np.float32)
    weight, bias = _minimise((features - mean) / scale, labels.astype(np.float32), weights, l2, steps)
    weight = np.asarray(weight) / scale
    return JudgeClassifier(weight, float(bias - weight @ mean))


@jit(static_argnames="steps")
def _minimise(features: Array, labels: Array, weights: Array, l2: float, steps: int) -> tuple[Array, Array]:
    """Return (weight, bias) after `steps` steps of L-BFGS."""
    import optax

    loss = functools.partial(compute_loss, features=features, labels=labels, weights=weights, l2=l2)
    optimizer = optax.lbfgs()
    start = jnp.zeros(features.shape[1]), jnp.zeros(())

    def step(carry, _):
        params, state = carry
        value, gradient = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = optimizer.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (start, optimizer.init(start)), None, steps)[0][0]


MAX_LOG_ODDS = 16.0
"""Largest log-odds whose probability is below 1 in float32."""


@with_standard_modes
def threshold_for(odds: np.ndarray, labels: np.ndarray, *, wrong: float = 0.02) -> float:
    """Return the lowest threshold that accepts at most a share `wrong` of the wrong tokens.

    The odds and labels must belong to texts that were not trained on.

    Raises: UsageError for a share out of range, or if there are no wrong tokens. It is also raised if the judge is so
      sure of wrong tokens that no probability below 1 in float32 rejects them.
    """
    check_range("wrong", wrong, lambda x: (x >= 0) & (x <= 1), "a share from 0 to 1")
    wrong_odds = np.sort(np.asarray(odds, np.float32)[np.asarray(labels) == 0])[::-1]
    if not len(wrong_odds):
        raise UsageError("a threshold needs wrong tokens, but there are none; hold out some wrong responses")
    limit = int(wrong * len(wrong_odds))
    if limit >= len(wrong_odds):
        return 0.0
    if wrong_odds[limit] > MAX_LOG_ODDS:
        raise UsageError(
            f"the judge is so sure of wrong tokens (log-odds {wrong_odds[limit]:.0f}) that no threshold below 1 "
            "rejects them; train it with a larger l2, or on more texts"
        )
    threshold = max(np.float32(jax.nn.sigmoid(wrong_odds[limit])), np.finfo(np.float32).tiny)
    # The verifier uses float32, where the log-odds of neighbouring high probabilities are far apart.
    while _log_odds(threshold) < wrong_odds[limit]:
        threshold = np.nextafter(threshold, np.float32(1))
    return float(threshold)


_log_odds = jit(log_odds_of)
