"""Certainty forcing: a denoiser is taught to be sure of more of its own text at once.

Chen, Fang, Ma, Yu, Wang: dParallel: Learnable Parallel Decoding for dLLMs (2025), arXiv 2509.26488.

Of texts y that the model itself wrote in blocks from left to right: a block n of a text is drawn; the blocks before it
stay clean, those behind are all masked, and of block n each column is masked with chance 1/2. A second view masks the
other columns of block n. Over the masked columns i of block n in both views, with logits l and p = softmax(l):

    minimise mean of -log p_i(y_i) + beta * mean over {i: argmax p_i = y_i} of H(softmax(l_i / T)),  T = 1/2

The second term makes surer what is right already, and has no derivative where the model errs.
Guarantee: none; the weights change. `entropy <= eta` is the rule that is served with them.
Deviations: all weights may be trained, not only a low-rank part of them; in a lesson of several texts each has a block
of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.diffusion.forward import logits_of
from specjax.diffusion.measures import entropy
from specjax.diffusion.types import Denoiser
from specjax.training.data.packing import Lesson
from specjax.training.objectives.losses import cross_entropy
from specjax.training.objectives.masked import read
from specjax.types import Array


def corrupted(lesson: Lesson, block: int, key: Array) -> tuple[Array, Array]:
    """(masked bool[B, 2, T], judged bool[B, 2, T]): what two views of a lesson hide, and where they are judged.

    block: columns of a block, counted from the first that counts of each text.
    """
    first, counts = jnp.asarray(lesson.first), jnp.asarray(lesson.counts)
    batch, size = counts.shape
    of_blocks, of_masks = jax.random.split(key)
    before = jnp.cumsum(counts, 1) - counts  # of the row that count, before each column
    number = before - jnp.take_along_axis(before, first, 1)  # of its text
    same = first[:, :, None] == first[:, None, :]
    columns = jnp.sum(same & counts[:, None, :], 2)  # that count in its text
    drawn = jnp.take_along_axis(jax.random.uniform(of_blocks, (batch, size)), first, 1)
    chosen = jnp.floor(drawn * -(-columns // block)).astype(jnp.int32)
    here, behind = counts & (number // block == chosen), counts & (number // block > chosen)
    half = jax.random.bernoulli(of_masks, 0.5, (batch, size))
    judged = jnp.stack([here & half, here & ~half], 1)
    return judged | behind[:, None], judged


def loss_of(
    denoiser: Denoiser, lesson: Lesson, masked: Array, judged: Array, *, beta: float = 2.0, temperature: float = 0.5
) -> Array:
    """float32[]. masked, judged: from `corrupted`. beta: 2 of LLaDA, 1 of Dream."""
    right = jnp.broadcast_to(jnp.asarray(lesson.tokens)[:, None], masked.shape)
    logits = logits_of(denoiser, read(denoiser, lesson, masked))
    correct = judged & (jnp.argmax(logits, -1) == right)
    # The mask token's -inf has the share 0 and would have no derivative.
    unsure = entropy(jnp.maximum(logits, jnp.finfo(jnp.float32).min / 4) / temperature)
    taught = mean(cross_entropy(logits, None, right, judged), judged)
    return taught + beta * mean(unsure, correct)


def mean(value: Array, over: Array) -> Array:
    """float32[] of value [...] where `over` bool[...] is; 0 where it is nowhere."""
    return jnp.sum(jnp.where(over, value, 0.0)) / jnp.maximum(jnp.sum(over), 1)
