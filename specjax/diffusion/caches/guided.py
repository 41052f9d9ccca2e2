"""Classifier-free guidance: a second look at the canvas, with the prompt masked, and the first one is moved away from
it.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992, `cfg_scale`.

Rule: with l what the model says of the canvas and u what it says where every column of the prompt is the mask token,
logits = u + (w + 1)(l - u).
Guarantee: w = 0 says what the memory beneath says. It is not what the model says, so nothing that promises the model's
own text goes with it.
Deviations: two passes one after another, each with the memory beneath, in place of one of twice the rows; they count
as one pass with the columns of both.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.errors import UsageError
from specjax.types import PyTree


@functools.cache
def guided(memory: CanvasCache, weight: float) -> CanvasCache:
    """A memory that is guided. weight: w."""

    def init(denoiser: Denoiser, canvas: Canvas, width: int) -> tuple[PyTree, PyTree]:
        if denoiser.mask_token is None:
            raise UsageError("guidance masks the prompt, and this denoiser has no mask_token; leave guidance out")
        return memory.init(denoiser, canvas, width), memory.init(denoiser, _without(denoiser, canvas), width)

    def look(denoiser: Denoiser, state: tuple[PyTree, PyTree], canvas: Canvas, window: Window):
        seen, first = memory.look(denoiser, state[0], canvas, window)
        blind, second = memory.look(denoiser, state[1], _without(denoiser, canvas), window)
        columns = seen.columns + blind.columns
        return WindowOutput(seen.hidden, seen.predicted, columns, against=blind.hidden, guidance=weight), (first, second)

    def axes(denoiser: Denoiser, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        assert memory.axes is not None
        return memory.axes(denoiser, state[0]), memory.axes(denoiser, state[1])

    name = f"{memory.name}, guided"
    return CanvasCache(look, memory.attention, False, init, name, None if memory.axes is None else axes, check=memory.check)


def _without(denoiser: Denoiser, canvas: Canvas) -> Canvas:
    """The canvas with a masked prompt."""
    prompt = jnp.arange(canvas.tokens.shape[1]) < canvas.start[:, None]
    return canvas._replace(tokens=jnp.where(prompt, denoiser.blank, canvas.tokens))
