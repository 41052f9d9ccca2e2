"""Consistency distillation: a model learns to jump to the fixed point of Jacobi decoding from any intermediate state.

Kou, Hu, He, Deng, Zhang: CLLMs: Consistency Large Language Models (ICML 2024), arXiv 2403.00835. Mixed labels are from
Song, Chen, Ding, Huang, Zhao, Wang, Li: CEED-VLA: Consistency Vision-Language-Action Model with Early-Exit Decoding
(2025), arXiv 2506.13725. `specjax.decoders.ceed_vla` decodes with the trained model.

The data are the states y^0, ..., y* that Jacobi decoding passes through in each block. Each step draws one state y^j
per block. The loss has two terms. The first is the mean of -sum(p* log p) over the positions after the first one at
which y^j differs from y*. Here p is conditioned on y^j, and p* on y*, without gradient. The second is w times the cross
entropy of the labels of the block, given the labels before each one. The labels are y*, or mixed labels (see
`mixed_labels`) if there are ground-truth actions. A mixed label is the truth where the action of y* deviates from it by
more than a tolerance.

Deviations: mixing labels token by token is our own choice. The text before a block is written by the model.

    data = collect_trajectories(target, prompts, key=0, max_new_tokens=64, block=16)
    trained, losses = train_consistency(target, data, key=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import first_largest, take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.decoders.ceed_vla import ceed_vla
from specjax.engine.packing import Prompts, batches_of, check_new_tokens
from specjax.errors import UsageError
from specjax.models.variants.expanding import check_trainable
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.types import Array, Model, PyTree, Target


class JacobiTrajectories(NamedTuple):
    """Blocks of text with the states of their Jacobi decoding."""

    text: Array  # int32[R, T], prompt, response up to the block, y*, padding
    start: Array  # int32[R], column where the block begins
    states: Array  # int32[R, n + 1, n], y^0 ... y^n; the last one is y*


@with_standard_modes
def collect_trajectories(
    target: Target, prompts: Prompts, *, key: Array | int, max_new_tokens: int, block: int = 16,
    eos: int | Sequence[int] = (), batch_size: int = 16,
) -> JacobiTrajectories:  # fmt: skip
    """Compute the trajectories of all complete blocks of the target's greedy responses, which end at `eos`.

    Args: batch_size: responses, and blocks, that are computed together.

    Raises: UsageError for settings out of range, and for responses that are all shorter than a block.
    """
    check_integer("block", block)
    check_integer("batch_size", batch_size)
    max_new_tokens, key = check_new_tokens(max_new_tokens), threefry(key)
    if max_new_tokens < block:
        raise UsageError(f"max_new_tokens must be at least block, {block}, not {max_new_tokens}")
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "block": block, "eos": eos}
    write = lambda batch: ceed_vla(target, batch, iterations=None, **settings).to_lists()
    responses = [response for batch in batches_of(prompts, batch_size) for response in write(batch)]
    rows = [
        (list(prompt) + response, len(prompt) + begin, len(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
        for begin in range(0, len(response) - block + 1, block)
    ]
    if not rows:
        raise UsageError(
            f"all responses are shorter than a block of {block} tokens; give other prompts, or a smaller block"
        )
    size = max(start for _, start, _ in rows) + block
    text = jnp.asarray([(row + [0] * size)[:size] for row, _, _ in rows], jnp.int32)
    start, prompt_length = (jnp.asarray([row[i] for row in rows], jnp.int32) for i in (1, 2))
    columns = jax.random.randint(key, (len(rows), block), 0, prompt_length[:, None])
    guess = take_along(text, columns, 1)  # y^0 consists of random tokens of the prompt
    groups = (slice(begin, begin + batch_size) for begin in range(0, len(rows), batch_size))
    states = [_iterate(target.model, block, target.params, text[some], start[some], guess[some]) for some in groups]
    return JacobiTrajectories(text, start, jnp.concatenate(states))


@jit(static_argnums=(0, 1))
def _iterate(model: Model, block: int, params: PyTree, text: Array, start: Array, guess: Array) -> Array:
    def step(guess, _):
        following = first_largest(_block_logits(model, params, text, start, guess))
        return following, following

    _, later = jax.lax.scan(step, guess, None, block)
    return jnp.concatenate([guess[:, None], later.swapaxes(0, 1)], 1)


def _block_logits(model: Model, params: PyTree, text: Array, start: Array, block: Array) -> Array:
    """Return float32[R, n, V], the logits of each position of a block int32[R, n] at `start` of the text."""
    columns = start[:, None] + jnp.arange(block.shape[1])
    tokens = text.at[jnp.arange(len(text))[:, None], columns].set(block)
    output, _ = one_pass(model, params, tokens, model.init_cache(params, None, len(text), 0))
    return take_along(output.logits, (columns - 1)[:, :, None], 1)


@with_standard_modes
def mixed_labels(teacher: Array, truth: Array, values: Array, tolerance: float) -> Array:
    """Return labels int32[...] that mix the tokens of the teacher and of the ground truth.

    A label is the truth where the teacher's action deviates from it by more than `tolerance`, else the teacher's token.

    Args: values: float32[V], the action of each token.
    """
    return jnp.where(jnp.abs(values[teacher] - values[truth]) > tolerance, truth, teacher)


class ConsistencyLosses(NamedTuple):
    """Means over blocks, float32[] each."""

    consistency: Array
    labels: Array


@with_standard_modes
def compute_losses(
    model: Model, params: PyTree, data: JacobiTrajectories, indices: Array, labels: Array | None = None
) -> ConsistencyLosses:
    """Return the losses of one state per block.

    Args: indices: int32[R], index of each state. labels: int32[R, n]; None: y*.
    """
    fixed_point = data.states[:, -1]
    state = take_along(data.states, indices[:, None, None], 1)[:, 0]
    logits = _block_logits(model, params, data.text, data.start, fixed_point)
    log_p = jax.nn.log_softmax(_block_logits(model, params, data.text, data.start, state))
    errors = jnp.cumsum(state != fixed_point, 1)
    after_error = jnp.pad(errors[:, :-1] > 0, ((0, 0), (1, 0)))
    soft = -jnp.sum(jax.nn.softmax(jax.lax.stop_gradient(logits)) * log_p, -1)
    consistency = jnp.sum(soft * after_error) / jnp.maximum(jnp.sum(after_error), 1)
    if labels is not None:
        logits = _block_logits(model, params, data.text, data.start, labels)
    labels = fixed_point if labels is None else labels
    log_p_label = take_along(jax.nn.log_softmax(logits), labels[:, :, None], 2)
    return ConsistencyLosses(consistency, -jnp.mean(log_p_label))


@with_standard_modes
def train_consistency(
    target: Target,
    data: JacobiTrajectories,
    *,
    key: Array | int,
    labels: Array | None = None,
    weight: float = 10.0,
    batch_size: int = 16,
    steps: int = 200,
    learning_rate: float = 1e-4,
) -> tuple[Target, Array]:
    """Train a target to converge in fewer passes.

    Args: labels: int32[R, n], from `mixed_labels`; None: y*. weight: w. batch_size: random blocks of a step.

    Returns: (the trained target, float32[steps] losses).

    Raises: UsageError for labels of another shape, and for a quantised target.
    """
    check_trainable(target.params, target.model.name)
    check_integer("batch_size", batch_size)
    shape, key = data.states[:, -1].shape, threefry(key)
    if labels is not None and jnp.shape(labels) != shape:
        raise UsageError(f"labels must be one per token of each block, {list(shape)}, not {list(jnp.shape(labels))}")
    settings = weight, steps, learning_rate, min(batch_size, shape[0])
    params, losses = _train(target.model, *settings, target.params, data, labels, key)
    return Target(target.model, params), losses


@jit(static_argnums=(0, 1, 2, 3, 4))
def _train(
    model: Model, weight: float, steps: int, learning_rate: float, size: int, params, data: JacobiTrajectories, labels,
    key,
):  # fmt: skip
    rows, states = data.states.shape[:2]

    def loss(params, key) -> Array:
        indices, blocks, their_labels = jax.random.randint(key, (size,), 0, states - 1), data, labels
        if size < rows:
            some = jax.random.permutation(jax.random.fold_in(key, 1), rows)[:size]
            blocks, their_labels = jax.tree.map(lambda x: x[some], (data, labels))
        parts = compute_losses(model, params, blocks, indices, their_labels)
        return parts.consistency + weight * parts.labels

    return descend(loss, params, steps, learning_rate, key)
