"""Lexical Unit Decoding's lessons, and tuning a model with them: places that it is to fill at once are [PAD].

Sun, Zhang, Lin et al.: Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs
(LREC-COLING 2024), arXiv 2405.15208.

The model as it is says how likely it holds each token of a text. A lexical unit is a run of tokens of which every one
but the first is as likely as a threshold (`specjax.training.data.segments.by_confidence`). A lesson is the text with the
tokens of one unit but its first replaced by [PAD], and with its own tokens to be said: what stands before the unit is
text, as it is in decoding. Loss: the cross entropy of the next token at all places, of such lessons and of untouched
texts in equal parts.

Deviations: which unit a lesson empties is drawn; that the parts are equal, and the threshold, are choices of our own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer, check_range
from specjax.training.data.segments import by_confidence, told
from specjax.types import Array, Model, PyTree, Target


def emptied(key: Array, tokens: Array, length: Array, starts: Array, pad_token: int) -> Array:
    """int32[B, T]: the texts with one unit each, drawn, but its first token hidden; of texts without any as they are.

    tokens: int32[B, T], of `length` int32[B] tokens, of which `starts` bool[B, T] begin a unit.
    """
    unit, hidden = jnp.cumsum(starts, 1), ~starts & (jnp.arange(tokens.shape[1]) < length[:, None])
    # Long units hide more: each token is as likely to be hidden as any other.
    drawn = jnp.argmax(jnp.where(hidden, jax.random.uniform(key, tokens.shape), -1.0), 1)
    return jnp.where(hidden & (unit == take_along(unit, drawn[:, None], 1)), pad_token, tokens)


def unit_loss(model: Model, params: PyTree, inputs: Array, labels: Array, length: Array) -> Array:
    """float32[]: the cross entropy of the next of `labels` int32[B, T] at all places of `inputs`, likewise."""
    output, _ = one_pass(model, params, inputs, model.init_cache(params, None, len(inputs), 0))
    log_p = jax.nn.log_softmax(output.logits[:, :-1])
    of_text = take_along(log_p, labels[:, 1:, None], 2)[..., 0]
    counts = jnp.arange(of_text.shape[1]) < length[:, None] - 1
    return -jnp.sum(of_text * counts) / jnp.sum(counts)


def train_lud(
    target: Target,
    tokens: Array,
    length: Array,
    *,
    pad_token: int,
    key: Array | int,
    slots: int = 3,
    threshold: float = 0.9,
    steps: int = 200,
    learning_rate: float = 1e-4,
) -> tuple[Target, Array]:
    """A target that fills up to `slots` places at once, and the loss of each step.

    tokens: int32[B, T], of `length` int32[B] tokens; one batch. pad_token: one that no text has. Raises: UsageError for
    settings out of range.
    """
    check_integer("slots", slots)
    key = threefry(key)
    if not 0 <= pad_token < target.model.vocab_size:
        raise UsageError(f"pad_token must be a token of the model, below {target.model.vocab_size}, not {pad_token}")
    check_integer("steps", steps)
    check_range("threshold", threshold, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    if not np.any(np.asarray(length) > 1):
        raise UsageError("no text has two tokens, so there is nothing to learn; give longer ones")
    starts = by_confidence(told(target, tokens)[0], longest=slots + 1, threshold=threshold)
    arguments = target.model, pad_token, steps, learning_rate
    params, found = _train(*arguments, target.params, tokens, length, starts, key)
    return Target(target.model, params), found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _train(model: Model, pad_token: int, steps: int, learning_rate: float, params, tokens, length, starts, key):
    def loss(params, key) -> Array:
        inputs = emptied(key, tokens, length, starts, pad_token)
        hidden, whole = (unit_loss(model, params, x, tokens, length) for x in (inputs, tokens))
        return 0.5 * (hidden + whole)

    return descend(loss, params, steps, learning_rate, key)
