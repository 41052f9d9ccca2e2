"""The dual cache of models with full attention: keys and values outside the window stay fixed after it is entered.

Wu et al.: Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025),
arXiv 2505.22618.

Rule: on entry to a window, a pass over the whole canvas stores the keys and values of all columns. Every pass computes
the window alone. The window attends to its current self and to the stored columns.
Guarantee: lossy; exact with one layer, where stored keys depend on a column's own token only, or if refreshed in
every pass.
Deviations: the entry pass computes the window a second time. A row then has the same result alone as in a batch with
rows that enter a window. This costs the columns of one window, in that pass only. Models with shifted logits also
compute the column before the window, whose output predicts the first one. The release always uses the entry pass for
it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.diffusion.forward import forward, forward_canvas, input_tokens
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.errors import UsageError
from specjax.types import Array, PyTree


class State(NamedTuple):
    cache: PyTree  # cache of the model, empty
    stored: PyTree  # pending keys and values of all columns, from the last pass over the canvas


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    cache = denoiser.model.init_cache(denoiser.params, None, len(canvas.tokens), 1)
    shape = jax.eval_shape(lambda: forward_canvas(denoiser, cache, canvas)[1])
    return State(cache, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, refresh: int | None
) -> tuple[WindowOutput, State]:
    batch, size = canvas.tokens.shape
    due = window.entered if refresh is None else window.entered | (canvas.passes % refresh == 0)
    due &= window.active

    def renew() -> PyTree:
        _, fresh = forward_canvas(denoiser, state.cache, canvas)

        def choose(axis: int, new: Array, old: Array) -> Array:
            return jnp.where(due.reshape(*(1,) * axis, batch, *(1,) * (new.ndim - axis - 1)), new, old)

        return jax.tree.map(choose, denoiser.model.axes(fresh), fresh, state.stored)

    any_due = jnp.any(due)
    with jax.named_scope(scopes.RENEWAL):
        stored = jax.lax.cond(any_due, renew, lambda: state.stored)

    count = window.width + denoiser.is_shifted
    columns = window.start[:, None] - denoiser.is_shifted + jnp.arange(count)
    column, end = jnp.arange(size), canvas.end[:, None]
    is_outside = (column < columns[:, :1]) | (column > columns[:, -1:])
    visible = jnp.concatenate([is_outside & (column < end), columns < end], 1)  # bool[B, N + C]
    itself = jnp.arange(size + count) == size + jnp.arange(count)[:, None]
    mask = visible[:, None] | itself
    hidden, _ = forward(denoiser, state.cache, input_tokens(denoiser, canvas, columns), columns, mask, stored)
    return WindowOutput(
        hidden=hidden[:, : window.width],
        predicted=jnp.ones((batch, window.width), bool),
        columns=count + canvas.end * due,
        computed=count + jnp.full((batch,), size) * any_due,
    ), State(state.cache, stored)


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), denoiser.model.axes(state.stored))


@functools.cache
def dual(refresh: int | None = None) -> CanvasCache:
    """Build the dual cache.

    Args:
      refresh: passes after which the whole canvas is computed again; None: only on entry to a window.

    Raises: UsageError for a `refresh` below 1.
    """
    if refresh is not None and refresh < 1:
        raise UsageError(f"refresh must be at least 1, not {refresh}")
    return CanvasCache(functools.partial(_look, refresh=refresh), "full", False, _init, "dual", _axes)
