"""Dimple's confident decoding: each pass decides all confident columns, or as many as a time grid requires.

The keys and values of the prompt are computed once, together with the masked columns.

Yu, Ma, Wang: Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (2025), arXiv
2505.16990, after its release.

Rule: take {confidence > gamma}. If no column is confident and m of G columns are masked, the time is t = m / G. The
grid is s_k = 1 - (1 - eps) k / S. In pass i, from 0, let k >= i + 1 be the first index with s_k < t and
n = int(m (1 - s_k / t)) >= 1. Take the n most confident columns, or all of them if k = S. Pass S - 1 takes all columns.
Confidences are those before temperature and top-p.
Cache: the first pass reads the prompt and the masked columns with full attention. The keys and values of the prompt are
kept from it, without the prompt's last column. Every pass computes this column and the columns after the prompt.
Guarantee: lossy. With one layer the cache is exact.
Deviations: the columns after the prompt are computed twice in the first pass, with the same result. The default of S is
one pass for each column; that of the release is 512. Images are not supported.
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
        Option("prefill", "yes_or_no", True, "compute the prompt once, in the first pass"),
    ),
)


@checked
def dimple(
    denoiser: Denoiser, *, gamma: float = 0.95, steps: int | None = None, eps: float = 1e-3, prefill: bool = True
) -> Procedure:
    """Return the procedure.

    Args:
      gamma: confidence above which a column is taken. steps: S, maximum number of passes; None: one for each column.
      eps: last time of the grid. prefill: compute the prompt once, as models with block-causal attention always do.

    Raises: UsageError for prefill=False and a block-causal model.
    """
    if denoiser.is_causal and not prefill:
        raise UsageError(
            "prefill=False has no effect for a block-causal model, which always computes its prompt once; leave "
            "prefill out"
        )
    memory = PREFILLED if prefill and not denoiser.is_causal else None
    return Procedure(blocks(denoiser.block), confident(gamma, steps, eps), memory)


class State(NamedTuple):
    """Progress in a window."""

    total: Array  # int32[B], G, columns that were masked on entry
    passes: Array  # int32[B], i, passes over this window


@functools.cache
def confident(gamma: float, steps: int | None = None, eps: float = 1e-3) -> ColumnRule:
    """Return the rule that takes every column with confidence > gamma, or the share of the time grid.

    Raises: UsageError for steps below 1, or an eps outside [0, 1).
    """
    check_grid(steps, eps)

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> State:
        nothing = jnp.zeros_like(canvas.start)
        return State(nothing + 1, nothing)

    def select(params, state: State, proposal: Proposal, view: View, quota: Array):
        left = jnp.sum(view.open, 1, dtype=jnp.int32)
        total = jnp.maximum(jnp.where(view.entered, left, state.total), 1)
        passes = jnp.where(view.entered, 0, state.passes)
        grid = total if steps is None else jnp.full_like(total, steps)
        sure = measures.confidence(proposal)
        high = view.eligible & (sure > gamma)
        enough = jnp.any(high, 1) & (passes < grid - 1)
        share = measures.top(sure, view.eligible, _share(left, total, passes, grid, eps))
        take = jnp.where(enough[:, None], high, share)
        return take, proposal.token, State(total, passes + jnp.any(view.eligible, 1))

    return ColumnRule(select, init)


def _share(left: Array, total: Array, passes: Array, grid: Array, eps: float) -> Array:
    """Return int32[B]: the number of columns that the time grid requires of a pass without a confident column.

    With t = m / G, the number m (1 - s_k / t) is m - G + k G (1 - eps) / S.
    """
    each = total * (1 - eps) / grid
    index = jnp.maximum(jnp.ceil((total - left + 1) / each).astype(jnp.int32), passes + 1)
    share = jnp.floor(left - total + each * index).astype(jnp.int32)
    return jnp.where(index >= grid, left, jnp.maximum(share, 1))


def _read_canvas(denoiser: Denoiser, canvas: Canvas, width: int) -> PyTree:
    """Return the keys and values of the prompt without its last column, from a pass over the whole canvas."""
    batch, size = canvas.tokens.shape
    cache = denoiser.model.init_cache(denoiser.params, None, batch, size)
    _, pending = forward_canvas(denoiser, cache, canvas)
    path = jnp.broadcast_to(jnp.arange(size), (batch, size))
    return denoiser.model.commit(cache, pending, path, canvas.start - 1)


def _look(denoiser: Denoiser, cache: PyTree, canvas: Canvas, window: Window) -> tuple[WindowOutput, PyTree]:
    """Run the model over the last column of the prompt and the window. The rest is cached.

    The pass over the whole canvas counts as part of the first pass.
    """
    width, first = window.width + 1, canvas.passes == 0
    columns = canvas.start[:, None] - 1 + jnp.arange(width)
    mask = (columns < canvas.end[:, None])[:, None, :] | jnp.eye(width, dtype=bool)
    hidden, _ = forward(denoiser, cache, input_tokens(denoiser, canvas, columns), columns, mask)
    return WindowOutput(
        hidden=hidden[:, :-1] if denoiser.is_shifted else hidden[:, 1:],
        predicted=jnp.ones((len(columns), window.width), bool),
        columns=canvas.end - canvas.start + 1 + jnp.where(first, canvas.end, 0),
        computed=width + jnp.where(first, canvas.tokens.shape[1], 0),
    ), cache


def _check(procedure: Procedure) -> None:
    if procedure.schedule.width is not None:
        raise UsageError(
            f"the cache `prefilled` needs a schedule over all new columns, and this one has a window of "
            f"{procedure.schedule.width}; use prefill=False, or keep the schedule of dimple"
        )


PREFILLED = CanvasCache(
    _look, "full", False, _read_canvas, "prefilled", lambda denoiser, cache: denoiser.model.axes(cache), check=_check
)
