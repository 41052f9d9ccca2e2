"""The dual cache of models with full attention: outside of the window, keys and values stay as they were on entering.

Wu et al.: Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025),
arXiv 2505.22618.

Rule: on entering a window a pass over the whole canvas leaves the keys and values of all columns. Every look computes
the window alone, which sees itself as it is now and all other columns as they were left.
Guarantee: lossy; exact with one layer, where what a column leaves depends on its own token only, or if refreshed in
every pass.
Deviations: the pass that enters computes the window a second time, so that a row says the same beside rows that enter
and alone (as many columns more as the window has, in that pass only). Models with shifted logits compute the column
before the window too, whose row predicts the first one; the release takes that from the entering pass for ever.
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
    cache: PyTree  # of the model, empty
    left: PyTree  # pending of all columns, as the last pass over the canvas left it


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

    def renewed() -> PyTree:
        _, fresh = forward_canvas(denoiser, state.cache, canvas)

        def choose(axis: int, new: Array, old: Array) -> Array:
            return jnp.where(due.reshape(*(1,) * axis, batch, *(1,) * (new.ndim - axis - 1)), new, old)

        return jax.tree.map(choose, denoiser.model.axes(fresh), fresh, state.left)

    any_due = jnp.any(due)
    with jax.named_scope(scopes.RENEWAL):
        left = jax.lax.cond(any_due, renewed, lambda: state.left)

    count = window.width + denoiser.is_shifted
    columns = window.start[:, None] - denoiser.is_shifted + jnp.arange(count)
    column, end = jnp.arange(size), canvas.end[:, None]
    outside = (column < columns[:, :1]) | (column > columns[:, -1:])
    seen = jnp.concatenate([outside & (column < end), columns < end], 1)  # bool[B, N + C]
    itself = jnp.arange(size + count) == size + jnp.arange(count)[:, None]
    mask = seen[:, None] | itself
    hidden, _ = forward(denoiser, state.cache, input_tokens(denoiser, canvas, columns), columns, mask, left)
    return WindowOutput(
        hidden=hidden[:, : window.width],
        predicted=jnp.ones((batch, window.width), bool),
        columns=count + canvas.end * any_due,
    ), State(state.cache, left)


def _axes(denoiser: Denoiser, state: State) -> State:
    return State(denoiser.model.axes(state.cache), denoiser.model.axes(state.left))


@functools.cache
def dual(refresh: int | None = None) -> CanvasCache:
    """refresh: passes after which the whole canvas is computed again; None: only on entering a window.

    Raises: UsageError for less than one.
    """
    if refresh is not None and refresh < 1:
        raise UsageError(f"refresh must be at least 1, not {refresh}")
    return CanvasCache(functools.partial(_look, refresh=refresh), "full", False, _init, "dual", _axes)
