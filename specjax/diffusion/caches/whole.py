"""The absence of a cache: every pass computes the whole canvas. All other caches approximate it or equal it.

Guarantee: exact, for full attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.diffusion.forward import align_rows, forward_canvas
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.types import PyTree


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> PyTree:
    return denoiser.model.init_cache(denoiser.params, None, len(canvas.tokens), 1)


def _look(denoiser: Denoiser, cache: PyTree, canvas: Canvas, window: Window) -> tuple[WindowOutput, PyTree]:
    batch, size = canvas.tokens.shape
    hidden, _ = forward_canvas(denoiser, cache, canvas)
    return WindowOutput(
        hidden=align_rows(denoiser, hidden, window.start, window.width),
        predicted=jnp.ones((batch, window.width), bool),
        columns=canvas.end,
        computed=jnp.full((batch,), size, jnp.int32),
        canvas=align_rows(denoiser, hidden, jnp.zeros_like(window.start), size),
    ), cache


def _several(denoiser: Denoiser, cache: PyTree, canvases: Canvas, window: Window) -> tuple[WindowOutput, PyTree]:
    """Compute the canvases as rows of one batch."""
    copies, batch, _ = canvases.tokens.shape
    flat = Canvas(*(x.reshape(copies * batch, *x.shape[2:]) for x in canvases))
    repeat = lambda x: jnp.tile(x, copies)
    rows = Window(repeat(window.start), repeat(window.entered), repeat(window.active), window.width)
    output, _ = _look(denoiser, _init(denoiser, flat, window.width), flat, rows)
    output = jax.tree.map(lambda x: x.reshape(copies, batch, *x.shape[1:]), output)
    return output._replace(columns=jnp.sum(output.columns, 0), computed=jnp.sum(output.computed, 0)), cache


def _axes(denoiser: Denoiser, cache: PyTree) -> PyTree:
    return denoiser.model.axes(cache)


WHOLE = CanvasCache(_look, "full", True, _init, "whole", _axes, _several)
