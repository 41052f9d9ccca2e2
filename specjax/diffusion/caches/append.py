"""The exact cache of block-causal models: one more pass reads each finished block and stores its keys and values.

Cheng et al.: SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (2025), arXiv
2510.06303; Wu et al.: Fast-dLLM v2 (2025), arXiv 2509.26328.

Rule: a pass over a block attends to the stored keys of earlier blocks and to the block itself. After the last column of
a block is decided, the *clean pass* reads the final block and stores its keys and values.
Guarantee: exact. Blocks do not attend to later ones, so stored keys and values stay valid.
Deviations: the released samplers use a separate clean pass. Here it is fused with the first pass over the next block,
if any row has just finished a block (`fuse`). The fused pass computes twice the columns, with block-causal attention
between both blocks. Models with shifted logits need the last output of the clean pass before the next block can start.
For them the pass stays separate, and it decides the next block's first column. Rows finish their blocks independently.
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
    cache: PyTree  # cache of the model
    stored: Array  # int32[B], number of stored columns, always complete blocks


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    """Read the complete blocks before the last token of the prompts.

    If the last token ends a block, the first clean pass reads that block.
    """
    assert denoiser.block is not None
    batch, size = canvas.tokens.shape
    cache = denoiser.model.init_cache(denoiser.params, None, batch, size + 2 * width + extra_slots(denoiser))
    stored = (canvas.start - 1) // denoiser.block * denoiser.block
    return State(read_blocks(denoiser, cache, canvas.tokens, stored), stored)


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, fuse: bool
) -> tuple[WindowOutput, State]:
    window_pass = Canvas(*(x[None] for x in canvas))
    output, stored = _several(denoiser, state, window_pass, window, fuse=fuse)
    return output._replace(hidden=output.hidden[0], predicted=output.predicted[0]), stored


def _several(
    denoiser: Denoiser, state: State, canvases: Canvas, window: Window, *, fuse: bool
) -> tuple[WindowOutput, State]:
    """Compute the windows of all canvases in one pass. They do not attend to each other."""
    model, width = denoiser.model, window.width
    copies, batch, _ = canvases.tokens.shape
    total = copies * width
    finished = window.active & (state.stored < window.start)  # the block before the window is decided but not stored
    offset = jnp.arange(width)
    copy_index = jnp.arange(total) // width
    same_copy = copy_index[:, None] == copy_index[None, :]

    def windows(start: Array) -> tuple[Array, Array]:
        """Return (tokens, columns), int32[B, d W]."""
        columns = start[:, None] + offset
        tokens = jax.vmap(lambda canvas: input_tokens(denoiser, canvas, columns))(canvases)
        return jnp.moveaxis(tokens, 0, 1).reshape(batch, total), jnp.tile(columns, copies)

    def blocks(start: Array) -> tuple[Array, PyTree]:
        tokens, columns = windows(start)
        return forward(denoiser, state.cache, tokens, columns, jnp.broadcast_to(same_copy, (batch, total, total)))

    def separate_pass() -> tuple[Array, PyTree]:
        """Read the finished block in rows that have one, and the window in the other rows."""
        return blocks(jnp.where(finished, state.stored, window.start))

    @jax.named_scope(scopes.RENEWAL)
    def fused_pass() -> tuple[Array, PyTree]:
        clean = window.start[:, None] - width + offset
        tokens, columns = windows(window.start)
        first = input_tokens(denoiser, Canvas(*(x[0] for x in canvases)), clean)
        # Each block attends to itself. Windows attend to the clean block in rows that have just finished it.
        clean_block = jnp.broadcast_to(finished[:, None, None], (batch, total, width))
        window_mask = jnp.concatenate([clean_block, jnp.broadcast_to(same_copy, (batch, total, total))], 2)
        clean_mask = jnp.broadcast_to(jnp.arange(width + total) < width, (batch, width, width + total))
        hidden, pending = forward(
            denoiser, state.cache, jnp.concatenate([first, tokens], 1), jnp.concatenate([clean, columns], 1),
            jnp.concatenate([clean_mask, window_mask], 1),
        )  # fmt: skip
        return hidden[:, width:], pending

    def window_pass() -> tuple[Array, PyTree]:
        hidden, pending = blocks(window.start)
        return hidden, model.widen(pending, width + total)

    if denoiser.is_shifted or not fuse:
        hidden, pending = separate_pass()
        columns = computed = jnp.full((batch,), total, jnp.int32)
        predicted = jnp.broadcast_to(~finished[:, None], (batch, width))
    else:
        any_finished = jnp.any(finished)
        with jax.named_scope(scopes.RENEWAL):
            hidden, pending = jax.lax.cond(any_finished, fused_pass, window_pass)
        columns = total + width * finished.astype(jnp.int32)
        computed = total + jnp.full((batch,), width) * any_finished.astype(jnp.int32)
        predicted = jnp.ones((batch, width), bool)
    hidden = jnp.moveaxis(hidden.reshape(batch, copies, width, -1), 1, 0)
    if denoiser.is_shifted:  # the last row of a finished block predicts the first column of the next
        hidden = jnp.roll(hidden, 1, 2)
        predicted = jnp.where(finished[:, None], offset == 0, offset > 0)
    path = jnp.broadcast_to(offset, (batch, width))
    count = jnp.where(finished, width, 0)
    stored = State(model.commit(state.cache, pending, path, count), state.stored + count)
    return WindowOutput(hidden, jnp.broadcast_to(predicted, (copies, batch, width)), columns, computed), stored


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), batch_axes.rows_first(state.stored))


@functools.cache
def append(*, fuse: bool = True) -> CanvasCache:
    """Build the exact cache of a block-causal denoiser.

    Args:
      fuse: run the clean pass of a block as part of the first pass over the next block, unless the logits are shifted.
    """
    look, several = (functools.partial(f, fuse=fuse) for f in (_look, _several))
    return CanvasCache(look, "block_causal", True, _init, "append", _axes, several)
