"""Perplexity of models on a text, and the effect of quantisation on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit
from specjax.arrays.texts import causal_mask
from specjax.catalog.schemes import check_scheme
from specjax.errors import UsageError
from specjax.models.loading import read_model
from specjax.models.storage import num_bytes
from specjax.types import Array, Target

WINDOW = 512
"""Default number of tokens that a window of the text has, if the model's limit is not smaller."""


@dataclass(frozen=True)
class Evaluation:
    """The size of a model, and how well it predicts a text."""

    model: str
    scheme: str | None  # None: the weights of the file
    perplexity: float  # exp of the mean of -log p(token | the tokens before it in its window)
    tokens: int  # number of predicted tokens
    window: int  # tokens of the text that are read together
    num_bytes: int  # of the weights
    ratio: float = 1.0  # of the perplexity to that of the unquantised model


def perplexity(
    target: Target,
    tokens: Sequence[int],
    *,
    window: int | None = None,
    on_window: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """Return the perplexity of a target on a text, and the number of predicted tokens.

    The text is cut into windows, and each is read alone. The first token of a window is not predicted.

    Args:
      tokens: the ids of the text, at least two.
      window: tokens per window, from 2 to the model's limit; None: 512, or the limit if that is smaller. A last window
        of one token is left out.
      on_window: called with the number of finished windows, and of all.

    Raises: UsageError for a text or a window that is too short, a window beyond the model's limit, or logits that are
      not finite.
    """
    limit = target.model.max_positions
    window = _window_of(target) if window is None else window
    if type(window) is not int or not 2 <= window <= limit:
        raise UsageError(f"window must be from 2 to {limit}, the limit of {target.model.name}, not {window}")
    if len(tokens) < 2:
        raise UsageError(f"the text has {len(tokens)} tokens, and perplexity needs at least 2; give a longer text")
    ids = np.asarray(tokens, np.int32)
    size = min(window, len(ids))
    starts = range(0, len(ids) - 1, window)
    total = 0.0
    for number, start in enumerate(starts):
        part = ids[start : start + window]
        padded = np.pad(part, (0, size - len(part)))
        total += float(_surprise(target, jnp.asarray(padded)[None], jnp.int32(len(part))))
        if on_window is not None:
            on_window(number + 1, len(starts))
    count = sum(min(window, len(ids) - start) - 1 for start in starts)
    if not math.isfinite(total):
        raise UsageError(f"{target.model.name} has logits that are not finite on this text; check its weights")
    return math.exp(total / count), count


def _window_of(target: Target) -> int:
    return min(WINDOW, target.model.max_positions)


@jit
def _surprise(target: Target, tokens: Array, length: Array) -> Array:
    """Return the sum of -log p over the tokens int32[1, T] of a window, without the first and those after `length`."""
    model, size = target.model, tokens.shape[1]
    positions, mask = jnp.arange(size)[None], causal_mask(1, size)
    cache = model.init_cache(target.params, None, 1, size)
    output, _ = model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    log_p = jax.nn.log_softmax(output.logits[0, :-1].astype(jnp.float32))
    of_tokens = jnp.take_along_axis(log_p, tokens[0, 1:, None], 1)[:, 0]
    return -jnp.sum(jnp.where(jnp.arange(1, size) < length, of_tokens, 0.0))


def evaluate_quantization(
    source: str | Path | None,
    text: str,
    schemes: Sequence[str] = ("int8",),
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    on_window: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> list[Evaluation]:
    """Measure a model on a text, as it is and after quantisation. One model is in memory at a time.

    Args:
      source: as for `specjax.load`.
      text: plain text; control tokens in it are read as text.
      schemes: values of `load(quantize=...)`.
      window: tokens per window of `perplexity`.
      max_tokens: tokens of the text that are read; None: all.
      on_window: called with the name of the model, and the numbers of finished windows and of all.
      options: other arguments of `specjax.load`, such as dtype.

    Returns: the evaluation of the model itself, then one per scheme.

    Raises: UsageError for an unknown scheme, for a model that cannot be loaded, and in the cases of `perplexity`.
    """
    for one in schemes:
        check_scheme(one, "scheme")
    results: list[Evaluation] = []
    quantize: str | None
    for quantize in (None, *schemes):
        loaded = read_model(source, kind="autoregressive", quantize=quantize, **options)
        target, tokenizer = loaded.target, loaded.tokenizer
        name = target.model.name
        notify = None if on_window is None else (lambda done, total, name=name: on_window(name, done, total))
        tokens = list(tokenizer.encode(text, special=False))[:max_tokens]
        value, count = perplexity(target, tokens, window=window, on_window=notify)
        ratio = value / results[0].perplexity if results else 1.0
        results.append(
            Evaluation(name, quantize, value, count, window or _window_of(target), num_bytes(target.params), ratio)
        )
        del loaded, target
    return results
