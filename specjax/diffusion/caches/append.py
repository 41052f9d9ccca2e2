"""The memory of block-causal models: a finished block is read once, clean, and its keys and values are kept.

Cheng et al.: SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (2025), arXiv
2510.06303; Wu et al.: Fast-dLLM v2 (2025), arXiv 2509.26328.

Rule: a pass over a block sees the kept keys of the blocks before, and itself. When the last column of a block is
decided, the *clean pass* reads it as it is now and keeps what it computes.
Guarantee: exact: blocks see nothing behind them, so what is kept never grows old.
Deviations: the released samplers take a pass of its own for the clean block. Here it is part of the first pass over the
next one: twice the columns, block-causal among each other, where any row has just finished a block (`fuse`). Models
that are seeded need the clean pass's last row before the next block can be looked at, so there it stays apart, and is
not wasted, as it decides that block's first column. Rows finish their blocks when they do; none waits for another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes, scopes
from specjax.diffusion.forward import extra_slots, forward, input_tokens, read_blocks
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.types import Array, PyTree


class State(NamedTuple):
    cache: PyTree  # of the model
    kept: Array  # int32[B], columns that it holds: whole blocks


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    """With all whole blocks of the prompts but the last one, which is the first clean pass where it is whole."""
    assert denoiser.block is not None
    batch, size = canvas.tokens.shape
    cache = denoiser.model.init_cache(denoiser.params, None, batch, size + 2 * width + extra_slots(denoiser))
    kept = (canvas.start - 1) // denoiser.block * denoiser.block
    return State(read_blocks(denoiser, cache, canvas.tokens, kept), kept)


def _look(denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, fuse: bool) -> tuple[WindowOutput, State]:
    alone = Canvas(*(x[None] for x in canvas))
    seen, kept = _several(denoiser, state, alone, window, fuse=fuse)
    return WindowOutput(seen.hidden[0], seen.predicted[0], seen.columns), kept


def _several(denoiser: Denoiser, state: State, canvases: Canvas, window: Window, *, fuse: bool) -> tuple[WindowOutput, State]:
    """The windows of all canvases side by side, none of which sees another."""
    model, width = denoiser.model, window.width
    copies, batch, _ = canvases.tokens.shape
    total = copies * width
    finished = window.active & (state.kept < window.start)  # the block before the window is decided, but not kept
    offset = jnp.arange(width)
    of_copy = jnp.arange(total) // width
    within = of_copy[:, None] == of_copy[None, :]

    def windows(start: Array) -> tuple[Array, Array]:
        """(tokens, columns), int32[B, d W]."""
        columns = start[:, None] + offset
        tokens = jax.vmap(lambda canvas: input_tokens(denoiser, canvas, columns))(canvases)
        return jnp.moveaxis(tokens, 0, 1).reshape(batch, total), jnp.tile(columns, copies)

    def blocks(start: Array) -> tuple[Array, PyTree]:
        tokens, columns = windows(start)
        return forward(denoiser, state.cache, tokens, columns, jnp.broadcast_to(within, (batch, total, total)))

    def apart() -> tuple[Array, PyTree]:
        """Rows that have finished a block read it, the others look at their window."""
        return blocks(jnp.where(finished, state.kept, window.start))

    @jax.named_scope(scopes.RENEWAL)
    def together() -> tuple[Array, PyTree]:
        clean = window.start[:, None] - width + offset
        tokens, columns = windows(window.start)
        first = input_tokens(denoiser, Canvas(*(x[0] for x in canvases)), clean)
        # each block sees itself, and the windows the first one where that is new
        before = jnp.broadcast_to(finished[:, None, None], (batch, total, width))
        sees = jnp.concatenate([before, jnp.broadcast_to(within, (batch, total, total))], 2)
        above = jnp.broadcast_to(jnp.arange(width + total) < width, (batch, width, width + total))
        hidden, pending = forward(
            denoiser, state.cache, jnp.concatenate([first, tokens], 1), jnp.concatenate([clean, columns], 1),
            jnp.concatenate([above, sees], 1),
        )  # fmt: skip
        return hidden[:, width:], pending

    def alone() -> tuple[Array, PyTree]:
        hidden, pending = blocks(window.start)
        return hidden, model.widen(pending, width + total)

    if denoiser.is_shifted or not fuse:
        hidden, pending = apart()
        columns = jnp.full((batch,), total, jnp.int32)
        predicted = jnp.broadcast_to(~finished[:, None], (batch, width))
    else:
        any_finished = jnp.any(finished)
        with jax.named_scope(scopes.RENEWAL):
            hidden, pending = jax.lax.cond(any_finished, together, alone)
        columns = total + jnp.full((batch,), width) * any_finished.astype(jnp.int32)
        predicted = jnp.ones((batch, width), bool)
    hidden = jnp.moveaxis(hidden.reshape(batch, copies, width, -1), 1, 0)
    if denoiser.is_shifted:  # the last row of a finished block predicts the first column of the next
        hidden = jnp.roll(hidden, 1, 2)
        predicted = jnp.where(finished[:, None], offset == 0, offset > 0)
    path = jnp.broadcast_to(offset, (batch, width))
    count = jnp.where(finished, width, 0)
    kept = State(model.commit(state.cache, pending, path, count), state.kept + count)
    return WindowOutput(hidden, jnp.broadcast_to(predicted, (copies, batch, width)), columns), kept


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), batch_axes.rows_first(state.kept))


@functools.cache
def append(*, fuse: bool = True) -> CanvasCache:
    """The exact memory of a block-causal denoiser.

    fuse: let the clean pass of a block be part of the first pass over the next, where the model is not seeded.
    """
    look, several = (functools.partial(f, fuse=fuse) for f in (_look, _several))
    return CanvasCache(look, "block_causal", True, _init, "append", _axes, several)
