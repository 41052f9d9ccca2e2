"""Prophet: once the model is confident of the answer, all masked columns are decided at once.

Li, Zhou, Muhtar, Yin, Yan, Shen, Liang, Vosoughi, Liu: Diffusion Language Models Know the Answer Before Decoding
(2025), arXiv 2508.19982.

Rule: after each pass, g is the mean over the answer of the gap between a column's two largest logits. rho is the share
of finished passes, this one included. The threshold of g is `early` for rho < 1/3, `middle` for rho < 2/3, and `late`
afterwards. If g reaches it, every masked column takes its most likely token and the row ends.
Guarantee: lossy; infinite gaps are LLaDA's procedure.
Deviations: the release writes "The answer is" into the canvas and reads the next five columns. Here the answer is the
masked columns up to the first end token, decided or most likely. The cuts are at .33 and .67. A fill is greedy at every
temperature. The model must have full attention, because the full canvas is read.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.schedules.blocks import blocks, num_passes
from specjax.diffusion.types import Canvas, CanvasOutput, Control, ControlAction, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="prophet",
    kind="diffusion",
    guarantee="lossy",
    summary="decides columns like llada, and all remaining ones at once when the model is confident of the answer",
    paper="Li et al. 2025, arXiv 2508.19982",
    options=(
        shared.BLOCK,
        shared.STEPS,
        Option("early", "float", 7.5, "gap between the top two logits that suffices in the first third of the passes"),
        Option("middle", "float", 5.0, "gap that suffices in the second third"),
        Option("late", "float", 2.5, "gap that suffices in the last third"),
    ),
)


CUTS = (0.33, 0.67)
"""Shares of the passes after which a smaller gap suffices."""


@checked
def prophet(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    steps: int | None = None,
    early: float = 7.5,
    middle: float = 5.0,
    late: float = 2.5,
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. steps: passes for a block; None: one for
    each column. early, middle, late: gaps that end decoding in the three thirds of the passes.

    Raises: UsageError for a block-causal model, which never reads the full canvas.
    """
    if denoiser.is_causal:
        raise UsageError("prophet needs a model with full attention, and this one is block-causal; choose sdar")
    control = sure_of_the_answer(early, middle, late, block, steps)
    return Procedure(blocks(block, steps=steps), quota(), control=control)


@functools.cache
def sure_of_the_answer(early: float, middle: float, late: float, size: int | None, steps: int | None) -> Control:
    """Return the control that fills the canvas, for blocks of `size` with `steps` passes each."""

    def init(params: PyTree, canvas: Canvas, width: int) -> Array:
        return num_passes(canvas, size, steps)

    def act(params: PyTree, total: Array, canvas: Canvas, proposal: Proposal, view: View, wide: CanvasOutput):
        canvas_before = canvas.open | (canvas.decided_at == canvas.passes[:, None])  # includes the columns of this pass
        new = canvas.decided_at >= -1
        ends = new & view.ends(jnp.where(canvas_before, wide.best, canvas.tokens))
        up_to = jnp.cumsum(ends, 1) - ends == 0
        answer = canvas_before & up_to
        gap = jnp.sum(jnp.where(answer, wide.gap, 0.0), 1) / jnp.maximum(jnp.sum(answer, 1), 1)
        share = (canvas.passes + 1) / total
        enough = jnp.where(share < CUTS[0], early, jnp.where(share < CUTS[1], middle, late))
        return ControlAction(fill=jnp.any(answer, 1) & (gap >= enough)), total

    return Control(act, init, wide=True)
