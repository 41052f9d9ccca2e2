"""Dream's decoding without blocks: a time grid sets the number of columns per pass, and one of four scores ranks them.

Ye et al.: Dream 7B: Diffusion Large Language Models (2025), arXiv 2508.15487.

Rule: `specjax.diffusion.schedules.timesteps` gives n, and the n columns with the largest score s are decided. The
scores are computed from the distribution after temperature, top-k and top-p. At temperature 0 they are those of
temperature 1, after top-k and top-p. `maskgit_plus`: probability of the drawn token.
`topk_margin`: p1 - p2. `entropy`: sum p log p. With alg_temp a > 0 the n columns are drawn without replacement, with
weights exp(s / a): these are the n largest s / a + g, with Gumbel noise g. `origin` has no score: step k decides each
masked column with probability 1 - t_{k+1} / t_k.
Guarantee: definition.
Deviations: with `origin`, a column is still masked after step k with probability t_{k+1}, independently of the others.
Each column therefore draws a time uniformly from (0, 1) once, and is decided in the step whose interval contains it.
This is the same distribution, and steps that decide no column are skipped. If both are given, top-k applies before
top-p, as in all methods; the release applies top-p first.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.rules.quota import MEASURES, quota
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.schedules.timesteps import check_grid, timesteps
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.types import Array, PyTree

METHOD = Method(
    name="dream",
    kind="diffusion",
    guarantee="definition",
    summary="decides columns without blocks: a schedule sets their number, and one of four scores ranks them",
    paper="Ye et al. 2025, arXiv 2508.15487",
    options=(
        Option("alg", ("origin", "maskgit_plus", "topk_margin", "entropy"), "origin", "score that ranks the columns"),
        Option("steps", "int", None, "steps of the time grid; default: one per column"),
        shared.EPS,
        Option("alg_temp", "float", 0.0, "temperature of the random choice of columns"),
    ),
)


Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]
SCORES = {"maskgit_plus": "warped_confidence", "topk_margin": "warped_margin", "entropy": "warped_entropy"}


@checked
def dream(
    denoiser: Denoiser,
    *,
    alg: Algorithm = "origin",
    steps: int | None = None,
    eps: float = 1e-3,
    alg_temp: float = 0.0,
) -> Procedure:
    """Return the procedure.

    Args:
      alg: score that ranks the columns; `origin` selects them at random. steps: steps of the time grid; None: one for
        each column. eps: last time of the grid. alg_temp: temperature of the random choice of columns.

    Raises: UsageError for invalid steps, eps or alg_temp, or an alg_temp with `origin`.
    """
    if alg_temp < 0:
        raise UsageError(f"alg_temp must be at least 0, not {alg_temp}")
    if alg == "origin":
        if alg_temp:
            raise UsageError(f"alg origin has no score for alg_temp; leave alg_temp out, or choose {', '.join(SCORES)}")
        return Procedure(blocks(denoiser.block), at_their_times(steps, eps))
    rule = by_chance(SCORES[alg], alg_temp) if alg_temp else quota(SCORES[alg])  # type: ignore[arg-type]
    return Procedure(timesteps(denoiser.block, steps=steps, eps=eps), rule)


@functools.cache
def by_chance(by: str, alg_temp: float) -> ColumnRule:
    """Return a rule that draws the quota of columns without replacement, with weights exp(measure / alg_temp)."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        score = MEASURES[by](proposal, view) / alg_temp + sampling.noise(view.rule_keys, 1)[..., 0]
        return measures.top(score, view.eligible, jnp.maximum(quota, 1)), proposal.token, state

    return ColumnRule(select)


@functools.cache
def at_their_times(steps: int | None = None, eps: float = 1e-3) -> ColumnRule:
    """Return a rule that takes each column in the step of the grid that contains its random time.

    The state is int32[B, W], the step of each column.
    """
    check_grid(steps, eps)

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> Array:
        return jnp.zeros((len(canvas.start), width), jnp.int32)

    def select(params, state: Array, proposal: Proposal, view: View, quota: Array):
        total = jnp.sum(view.open, 1, keepdims=True) if steps is None else steps
        time = sampling.uniform(view.rule_keys, 1)[..., 0]
        column_steps = jnp.minimum(jnp.floor((1 - time) / (1 - eps) * total).astype(jnp.int32), total - 1)
        step = jnp.where(view.entered[:, None], column_steps, state)
        current = jnp.min(jnp.where(view.eligible, step, jnp.iinfo(jnp.int32).max), 1, keepdims=True)
        return view.eligible & (step == current), proposal.token, step

    return ColumnRule(select, init)
