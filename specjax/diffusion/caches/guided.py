"""Classifier-free guidance: the logits are moved away from those of a second pass, which reads a masked prompt.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992, `cfg_scale`.

Rule: l are the logits for the canvas, and u the logits with every column of the prompt masked. Then
logits = u + (w + 1)(l - u).
Guarantee: w = 0 gives the result of the inner cache. With other weights the logits are not the model's own, so no
guarantee about the model's own text holds.
Deviations: two consecutive passes, each with the inner cache, replace one pass with twice the rows. They count as one
pass with the columns of both.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window
from specjax.errors import UsageError
from specjax.types import PyTree


@functools.cache
def guided(inner: CanvasCache, weight: float) -> CanvasCache:
    """Build a cache that applies guidance with weight w to another cache."""

    def init(denoiser: Denoiser, canvas: Canvas, width: int) -> tuple[PyTree, PyTree]:
        if denoiser.mask_token is None:
            raise UsageError("guidance needs a denoiser with a mask_token, and this one has none; leave guidance out")
        return inner.init(denoiser, canvas, width), inner.init(denoiser, _without(denoiser, canvas), width)

    def look(denoiser: Denoiser, state: tuple[PyTree, PyTree], canvas: Canvas, window: Window):
        output, first = inner.look(denoiser, state[0], canvas, window)
        unprompted, second = inner.look(denoiser, state[1], _without(denoiser, canvas), window)
        both = output._replace(
            columns=output.columns + unprompted.columns,
            computed=output.computed + unprompted.computed,
            canvas=None,
            against=unprompted.hidden,
            guidance=weight,
        )
        return both, (first, second)

    def axes(denoiser: Denoiser, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        assert inner.axes is not None
        return inner.axes(denoiser, state[0]), inner.axes(denoiser, state[1])

    name = f"{inner.name}, guided"
    return CanvasCache(
        look, inner.attention, False, init, name, None if inner.axes is None else axes, check=inner.check
    )


def _without(denoiser: Denoiser, canvas: Canvas) -> Canvas:
    """Return the canvas with a masked prompt."""
    prompt = jnp.arange(canvas.tokens.shape[1]) < canvas.start[:, None]
    return canvas._replace(tokens=jnp.where(prompt, denoiser.blank, canvas.tokens))
