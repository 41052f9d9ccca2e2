"""The memory of a block-causal model's own autoregressive mode: what is kept of a column saw the columns before alone.

It holds all columns before the *root*, the last one that is decided without a gap, as a cache of plain decoding does.
A look reads the root and the window behind it, whose columns see each other and all before; it keeps nothing. What
decides then reads the root and what it would have stand behind it, each column seeing those before (`read`), and has
what stands kept (`keep`).

Guarantee: exact with respect to the model with blocks of one, whatever was looked at; not to the model with its blocks,
for which a finished block sees itself in both directions. The window begins at the first open column.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.diffusion.forward import forward, input_tokens
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Procedure, Window, WindowOutput
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.types import Array, PyTree


class State(NamedTuple):
    cache: PyTree  # of the model
    kept: Array  # int32[B], columns that it holds


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    batch, size = canvas.tokens.shape
    model, params, kept = denoiser.model, denoiser.params, canvas.start - 1
    cache = model.init_cache(params, None, batch, size + max(CHUNK, 2 * width + 2))
    return State(prefill(model, params, cache, canvas.tokens, kept), kept)


def _look(denoiser: Denoiser, state: State, canvas: Canvas, window: Window) -> tuple[WindowOutput, State]:
    width = window.width
    columns = window.start[:, None] + jnp.arange(width + 1) - 1
    tokens = jnp.where(columns < canvas.end[:, None], input_tokens(denoiser, canvas, columns), denoiser.blank)
    index = jnp.arange(width + 1)
    mask = (index[:, None] > 0) | (index[None, :] == 0)  # the root sees itself, the window everything
    hidden, _ = forward(
        denoiser, state.cache, tokens, columns, jnp.broadcast_to(mask, (len(tokens), width + 1, width + 1))
    )
    batch = len(tokens)
    return WindowOutput(
        hidden=hidden[:, :width] if denoiser.is_shifted else hidden[:, 1:],
        predicted=jnp.ones((batch, width), bool),
        columns=jnp.full((batch,), width + 1, jnp.int32),
    ), state


def read(denoiser: Denoiser, state: State, tokens: Array, asked: Array | None = None) -> tuple[Array, PyTree]:
    """(hidden [B, T, D], pending) of the root and what may stand behind it, tokens [B, T].

    asked: int32[B, T], tokens that each see what stands before them, and themselves, at the columns behind the root: of
    models whose row at a column predicts it. Then hidden is theirs.
    """
    batch, count = tokens.shape
    index = jnp.arange(count)
    columns = state.kept[:, None] + index
    before = index[:, None] >= index[None, :]
    if asked is not None:
        tokens, columns = jnp.concatenate([tokens, asked], 1), jnp.concatenate([columns, columns + 1], 1)
        nothing = jnp.zeros((count, count), bool)
        above = jnp.concatenate([before, nothing], 1)
        before = jnp.concatenate([above, jnp.concatenate([before, jnp.eye(count, dtype=bool)], 1)], 0)
    size = before.shape[0]
    hidden, pending = forward(denoiser, state.cache, tokens, columns, jnp.broadcast_to(before, (batch, size, size)))
    return (hidden if asked is None else hidden[:, count:]), pending


def keep(denoiser: Denoiser, state: State, pending: PyTree, count: Array, width: int) -> State:
    """With the first `count` [B] of the `width` tokens that were read."""
    path = jnp.broadcast_to(jnp.arange(width), (len(count), width))
    return State(denoiser.model.commit(state.cache, pending, path, count), state.kept + count)


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), batch_axes.rows_first(state.kept))


def _check(procedure: Procedure) -> None:
    if procedure.verify is None or procedure.verify.memory != TOKEN_CAUSAL:
        raise UsageError(
            "the memory token_causal keeps only what linear_spec or s2d2 let stand; leave it out, or choose one of them"
        )


TOKEN_CAUSAL = CanvasCache(_look, "block_causal", False, _init, "token_causal", _axes, check=_check)
