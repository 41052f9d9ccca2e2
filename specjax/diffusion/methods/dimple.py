"""Dimple's confident decoding: each pass decides all confident columns, or as many as a time grid requires.

The keys and values of the prompt are computed once.

Yu, Ma, Wang: Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (2025), arXiv
2505.16990.

Rule: take {confidence > gamma}. If no column is confident and m of G columns are masked, the time is t = m / G. The
grid is s_k = 1 - (1 - eps) k / S. Let s be the first time of the grid below t with n = int(m (1 - s / t)) >= 1. Take
the n most confident columns, or 1 column if there is no such time. Pass S takes all columns.
Confidences are those before temperature and top-p.
Cache: columns of the prompt attend only to the prompt and are read once. A pass computes the columns after it.
Guarantee: lossy; with S = G, the default (`steps=None`), and without `prefill` it is the threshold rule. With one layer
the cache is exact.
Deviations: the last column of the prompt is computed in every pass, because its row predicts the first new column of
shifted models. Images are not supported.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.forward import forward, forward_canvas, input_tokens
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.schedules.timesteps import check_grid
from specjax.diffusion.types import (
    Canvas,
    CanvasCache,
    ColumnRule,
    Denoiser,
    Procedure,
    Proposal,
    Schedule,
    View,
    Window,
    WindowOutput,
)  # fmt: skip
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="dimple",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns, or as many as a schedule requires if none is, and caches the prompt",
    paper="Yu et al. 2025, arXiv 2505.16990",
    options=(
        Option("gamma", "float", 0.95, "confidence above which a column is decided"),
        Option("steps", "int", None, "maximum number of passes; default: one per column"),
        shared.EPS,
        Option("prefill", "yes_or_no", True, "compute the prompt once, for models with full attention"),
    ),
)


@checked
def dimple(
    denoiser: Denoiser, *, gamma: float = 0.95, steps: int | None = None, eps: float = 1e-3, prefill: bool = True
) -> Procedure:
    """Return the procedure.

    Args:
      gamma: confidence above which a column is taken. steps: S, maximum number of passes; None: one for each column.
      eps: last time of the grid. prefill: read the prompt once, as models with block-causal attention always do.
    """
    memory = PREFILLED if prefill and not denoiser.is_causal else None
    return Procedure(next_times(denoiser.block, steps, eps), confident(gamma), memory)


@functools.cache
def confident(gamma: float) -> ColumnRule:
    """Return a rule that takes every column with confidence > gamma.

    If there is none, or if the quota covers all masked columns, it takes the quota.
    """

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        high = view.eligible & (sure > gamma)
        enough = jnp.any(high, 1) & (quota < jnp.sum(view.eligible, 1))
        share = measures.top(sure, view.eligible, jnp.maximum(quota, 1))
        return jnp.where(enough[:, None], high, share), proposal.token, state

    return ColumnRule(select)


class State(NamedTuple):
    total: Array  # int32[B], G, columns of this window that were masked on entry
    passes: Array  # int32[B], passes over this window


@functools.cache
def next_times(size: int | None = None, steps: int | None = None, eps: float = 1e-3) -> Schedule:
    """Return a schedule whose quota follows the time grid, from the time that matches the number of masked columns."""
    check_grid(steps, eps)

    def init(params: PyTree, canvas: Canvas, width: int) -> State:
        nothing = jnp.zeros_like(canvas.start)
        return State(nothing + 1, nothing)

    def bound(state: State, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, State]:
        left = jnp.sum(view.open, 1, dtype=jnp.int32)
        total = jnp.maximum(jnp.where(view.entered, left, state.total), 1)
        passes = jnp.where(view.entered, 0, state.passes)
        grid = total if steps is None else jnp.full_like(total, steps)
        each = total * (1 - eps) / grid  # columns between two times of the grid; n = m - G s, as m / t = G
        place = jnp.ceil((total - left + 1) / each)
        share = jnp.where(place > grid, 1, jnp.floor(left - total + each * place).astype(jnp.int32))
        quota = jnp.where(passes >= grid - 1, left, share)
        return view.start + view.columns.shape[1], quota, State(total, passes + jnp.any(view.eligible, 1))

    return Schedule(size, blocks(size).place, bound, init)


def _read_prompt(denoiser: Denoiser, canvas: Canvas, width: int) -> PyTree:
    batch, size = canvas.tokens.shape
    cache = denoiser.model.init_cache(denoiser.params, None, batch, size)
    _, pending = forward_canvas(denoiser, cache, canvas._replace(end=canvas.start))
    path = jnp.broadcast_to(jnp.arange(size), (batch, size))
    return denoiser.model.commit(cache, pending, path, canvas.start - 1)


def _look(denoiser: Denoiser, cache: PyTree, canvas: Canvas, window: Window) -> tuple[WindowOutput, PyTree]:
    """Run the model over the last column of the prompt and the window. The rest is cached."""
    width = window.width + 1
    columns = canvas.start[:, None] - 1 + jnp.arange(width)
    mask = (columns < canvas.end[:, None])[:, None, :] | jnp.eye(width, dtype=bool)
    hidden, _ = forward(denoiser, cache, input_tokens(denoiser, canvas, columns), columns, mask)
    return WindowOutput(
        hidden=hidden[:, :-1] if denoiser.is_shifted else hidden[:, 1:],
        predicted=jnp.ones((len(columns), window.width), bool),
        columns=canvas.end - canvas.start + 1,
    ), cache


def _check(procedure: Procedure) -> None:
    if procedure.schedule.width is not None:
        raise UsageError(
            f"the cache `prefilled` needs a schedule over all new columns, and this one has a window of "
            f"{procedure.schedule.width}; use prefill=False, or keep the schedule of dimple"
        )


PREFILLED = CanvasCache(
    _look, "full", False, _read_prompt, "prefilled", lambda denoiser, cache: denoiser.model.axes(cache), check=_check
)
