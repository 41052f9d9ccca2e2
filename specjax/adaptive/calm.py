"""CALM: a token exits the model after the first layer at which its prediction is confident.

Schuster, Fisch, Gupta, Dehghani, Bahri, Tran, Tay, Metzler: Confident Adaptive Language Modeling (NeurIPS 2022),
arXiv 2207.07061.

Rule: the confidence of a token after layer l is p_1 - p_2 of softmax(head(norm(h_l))) (`softmax`), or the cosine
similarity of h_l and h_{l-1} (`saturation`). The t-th generated token of N exits where its confidence is at least
  lambda_t = clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1).
The remaining layers compute its keys and values from the stream at the exit.
Guarantee: lossy. `calibrated` chooses lambda so that the risk is at most delta with probability 1 - epsilon, for
examples like those of the calibration.

Deviations: the confidence is tested every `every` layers, because a `softmax` test costs a pass of the output head. The
authors' learned probe is the method `dynamax`. With lambda <= 0 every token exits at the first test, and with
lambda > 1 no token exits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.adaptive.exits import every_so_many, leaving, similarity
from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array

METHOD = Method(
    name="calm",
    kind="adaptive",
    guarantee="lossy",
    summary="exits the model for each token after the first layer with a confident prediction",
    paper="Schuster et al. 2022, arXiv 2207.07061",
    options=(
        Option("threshold", "float", 0.9, "confidence at which a token exits; above 1: never"),
        Option(
            "confidence",
            ("softmax", "saturation"),
            "softmax",
            "measure of confidence: from the output head, or from the change between layers",
        ),
        shared.EVERY,
        Option("decay", "float", 4.0, "rate at which the threshold falls with each generated token"),
        Option("form", ("paper", "follow_up"), "paper", "form of the decay"),
        shared.HORIZON,
    ),
)


FORMS = ("softmax", "saturation")
DECAYS = ("paper", "follow_up")


def calm(
    threshold: float = 0.9,
    *,
    confidence: str = "softmax",
    every: int = 4,
    decay: float = 4.0,
    form: str = "paper",
    horizon: int = 128,
) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, calm())`.

    Args:
      threshold: lambda. confidence: one of FORMS. every: layers between two tests. decay: tau.
      form: `paper`, or `follow_up`, which is lambda (0.9 + 0.1 exp(-tau t / N)) by Bae et al. 2023 (arXiv 2310.05424).
      horizon: N, the maximum number of generated tokens.

    The threshold is an array parameter, so another value needs no recompilation.
    """
    if confidence not in FORMS:
        raise UsageError(f'confidence must be one of {", ".join(FORMS)}, not "{confidence}"')
    if form not in DECAYS:
        raise UsageError(f'form must be one of {", ".join(DECAYS)}, not "{form}"')
    if horizon < 1:
        raise UsageError(f"horizon must be at least 1, not {horizon}")
    if math.isnan(threshold) or not 0 <= decay < math.inf:
        raise UsageError(
            f"threshold and decay must be numbers, decay finite and at least 0, not {threshold} and {decay}"
        )
    return _calm(confidence, every, float(decay), form, horizon).replace(params=jnp.float32(threshold))


@functools.cache
def _calm(confidence: str, every: int, decay: float, form: str, horizon: int) -> DepthPolicy:
    sure = {"softmax": margin, "saturation": saturation}[confidence]
    return leaving("calm", sure, functools.partial(level, decay, form, horizon), every_so_many(every))


def margin(params, streams: LayerStreams) -> Array:
    """Return float32[B, T]: the difference between the two largest probabilities."""
    logits = streams.head(streams.after_mlp)
    largest = jax.lax.top_k(logits, 2)[0]
    first, second = jnp.moveaxis(jnp.exp(largest - jax.nn.logsumexp(logits, -1, keepdims=True)), -1, 0)
    return first - second


def saturation(params, streams: LayerStreams) -> Array:
    """Return float32[B, T]: the cosine similarity of the stream after and before the layer."""
    return similarity(streams.after_mlp, streams.before_layer)


def level(decay: float, form: str, horizon: int, threshold: Array, places: TokenPositions) -> Array:
    """Return float32[B, T]: lambda_t, the confidence at which each token exits."""
    falling = jnp.exp(-decay * places.num_generated / horizon)
    of_paper = jnp.clip(0.9 * threshold + 0.1 * falling, 0.0, 1.0)
    value = of_paper if form == "paper" else threshold * (0.9 + 0.1 * falling)
    return jnp.where(threshold <= 0, -jnp.inf, jnp.where(threshold > 1, jnp.inf, value))


def calibrated(risks: Sequence[float], count: int, *, delta: float, epsilon: float) -> int | None:
    """Return the index of the lowest safe threshold, or None if the first is not safe.

    The thresholds are sorted in falling order. `risks` in [0, 1] are their mean risks over `count` examples.
    Fixed-sequence testing rejects the hypothesis that the risk is above `delta` as long as Hoeffding's bound
      exp(-2 count (delta - risk)^2) <= epsilon
    holds. The index of the last rejected hypothesis is returned.
    """
    if not (0 < delta < 1 and 0 < epsilon < 1) or count < 1:
        raise UsageError(
            f"delta and epsilon must be between 0 and 1, count at least 1, not {delta}, {epsilon}, {count}"
        )
    accepted_index = None
    for place, risk in enumerate(risks):
        if math.exp(-2 * count * max(delta - risk, 0.0) ** 2) > epsilon:
            break
        accepted_index = place
    return accepted_index
