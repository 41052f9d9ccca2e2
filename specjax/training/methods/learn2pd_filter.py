"""Learn2PD's filter: by its sureness of a block's columns, which of a denoiser's proposals are right already.

Bao, Chen, Xu, Ren: Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive Parallel Decoding
(2025), arXiv 2509.25188.

Texts y that the denoiser wrote one column a pass are replayed by an oracle: of a block that is masked, before which all
is clean and behind which all is masked, it takes in each pass all columns whose likeliest token is y's. A pass gives a
pair: the largest probability c at every column of the block, and whether its likeliest token is y's. A pass that takes
none would say the same again; then the block is y's. The filter, z = W2 relu(W1 c + b1) + b2, is fitted to the pairs:

    minimise the mean of BCE(sigmoid(z_i), [argmax p_i = y_i])

Deviations: what lies behind a text's end is not judged, and its c is 0, as behind the end of a canvas; no pairs are set
aside.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.diffusion.forward import logits_of
from specjax.diffusion.methods.learn2pd import Filter
from specjax.diffusion.types import Denoiser
from specjax.training.data.packing import Lesson
from specjax.training.objectives.masked import read
from specjax.types import Array


class Pairs(NamedTuple):
    """Of S passes over blocks of W columns."""

    sure: Array  # float32[B, S, W]
    right: Array  # bool[B, S, W]
    counts: Array  # bool[B, S, W], columns of a text, in passes that were taken


@functools.partial(jax.jit, static_argnames="block")
def replay(denoiser: Denoiser, lesson: Lesson, block: int) -> Pairs:
    """The oracle's passes over texts, one to a row, of which what counts is replayed, in blocks from its first column.

    There are as many passes over each block as it has columns; those that the oracle did not need do not count.
    """
    tokens, counts = jnp.asarray(lesson.tokens), jnp.asarray(lesson.counts)
    batch, size = tokens.shape
    begin = jnp.argmax(counts, 1)

    def one(carry: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], Pairs]:
        open_, going = carry
        fresh = number % block == 0
        going = going | fresh
        columns = begin[:, None] + number // block * block + jnp.arange(block)
        place = jnp.minimum(columns, size - 1)
        there = (columns < size) & take_along(counts, place, 1)
        logits = logits_of(denoiser, read(denoiser, lesson, open_[:, None]))[:, 0]
        log_p = jax.nn.log_softmax(logits, -1)
        right = jnp.argmax(log_p, -1) == tokens
        of_block = lambda x: take_along(x, place, 1)
        sure = jnp.where(there, jnp.exp(of_block(jnp.max(log_p, -1))), 0.0)  # as at the end of a canvas
        shown = Pairs(sure, of_block(right), there & going[:, None])
        waiting = there & of_block(open_)
        takes = waiting & shown.right
        stuck = ~jnp.any(takes, 1)
        taken = jnp.where((stuck | (number % block == block - 1))[:, None], waiting, takes)
        row = jnp.arange(batch)[:, None]
        open_ = open_.at[row, jnp.where(taken, columns, size)].set(False, mode="drop")
        left = jnp.any(there & take_along(open_, place, 1), 1)
        return (open_, going & left), shown

    passes = jnp.arange(-(-size // block) * block)
    _, pairs = jax.lax.scan(one, (counts, jnp.ones((batch,), bool)), passes)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), pairs)


def fit(pairs: Pairs, key: Array, *, steps: int = 2000, learning_rate: float = 3e-3) -> Filter:
    """The filter of the pairs, by AdamW over all of them at each step."""
    import optax

    width = pairs.sure.shape[-1]
    first, second = jax.random.split(key)
    scale = width**-0.5
    begin = Filter(
        scale * jax.random.normal(first, (width, width)), jnp.zeros(width),
        scale * jax.random.normal(second, (width, width)), jnp.zeros(width),
    )  # fmt: skip
    optimizer = optax.adamw(learning_rate)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        filter, state = carry
        updates, state = optimizer.update(jax.grad(loss_of)(filter, pairs), state, filter)
        return (optax.apply_updates(filter, updates), state), None

    return jax.jit(lambda: jax.lax.scan(step, (begin, optimizer.init(begin)), None, steps)[0][0])()


def loss_of(filter: Filter, pairs: Pairs) -> Array:
    """float32[]: binary cross entropy, the mean over what counts."""
    logit = filter(pairs.sure)
    loss = jax.nn.softplus(jnp.where(pairs.right, -logit, logit))
    return jnp.sum(jnp.where(pairs.counts, loss, 0.0)) / jnp.maximum(jnp.sum(pairs.counts), 1)
