"""Training of Learn2PD's filter, which predicts from the probabilities of a block which proposals are correct.

Bao, Chen, Xu, Ren: Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive Parallel Decoding
(2025), arXiv 2509.25188.

An oracle replays texts y that the denoiser wrote with one column per pass. It starts from a masked block, with clean
text before it and masked columns after it. In each pass it accepts all columns whose most likely token is that of y. A
pass yields the largest probability c of every column of the block, and a label: 1 if its most likely token is that of
y. If a pass accepts no column, the next pass would be identical, so the block is then filled with y. The filter

    z = W2 relu(W1 c + b1) + b2

is fitted to these examples:

    minimise the mean of BCE(sigmoid(z_i), [argmax p_i = y_i])

Deviations: columns after the end of a text have no label. Their c is 0, as after the end of a canvas. No examples are
held out.

    texts = [TrainingText((*prompt, *response), len(prompt)), ...]  # one column per pass: `methods.llada(denoiser)`
    learned = train_filter(denoiser, pack(texts, 8, 128, one_per_row=True), block=32, key=0)
    specjax.denoise(denoiser, specjax.diffusion.methods.learn2pd(denoiser, filter=learned), prompts, key=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.diffusion.forward import compute_logits
from specjax.diffusion.methods.learn2pd import Filter
from specjax.diffusion.types import Denoiser
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.masked import forward_views
from specjax.types import Array


class FilterExamples(NamedTuple):
    """Inputs and labels of S passes over blocks of W columns."""

    confidence: Array  # float32[B, S, W], the largest probability of each column
    correct: Array  # bool[B, S, W]
    counted: Array  # bool[B, S, W], True for columns of a text in passes that the oracle needs


@with_standard_modes
def train_filter(
    denoiser: Denoiser, batches: Sequence[PackedBatch], *, block: int, key: Array | int, steps: int = 2000,
    learning_rate: float = 3e-3,
) -> Filter:  # fmt: skip
    """Replay packed texts, one per row, and fit a filter for blocks of `block` columns."""
    parts = [replay(denoiser, packed, block) for packed in batches]
    examples = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return fit_filter(examples, threefry(key), steps=steps, learning_rate=learning_rate)


@jit(static_argnames="block")
def replay(denoiser: Denoiser, packed: PackedBatch, block: int) -> FilterExamples:
    """Run the oracle over texts, one per row, in blocks from the first response column on.

    Each block gets as many passes as it has columns. Passes after the last one that the oracle needs do not count.
    """
    tokens, loss_mask = jnp.asarray(packed.tokens), jnp.asarray(packed.loss_mask)
    batch, size = tokens.shape
    begin = jnp.argmax(loss_mask, 1)

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], FilterExamples]:
        masked, active = carry
        active = active | (index % block == 0)
        columns = begin[:, None] + index // block * block + jnp.arange(block)
        clipped = jnp.minimum(columns, size - 1)
        is_response = (columns < size) & take_along(loss_mask, clipped, 1)
        logits = compute_logits(denoiser, forward_views(denoiser, packed, masked[:, None]))[:, 0]
        log_p = jax.nn.log_softmax(logits, -1)
        hits = jnp.argmax(log_p, -1) == tokens
        of_block = lambda x: take_along(x, clipped, 1)
        confidence = jnp.where(is_response, jnp.exp(of_block(jnp.max(log_p, -1))), 0.0)  # as after the end of a canvas
        examples = FilterExamples(confidence, of_block(hits), is_response & active[:, None])
        waiting = is_response & of_block(masked)
        accepted = waiting & examples.correct
        is_stuck = ~jnp.any(accepted, 1)
        filled = jnp.where((is_stuck | (index % block == block - 1))[:, None], waiting, accepted)
        row = jnp.arange(batch)[:, None]
        masked = masked.at[row, jnp.where(filled, columns, size)].set(False, mode="drop")
        unfinished = jnp.any(is_response & take_along(masked, clipped, 1), 1)
        return (masked, active & unfinished), examples

    passes = jnp.arange(-(-size // block) * block)
    _, examples = jax.lax.scan(step, (loss_mask, jnp.ones((batch,), bool)), passes)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), examples)


def fit_filter(examples: FilterExamples, key: Array, *, steps: int = 2000, learning_rate: float = 3e-3) -> Filter:
    """Fit a filter with AdamW. Every step uses all examples."""
    import optax

    check_integer("steps", steps, 0)

    width = examples.confidence.shape[-1]
    first_key, second_key = jax.random.split(key)
    scale = width**-0.5
    initial = Filter(
        scale * jax.random.normal(first_key, (width, width)), jnp.zeros(width),
        scale * jax.random.normal(second_key, (width, width)), jnp.zeros(width),
    )  # fmt: skip
    optimizer = optax.adamw(learning_rate)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        filter, state = carry
        updates, state = optimizer.update(jax.grad(compute_loss)(filter, examples), state, filter)
        return (optax.apply_updates(filter, updates), state), None

    return jit(lambda: jax.lax.scan(step, (initial, optimizer.init(initial)), None, steps)[0][0])()


def compute_loss(filter: Filter, examples: FilterExamples) -> Array:
    """Return float32[], the mean binary cross entropy of the counted columns."""
    logit = filter(examples.confidence)
    loss = jax.nn.softplus(jnp.where(examples.correct, -logit, logit))
    return jnp.sum(jnp.where(examples.counted, loss, 0.0)) / jnp.maximum(jnp.sum(examples.counted), 1)
