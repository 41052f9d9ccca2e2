"""Training denoisers: cross entropy of masked columns, of masked and of block diffusion.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992, of full attention; Arriola et al.: Block
Diffusion (2025), arXiv 2503.09573, and Cheng et al.: SDAR (2025), arXiv 2510.06303, of block-causal attention; the
complementary masks: Wu et al.: Fast-dLLM v2 (2025), arXiv 2509.26328.

A text, or each block of it, has a rate t, uniform over (0, 1]; each of its columns that count is masked with chance t:

    minimise the mean over t and masks of sum over masked columns i of -log p(x_i | what is not masked) / t

over the number of columns that count, a bound on the negative log-likelihood of each. In a block-causal model a block
sees itself as it is masked, and the blocks before it as they are: a row is [clean | masked], 2 T columns, in one pass.
With complementary masks a second view, [clean | masked | the other ones masked], teaches every column at each step.
Deviations: rates are spread evenly over the rows of a lesson, each of which still is uniform; several texts share a
row, none of which sees another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.diffusion.forward import logits_of
from specjax.diffusion.types import Denoiser
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.chunks import sum_in_chunks
from specjax.training.objectives.losses import cross_entropy
from specjax.types import Array

LEAST = 1e-3
"""The smallest rate: nothing counts for more than a thousand columns."""


class MaskedView(NamedTuple):
    """A lesson with some of its columns masked."""

    masked: Array  # bool[B, T]
    rate: Array  # float32[B, T], the chance that each was


class Said(NamedTuple):
    """Of the masked columns of all views: float32[] each."""

    loss: Array
    hits: Array  # where the likeliest token is the text's
    masked: Array  # how many there were


def places(packed: PackedBatch) -> Array:
    """int32[B, T]: of each token in its text."""
    return jnp.arange(packed.tokens.shape[1]) - jnp.asarray(packed.first)


def units(denoiser: Denoiser, packed: PackedBatch) -> Array:
    """int32[B, T]: where the text of each column begins, or its block."""
    first = jnp.asarray(packed.first)
    return first if denoiser.block is None else first + places(packed) // denoiser.block * denoiser.block


def noised(denoiser: Denoiser, packed: PackedBatch, key: Array) -> MaskedView:
    """Masks at a rate for each text of a model with full attention, for each block of a block-causal one."""
    batch, size = packed.tokens.shape
    of_rates, of_masks = jax.random.split(key)
    spread = (jax.random.uniform(of_rates, (1, size)) + jnp.arange(batch)[:, None] / batch) % 1
    rate = LEAST + (1 - LEAST) * jnp.take_along_axis(spread, units(denoiser, packed), 1)
    drawn = jax.random.uniform(of_masks, (batch, size))
    return MaskedView(jnp.asarray(packed.counts) & (drawn < rate), rate)


def complement(packed: PackedBatch, view: MaskedView) -> MaskedView:
    """The columns that count and are not masked."""
    return MaskedView(jnp.asarray(packed.counts) & ~view.masked, jnp.maximum(1 - view.rate, LEAST))


def read(denoiser: Denoiser, packed: PackedBatch, masked: Array) -> Array:
    """[B, n, T, D]: in one pass over a lesson, what predicts its columns where those of masked bool[B, n, T] are."""
    tokens, first = jnp.asarray(packed.tokens), jnp.asarray(packed.first)
    batch, views, size = masked.shape
    unit, column = units(denoiser, packed), jnp.arange(size)
    copies = jnp.where(masked, denoiser.blank, tokens[:, None])
    if denoiser.is_causal:
        copies = jnp.concatenate([tokens[:, None], copies], 1)
    count = copies.shape[1]
    same_copy = jnp.eye(count, dtype=bool)[:, None, :, None]
    clean = (jnp.arange(count) == 0)[:, None] & denoiser.is_causal
    same_unit = (unit[:, :, None] == unit[:, None, :])[:, None, :, None]  # [B, 1, T, 1, T]
    before = ((first[:, :, None] == first[:, None, :]) & (unit[:, None, :] < unit[:, :, None]))[:, None, :, None]
    mask = (same_copy & same_unit) | (clean & before)  # [B, copies, T, copies, T]
    positions = jnp.broadcast_to(places(packed)[:, None], copies.shape).reshape(batch, -1)
    output, _ = denoiser.model.forward(
        denoiser.params,
        copies.reshape(batch, -1),
        denoiser.model.init_cache(denoiser.params, None, batch, 0),
        positions=positions,
        mask=mask.reshape(batch, count * size, count * size),
    )
    hidden = output.hidden.reshape(batch, count, size, -1)
    said = hidden[:, count - views :]
    if not denoiser.is_shifted:
        return said
    said = jnp.roll(said, 1, 2)
    if not denoiser.is_causal:
        return said
    return jnp.where((unit == column)[:, None, :, None], jnp.roll(hidden[:, :1], 1, 2), said)


def loss_of(
    denoiser: Denoiser, packed: PackedBatch, views: tuple[MaskedView, ...], *, by_rate: bool = True, chunk: int | None = None
) -> tuple[Array, Said]:
    """(float32[], what the views say): the mean over views of the cross entropy per column that counts.

    by_rate: masked columns count 1 / rate, which bounds the likelihood; else 1, so that complementary views teach each
      column once. chunk: columns judged at a time, a divisor of T, each of which has V logits; None: all.
    """
    tokens, size = jnp.asarray(packed.tokens), packed.tokens.shape[1]
    masked = jnp.stack([view.masked for view in views], 1)
    weight = jnp.stack([1 / view.rate if by_rate else jnp.ones_like(view.rate) for view in views], 1)
    hidden = read(denoiser, packed, masked)

    def some(params, hidden: Array, i: Array, width: int) -> Said:
        part = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, i, width, axis)
        there, right = part(masked, 2), part(tokens, 1)[:, None]
        logits = logits_of(denoiser.replace(params=params), part(hidden, 2))
        loss = cross_entropy(logits, None, jnp.broadcast_to(right, there.shape), there)
        hits = there & (jnp.argmax(logits, -1) == right)
        return Said(
            jnp.sum(jnp.where(there, loss * part(weight, 2), 0.0)),
            jnp.sum(hits, dtype=jnp.float32),
            jnp.sum(there, dtype=jnp.float32),
        )

    said = sum_in_chunks(some, size, chunk, denoiser.params, hidden)
    count = jnp.maximum(jnp.sum(jnp.asarray(packed.counts)), 1) * (len(views) if by_rate else 1)
    return said.loss / count, said
