"""The cache of a block-causal model's autoregressive mode: stored columns attended to earlier columns only.

The cache contains all columns before the *root*, like a cache of plain decoding. The root is the last column before the
first masked one. A window pass reads the root and the window after it, whose columns attend to each other and to all
earlier ones. It stores nothing. The verification then reads the root and its candidate tokens causally (`read`), and
stores the accepted ones (`keep`).

Guarantee: exact with respect to the model with blocks of one, for any window pass. It is not exact with respect to the
model with its blocks, in which a finished block attends to itself in both directions. The window starts at the first
masked column.
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
    cache: PyTree  # cache of the model
    stored: Array  # int32[B], number of stored columns


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    batch, size = canvas.tokens.shape
    model, params, stored = denoiser.model, denoiser.params, canvas.start - 1
    cache = model.init_cache(params, None, batch, size + max(CHUNK, 2 * width + 2))
    return State(prefill(model, params, cache, canvas.tokens, stored), stored)


def _look(denoiser: Denoiser, state: State, canvas: Canvas, window: Window) -> tuple[WindowOutput, State]:
    width = window.width
    columns = window.start[:, None] + jnp.arange(width + 1) - 1
    tokens = jnp.where(columns < canvas.end[:, None], input_tokens(denoiser, canvas, columns), denoiser.blank)
    index = jnp.arange(width + 1)
    mask = (index[:, None] > 0) | (index[None, :] == 0)  # the root attends to itself, the window to everything
    hidden, _ = forward(
        denoiser, state.cache, tokens, columns, jnp.broadcast_to(mask, (len(tokens), width + 1, width + 1))
    )
    batch = len(tokens)
    return WindowOutput(
        hidden=hidden[:, :width] if denoiser.is_shifted else hidden[:, 1:],
        predicted=jnp.ones((batch, width), bool),
        columns=jnp.full((batch,), width + 1, jnp.int32),
        computed=jnp.full((batch,), width + 1, jnp.int32),
    ), state


def read(denoiser: Denoiser, state: State, tokens: Array, queries: Array | None = None) -> tuple[Array, PyTree]:
    """Run the model on the root and candidate tokens after it, [B, T]. Returns: (hidden [B, T, D], pending).

    Args:
      queries: int32[B, T], tokens that models with unshifted logits read in addition. Each one is read at the column
        after its candidate, and attends to the tokens before that column and to itself. `hidden` is then the output at
        the queries.
    """
    batch, count = tokens.shape
    index = jnp.arange(count)
    columns = state.stored[:, None] + index
    causal = index[:, None] >= index[None, :]
    if queries is not None:
        tokens, columns = jnp.concatenate([tokens, queries], 1), jnp.concatenate([columns, columns + 1], 1)
        no_access = jnp.zeros((count, count), bool)
        upper = jnp.concatenate([causal, no_access], 1)
        causal = jnp.concatenate([upper, jnp.concatenate([causal, jnp.eye(count, dtype=bool)], 1)], 0)
    size = causal.shape[0]
    hidden, pending = forward(denoiser, state.cache, tokens, columns, jnp.broadcast_to(causal, (batch, size, size)))
    return (hidden if queries is None else hidden[:, count:]), pending


def keep(denoiser: Denoiser, state: State, pending: PyTree, count: Array, width: int) -> State:
    """Store the first `count` [B] of the `width` tokens that were read."""
    path = jnp.broadcast_to(jnp.arange(width), (len(count), width))
    return State(denoiser.model.commit(state.cache, pending, path, count), state.stored + count)


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), batch_axes.rows_first(state.stored))


def _check(procedure: Procedure) -> None:
    if procedure.verify is None or procedure.verify.memory != TOKEN_CAUSAL:
        raise UsageError(
            "the cache `token_causal` works only with linear_spec and s2d2; leave it out, or choose one of them"
        )


TOKEN_CAUSAL = CanvasCache(_look, "block_causal", False, _init, "token_causal", _axes, check=_check)
