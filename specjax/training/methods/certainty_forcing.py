"""Certainty forcing: training of a denoiser to be certain of more masked columns at the same time.

Chen, Fang, Ma, Yu, Wang: dParallel: Learnable Parallel Decoding for dLLMs (2025), arXiv 2509.26488.

The texts y are written by the model itself, in blocks from left to right. One block n of a text is drawn at random. The
blocks before it stay unmasked, those after it are masked, and each column of block n is masked with probability 1/2. A
second view masks the other columns of block n. Over the masked columns i of block n in both views, with logits l and
p = softmax(l):

    minimise mean of -log p_i(y_i) + beta * mean over {i: argmax p_i = y_i} of H(softmax(l_i / T)),  T = 1/2

The second term sharpens correct predictions. It has no gradient where the model errs.
Guarantee: none, because the weights change. They are served with the rule `entropy <= eta`.
Deviations: all weights may be trained, not only a low-rank update. If a row holds several texts, a block is drawn for
each of them.

    texts = [TrainingText((*prompt, *response), len(prompt)), ...]  # responses of `specjax.denoise`
    denoiser, losses = train_certainty(denoiser, pack(texts, 8, 128), block=32, key=0)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.diffusion.forward import compute_logits
from specjax.diffusion.measures import entropy
from specjax.diffusion.types import Denoiser
from specjax.models.variants.expanding import check_trainable
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.losses import cross_entropy
from specjax.training.objectives.masked import forward_views
from specjax.types import Array


def mask_block(packed: PackedBatch, block: int, key: Array) -> tuple[Array, Array]:
    """Return (masked bool[B, 2, T], judged bool[B, 2, T]): the masks of two views, and the columns of the loss.

    Args: block: columns per block, counted from the first response column of each text.
    """
    text_start, loss_mask = jnp.asarray(packed.text_start), jnp.asarray(packed.loss_mask)
    batch, size = loss_mask.shape
    block_key, mask_key = jax.random.split(key)
    preceding = jnp.cumsum(loss_mask, 1) - loss_mask  # response columns of the row before each column
    number = preceding - jnp.take_along_axis(preceding, text_start, 1)  # the same within the text
    same_text = text_start[:, :, None] == text_start[:, None, :]
    columns = jnp.sum(same_text & loss_mask[:, None, :], 2)  # response columns of the text
    uniform = jnp.take_along_axis(jax.random.uniform(block_key, (batch, size)), text_start, 1)
    selected = jnp.floor(uniform * -(-columns // block)).astype(jnp.int32)
    in_block, later = loss_mask & (number // block == selected), loss_mask & (number // block > selected)
    half = jax.random.bernoulli(mask_key, 0.5, (batch, size))
    judged = jnp.stack([in_block & half, in_block & ~half], 1)
    return judged | later[:, None], judged


def compute_loss(
    denoiser: Denoiser, packed: PackedBatch, masked: Array, judged: Array, *, beta: float = 2.0,
    temperature: float = 0.5,
) -> Array:  # fmt: skip
    """Return the loss float32[]. Args: masked, judged: from `mask_block`. beta: 2 for LLaDA, 1 for Dream."""
    label = jnp.broadcast_to(jnp.asarray(packed.tokens)[:, None], masked.shape)
    logits = compute_logits(denoiser, forward_views(denoiser, packed, masked))
    correct = judged & (jnp.argmax(logits, -1) == label)
    # The mask token's logit is -inf, at which the gradient of the entropy would be NaN.
    uncertainty = entropy(jnp.maximum(logits, jnp.finfo(jnp.float32).min / 4) / temperature)
    surprise = masked_mean(cross_entropy(logits, None, label, judged), judged)
    return surprise + beta * masked_mean(uncertainty, correct)


def masked_mean(values: Array, mask: Array) -> Array:
    """Return float32[], the mean of the values where the mask is True, or 0 if it is False everywhere."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


@with_standard_modes
def train_certainty(
    denoiser: Denoiser,
    batches: Sequence[PackedBatch],
    *,
    block: int,
    key: Array | int,
    epochs: int = 1,
    beta: float = 2.0,
    learning_rate: float = 1e-4,
) -> tuple[Denoiser, np.ndarray]:
    """Train a denoiser on packed texts with AdamW. Returns: (the denoiser, float32[steps] losses).

    Raises: UsageError for a denoiser with quantised weights.
    """
    check_integer("block", block)
    check_integer("epochs", epochs)
    check_trainable(denoiser.params, denoiser.model.name)
    optimizer = _make_adamw(learning_rate)
    state, losses = optimizer.init(denoiser.params), []
    for step in range(epochs * len(batches)):
        step_key = jax.random.fold_in(threefry(key), step)
        packed = batches[step % len(batches)]
        params, state, loss = _take_step(denoiser, packed, state, step_key, optimizer, block, beta)
        denoiser = denoiser.replace(params=params)
        losses.append(loss)
    return denoiser, np.asarray(losses, np.float32)


@functools.cache
def _make_adamw(learning_rate: float) -> Any:
    """Return AdamW. Equal rates share one object, so a second training run needs no compilation."""
    import optax

    return optax.adamw(learning_rate)


@jit(static_argnums=(4, 5, 6))
def _take_step(
    denoiser: Denoiser, packed: PackedBatch, state: Any, key: Array, optimizer: Any, block: int, beta: float
) -> tuple[Any, Any, Array]:
    import optax

    masked, judged = mask_block(packed, block, key)
    loss_of = lambda params: compute_loss(denoiser.replace(params=params), packed, masked, judged, beta=beta)
    loss, gradient = jax.value_and_grad(loss_of)(denoiser.params)
    updates, state = optimizer.update(gradient, state, denoiser.params)
    return optax.apply_updates(denoiser.params, updates), state, loss
