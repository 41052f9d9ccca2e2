"""Training of denoisers: cross entropy of masked columns, for masked and for block diffusion.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992, with full attention; Arriola et al.: Block
Diffusion (2025), arXiv 2503.09573, and Cheng et al.: SDAR (2025), arXiv 2510.06303, with block-causal attention. The
complementary masks are from Wu et al.: Fast-dLLM v2 (2025), arXiv 2509.26328.

A text, or each block of it, has a rate t, uniform over (0, 1]. Each of its columns in the loss mask is masked with
probability t:

    minimise the mean over t and masks of the sum over masked columns i of -log p(x_i | unmasked columns) / t

divided by the number of columns in the loss mask. This bounds the negative log-likelihood per column. In a block-causal
model a block attends to itself masked, and to earlier blocks unmasked. One pass covers a row [clean | masked] of 2 T
columns. With complementary masks a second view, [clean | masked | the other columns masked], trains every column in
each step.
Deviations: rates are stratified over the rows of a batch, and each rate is still uniform. Several texts share a row,
but do not attend to each other.

    denoiser = specjax.training.init_denoiser(specjax.models.LlamaConfig(...), mask_token=0)
    denoiser = train(None, denoiser, texts, recipe=recipe_of("masked_diffusion"))
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.diffusion.forward import compute_logits
from specjax.diffusion.types import Denoiser
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.chunks import sum_in_chunks
from specjax.training.objectives.losses import cross_entropy
from specjax.types import Array

MIN_RATE = 1e-3
"""Lower bound of the rate, which limits the weight of a column to 1000."""


class MaskedView(NamedTuple):
    """A packed batch with some masked columns."""

    masked: Array  # bool[B, T]
    rate: Array  # float32[B, T], the probability with which each column was masked


class MaskedSums(NamedTuple):
    """Sums over the masked columns of all views, float32[] each."""

    loss: Array
    hits: Array  # columns whose most likely token is the text's
    masked: Array  # number of masked columns
    columns: Array  # columns of the loss mask, once per view


def text_positions(packed: PackedBatch) -> Array:
    """Return int32[B, T], the position of each token in its text."""
    return jnp.arange(packed.tokens.shape[1]) - jnp.asarray(packed.text_start)


def block_starts(denoiser: Denoiser, packed: PackedBatch) -> Array:
    """Return int32[B, T], the column where the block of each column begins, or its text if there are no blocks."""
    text_start = jnp.asarray(packed.text_start)
    if denoiser.block is None:
        return text_start
    return text_start + text_positions(packed) // denoiser.block * denoiser.block


def mask_randomly(denoiser: Denoiser, packed: PackedBatch, key: Array) -> MaskedView:
    """Mask columns at random, with one rate per text, or per block of a block-causal model."""
    batch, size = packed.tokens.shape
    rate_key, mask_key = jax.random.split(key)
    stratified = (jax.random.uniform(rate_key, (1, size)) + jnp.arange(batch)[:, None] / batch) % 1
    rate = MIN_RATE + (1 - MIN_RATE) * jnp.take_along_axis(stratified, block_starts(denoiser, packed), 1)
    uniform = jax.random.uniform(mask_key, (batch, size))
    return MaskedView(jnp.asarray(packed.loss_mask) & (uniform < rate), rate)


def complement(packed: PackedBatch, view: MaskedView) -> MaskedView:
    """Return the complementary view, which masks the other columns of the loss mask."""
    return MaskedView(jnp.asarray(packed.loss_mask) & ~view.masked, jnp.maximum(1 - view.rate, MIN_RATE))


def forward_views(denoiser: Denoiser, packed: PackedBatch, masked: Array) -> Array:
    """Run one pass over a packed batch with n masked views.

    Args: masked: bool[B, n, T].

    Returns: [B, n, T, D], the hidden states that predict each column of each view.
    """
    tokens, text_start = jnp.asarray(packed.tokens), jnp.asarray(packed.text_start)
    batch, views, size = masked.shape
    block, column = block_starts(denoiser, packed), jnp.arange(size)
    copies = jnp.where(masked, denoiser.blank, tokens[:, None])
    if denoiser.is_causal:
        copies = jnp.concatenate([tokens[:, None], copies], 1)
    count = copies.shape[1]
    same_copy = jnp.eye(count, dtype=bool)[:, None, :, None]
    is_clean = (jnp.arange(count) == 0)[:, None] & denoiser.is_causal
    same_block = (block[:, :, None] == block[:, None, :])[:, None, :, None]  # [B, 1, T, 1, T]
    same_text = text_start[:, :, None] == text_start[:, None, :]
    earlier = (same_text & (block[:, None, :] < block[:, :, None]))[:, None, :, None]
    mask = (same_copy & same_block) | (is_clean & earlier)  # [B, copies, T, copies, T]
    positions = jnp.broadcast_to(text_positions(packed)[:, None], copies.shape).reshape(batch, -1)
    output, _ = denoiser.model.forward(
        denoiser.params,
        copies.reshape(batch, -1),
        denoiser.model.init_cache(denoiser.params, None, batch, 0),
        positions=positions,
        mask=mask.reshape(batch, count * size, count * size),
    )
    hidden = output.hidden.reshape(batch, count, size, -1)
    predicting = hidden[:, count - views :]
    if not denoiser.is_shifted:
        return predicting
    predicting = jnp.roll(predicting, 1, 2)
    if not denoiser.is_causal:
        return predicting
    return jnp.where((block == column)[:, None, :, None], jnp.roll(hidden[:, :1], 1, 2), predicting)


def sum_losses(
    denoiser: Denoiser, packed: PackedBatch, views: tuple[MaskedView, ...], *, by_rate: bool = True,
    chunk: int | None = None,
) -> MaskedSums:  # fmt: skip
    """Return the sums over some views of the cross entropy of masked columns.

    Args:
      by_rate: weight masked columns by 1 / rate, which bounds the likelihood. False: weight them by 1, so that
        complementary views train each column once.
      chunk: columns whose logits are computed together, a divisor of T; None: all.
    """
    tokens, size = jnp.asarray(packed.tokens), packed.tokens.shape[1]
    masked = jnp.stack([view.masked for view in views], 1)
    weight = jnp.stack([1 / view.rate if by_rate else jnp.ones_like(view.rate) for view in views], 1)
    hidden = forward_views(denoiser, packed, masked)

    def judge_chunk(params, hidden: Array, i: Array, width: int) -> MaskedSums:
        part = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, i, width, axis)
        is_masked, label = part(masked, 2), part(tokens, 1)[:, None]
        logits = compute_logits(denoiser.replace(params=params), part(hidden, 2))
        loss = cross_entropy(logits, None, jnp.broadcast_to(label, is_masked.shape), is_masked)
        hits = is_masked & (jnp.argmax(logits, -1) == label)
        return MaskedSums(
            jnp.sum(jnp.where(is_masked, loss * part(weight, 2), 0.0)),
            jnp.sum(hits, dtype=jnp.float32),
            jnp.sum(is_masked, dtype=jnp.float32),
            jnp.float32(0),
        )

    columns = jnp.sum(jnp.asarray(packed.loss_mask), dtype=jnp.float32) * (len(views) if by_rate else 1)
    return sum_in_chunks(judge_chunk, size, chunk, denoiser.params, hidden)._replace(columns=columns)


def compute_loss(
    denoiser: Denoiser, packed: PackedBatch, views: tuple[MaskedView, ...], *, by_rate: bool = True,
    chunk: int | None = None,
) -> tuple[Array, MaskedSums]:  # fmt: skip
    """Return (float32[], sums): the mean over views of the cross entropy per column of the loss mask.

    The arguments are those of `sum_losses`.
    """
    sums = sum_losses(denoiser, packed, views, by_rate=by_rate, chunk=chunk)
    return sums.loss / jnp.maximum(sums.columns, 1), sums
