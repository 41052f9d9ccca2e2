"""Consistency distillation: a model learns to jump to the fixed point of Jacobi decoding from anywhere on the way.

Kou, Hu, He, Deng, Zhang: CLLMs: Consistency Large Language Models (ICML 2024), arXiv 2403.00835. With mixed labels:
Song, Chen, Ding, Huang, Zhao, Wang, Li: CEED-VLA: Consistency Vision-Language-Action Model with Early-Exit Decoding
(2025), arXiv 2506.13725. For `specjax.decoders.ceed_vla`.

Of each block the states y^0, ..., y* that Jacobi decoding goes through are kept. Loss, y^j drawn anew in each step:
  mean over the places behind the first at which y^j is not y* of -sum(p* log p), p of y^j and p* of y*, constant,
  + w times the cross entropy of the block, given what stands before each of its tokens.
The labels of the latter are y*; with a ground truth, of which actions are `values`, they are that truth where the
action of y* is further than a tolerance from it.

Deviations: that labels are mixed token by token is a choice of our own. The text before a block is the model's own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import first_largest, take_along
from specjax.decoders.ceed_vla import ceed_vla
from specjax.engine.packing import Prompts, new_tokens
from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.types import Array, Model, PyTree, Target


class JacobiTrajectories(NamedTuple):
    """Blocks on their way to the fixed point."""

    text: Array  # int32[R, T], the prompt, what was written before the block, y*, and nothing that counts
    start: Array  # int32[R], where the block begins
    states: Array  # int32[R, n + 1, n], y^0 ... y^n, the last of which is y*


def trajectories(
    target: Target, prompts: Prompts, *, key: Array | int, max_new_tokens: int, block: int = 16
) -> JacobiTrajectories:
    """Of all blocks of the greedy answers of the target. Raises: UsageError for settings out of range."""
    check_integer("block", block)
    max_new_tokens, key = new_tokens(max_new_tokens), threefry(key)
    if max_new_tokens < block:
        raise UsageError(f"max_new_tokens must be at least block, {block}, not {max_new_tokens}")
    answers = ceed_vla(target, prompts, max_new_tokens=max_new_tokens, block=block, iterations=None).to_lists()
    rows = [
        (list(prompt) + answer, len(prompt) + begin, len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
        for begin in range(0, len(answer) - block + 1, block)
    ]
    size = max(start for _, start, _ in rows) + block
    text = jnp.asarray([(row + [0] * size)[:size] for row, _, _ in rows], jnp.int32)
    start, given = (jnp.asarray([row[i] for row in rows], jnp.int32) for i in (1, 2))
    drawn = jax.random.randint(key, (len(rows), block), 0, given[:, None])
    return JacobiTrajectories(
        text, start, _states(target.model, block, target.params, text, start, take_along(text, drawn, 1))
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _states(model: Model, block: int, params: PyTree, text: Array, start: Array, guess: Array) -> Array:
    def step(guess, _):
        following = first_largest(_logits(model, params, text, start, guess))
        return following, following

    _, later = jax.lax.scan(step, guess, None, block)
    return jnp.concatenate([guess[:, None], later.swapaxes(0, 1)], 1)


def _logits(model: Model, params: PyTree, text: Array, start: Array, block: Array) -> Array:
    """float32[R, n, V]: what is said at each place of a block int32[R, n] that stands at `start` in the text."""
    place = start[:, None] + jnp.arange(block.shape[1])
    tokens = text.at[jnp.arange(len(text))[:, None], place].set(block)
    output, _ = one_pass(model, params, tokens, model.init_cache(params, None, len(text), 0))
    return take_along(output.logits, (place - 1)[:, :, None], 1)


def mixed_labels(teacher: Array, truth: Array, values: Array, tolerance: float) -> Array:
    """int32[...]: the truth where the teacher's action is further than `tolerance` from it, else the teacher's token.

    values: float32[V], the action that each token stands for.
    """
    return jnp.where(jnp.abs(values[teacher] - values[truth]) > tolerance, truth, teacher)


class Losses(NamedTuple):
    """Means over blocks, float32[] each."""

    consistency: Array
    labels: Array


def losses(model: Model, params: PyTree, found: JacobiTrajectories, which: Array, labels: Array | None = None) -> Losses:
    """Of the states `which` int32[R] of the blocks; labels int32[R, n]: default y*."""
    best = found.states[:, -1]
    state = take_along(found.states, which[:, None, None], 1)[:, 0]
    at_best = _logits(model, params, found.text, found.start, best)
    log_p = jax.nn.log_softmax(_logits(model, params, found.text, found.start, state))
    wrong = jnp.cumsum(state != best, 1)
    behind = jnp.pad(wrong[:, :-1] > 0, ((0, 0), (1, 0)))  # tokens above which something is wrong
    soft = -jnp.sum(jax.nn.softmax(jax.lax.stop_gradient(at_best)) * log_p, -1)
    consistency = jnp.sum(soft * behind) / jnp.maximum(jnp.sum(behind), 1)
    if labels is not None:
        at_best = _logits(model, params, found.text, found.start, labels)
    of_labels = take_along(jax.nn.log_softmax(at_best), (best if labels is None else labels)[:, :, None], 2)
    return Losses(consistency, -jnp.mean(of_labels))


def train_consistency(
    target: Target,
    found: JacobiTrajectories,
    *,
    key: Array | int,
    labels: Array | None = None,
    weight: float = 10.0,
    steps: int = 200,
    learning_rate: float = 1e-4,
) -> tuple[Target, Array]:
    """A target that converges in fewer passes, and the loss of each step; all blocks are one batch.

    labels: int32[R, n] of `mixed_labels`; default: y*. weight: w. Raises: UsageError for labels of another shape.
    """
    wanted, key = found.states[:, -1].shape, threefry(key)
    if labels is not None and jnp.shape(labels) != wanted:
        raise UsageError(f"labels must be one per token of each block, {list(wanted)}, not {list(jnp.shape(labels))}")
    params, each = _train(target.model, weight, steps, learning_rate, target.params, found, labels, key)
    return Target(target.model, params), each


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _train(model: Model, weight: float, steps: int, learning_rate: float, params, found: JacobiTrajectories, labels, key):
    rows, states = found.states.shape[:2]

    def loss(params, key) -> Array:
        which = jax.random.randint(key, (rows,), 0, states - 1)
        parts = losses(model, params, found, which, labels)
        return parts.consistency + weight * parts.labels

    return descend(loss, params, steps, learning_rate, key)
