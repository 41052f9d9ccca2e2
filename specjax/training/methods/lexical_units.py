"""Lexical Unit Decoding: training of a model to fill several [PAD] positions in one pass.

Sun, Zhang, Lin et al.: Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs
(LREC-COLING 2024), arXiv 2405.15208.

The untrained model computes the probability of each token of a text. A lexical unit is a run of tokens in which all but
the first reach a threshold (`specjax.training.data.segments.split_by_confidence`). An example is the text with the
tokens of one unit, except its first, replaced by [PAD]; its labels are the original tokens. The text before the unit is
unchanged, as in decoding. The loss is the cross entropy of the next token at all positions. Such examples and
unchanged texts have equal weight.

Deviations: the hidden unit is drawn at random. The equal weights and the threshold are our own choices.

    trained, losses = train_lud(target, tokens, length, pad_token=0, key=0)  # tokens int32[B, T], length int32[B]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.errors import UsageError
from specjax.models.variants.expanding import check_trainable
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer, check_range
from specjax.training.data.segments import score_tokens, split_by_confidence
from specjax.types import Array, Model, PyTree, Target


def hide_unit(key: Array, tokens: Array, length: Array, starts: Array, pad_token: int) -> Array:
    """Return int32[B, T], texts in which one random unit is hidden, except for its first token.

    Texts in which every token begins a unit do not change.

    Args: tokens: int32[B, T] with `length` int32[B] tokens. starts: bool[B, T], True for tokens that begin a unit.
    """
    unit, hideable = jnp.cumsum(starts, 1), ~starts & (jnp.arange(tokens.shape[1]) < length[:, None])
    # Long units are drawn more often, so that `column` is uniform over all tokens that can be hidden.
    column = jnp.argmax(jnp.where(hideable, jax.random.uniform(key, tokens.shape), -1.0), 1)
    return jnp.where(hideable & (unit == take_along(unit, column[:, None], 1)), pad_token, tokens)


def unit_loss(model: Model, params: PyTree, inputs: Array, labels: Array, length: Array) -> Array:
    """Return float32[], the cross entropy of the next label at all positions. Args: inputs, labels: int32[B, T]."""
    output, _ = one_pass(model, params, inputs, model.init_cache(params, None, len(inputs), 0))
    log_p = jax.nn.log_softmax(output.logits[:, :-1])
    log_p_label = take_along(log_p, labels[:, 1:, None], 2)[..., 0]
    is_text = jnp.arange(log_p_label.shape[1]) < length[:, None] - 1
    return -jnp.sum(log_p_label * is_text) / jnp.sum(is_text)


@with_standard_modes
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
    """Train a target to fill up to `slots` positions in one pass.

    Args:
      tokens: int32[B, T] with `length` int32[B] tokens, one batch. pad_token: a token that no text contains.
      threshold: minimum probability of the tokens of a unit after the first.

    Returns: (the trained target, float32[steps] losses).

    Raises: UsageError for settings out of range, and for a quantised target.
    """
    check_trainable(target.params, target.model.name)
    check_integer("slots", slots)
    key = threefry(key)
    if not 0 <= pad_token < target.model.vocab_size:
        raise UsageError(f"pad_token must be a token of the model, below {target.model.vocab_size}, not {pad_token}")
    check_integer("steps", steps)
    check_range("threshold", threshold, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    if not np.any(np.asarray(length) > 1):
        raise UsageError("no text has two tokens, so there is nothing to train on; give longer texts")
    is_text = np.arange(tokens.shape[1]) < np.asarray(length)[:, None]
    if np.any((np.asarray(tokens) == pad_token) & is_text):
        raise UsageError(f"the texts contain token {pad_token}, so it cannot be pad_token; give one that they lack")
    probabilities, _ = score_tokens(target, tokens)
    starts = split_by_confidence(probabilities, max_length=slots + 1, threshold=threshold)
    arguments = target.model, pad_token, steps, learning_rate
    params, losses = _train(*arguments, target.params, tokens, length, starts, key)
    return Target(target.model, params), losses


@jit(static_argnums=(0, 1, 2, 3))
def _train(model: Model, pad_token: int, steps: int, learning_rate: float, params, tokens, length, starts, key):
    def loss(params, key) -> Array:
        inputs = hide_unit(key, tokens, length, starts, pad_token)
        hidden, unchanged = (unit_loss(model, params, x, tokens, length) for x in (inputs, tokens))
        return 0.5 * (hidden + unchanged)

    return descend(loss, params, steps, learning_rate, key)
