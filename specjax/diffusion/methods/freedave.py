"""FreeDave: one pass verifies several drafted steps of a procedure and keeps those that the procedure would have taken.

Wu, Zhang: Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models (2025),
arXiv 2510.00294.

Rule: the static step F(y; h) is the canvas that schedule and rule make from canvas y and model output h. Given the
canvas x and an older output h', draft y_1 = x and y_{k+1} = F(y_k; h'). One pass runs the model on y_1 ... y_d and
gives h_1 ... h_d. Then x <- F(y_a; h_a) for the largest a with y_{k+1} = F(y_k; h_k) for all k < a. With d = 1 this is
the static loop.
Guarantee: identical. The text equals that of the procedure without drafts token for token, at any temperature. Noise
depends on (row, column, number of decided columns), and all parts see the same steps. Only rounding differs: passes of
another width may change near-ties, more often in bfloat16 than in float32.
Deviations: the step after the last verified output is taken in the same pass, not in the next one. This needs the same
number of passes, and none for the last column. F may use any rule, so quotas and thresholds are drafted too. Drafts
must equal the static steps; the paper's variant ++ requires inclusion only. Drafts end with the block, and the first
pass over a block has no drafts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import forward
from specjax.diffusion.loop import DenoisingParts, PartStates, StepOutcome, decide_window
from specjax.diffusion.methods.llada import llada
from specjax.diffusion.rules.quota import By
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Verify, Window, WindowOutput
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, DecodeState, PyTree

METHOD = Method(
    name="freedave",
    kind="diffusion",
    guarantee="identical",
    summary="verifies several next steps of llada in one pass and keeps those that llada would take",
    paper="Wu and Zhang 2025, arXiv 2510.00294",
    options=(
        shared.BLOCK,
        shared.STEPS,
        shared.RANKING,
        Option("drafts", "int", 4, "drafted canvases per pass"),
    ),
)


class Last(NamedTuple):
    """Output of the model for the canvas before the last static step."""

    hidden: Array  # [B, W, D]
    predicted: Array  # bool[B, W]
    steps: Array  # int32[B], static steps so far


class Trail(NamedTuple):
    """Progress of the static steps within a pass."""

    canvas: Canvas  # its `passes` counts static steps
    slots: PartStates
    settled: Array  # bool[B]
    logprobs: Array | None
    finite: Array  # bool[B]
    running: Array  # bool[B], rows that took the last step
    hidden: Array | None = None  # [B, W, D], output for the canvas before the last step taken
    predicted: Array | None = None  # bool[B, W]


@checked
def freedave(
    denoiser: Denoiser, *, block: int | None = 32, steps: int | None = None, by: By = "confidence", drafts: int = 4
) -> Procedure:
    """Return the procedure, which gives the text of `llada`. block, steps, by: as in `llada`.

    drafts: canvases per pass, at least 1.
    """
    return llada(denoiser, block=denoiser.block or block, steps=steps, by=by).replace(verify=ahead(drafts))


@functools.cache
def ahead(drafts: int) -> Verify:
    """Return a verification of the next steps of any procedure. drafts: canvases per pass.

    Raises: UsageError for less than one draft.
    """
    if drafts < 1:
        raise UsageError(f"drafts must be at least 1, not {drafts}")
    return Verify(functools.partial(_decide, drafts=drafts), _init, several=True)


def _init(parts: DenoisingParts, canvas: Canvas) -> Last:
    nothing = jnp.zeros_like(canvas.start)

    def look(canvas: Canvas) -> WindowOutput:
        window = Window(nothing, nothing == 0, nothing == 0, parts.width)
        memory = parts.memory.init(parts.denoiser, canvas, parts.width)
        return parts.memory.look(parts.denoiser, memory, canvas, window)[0]

    shape = jax.eval_shape(look, canvas)
    return Last(jnp.zeros(shape.hidden.shape, shape.hidden.dtype), jnp.zeros(shape.predicted.shape, bool), nothing)


def _decide(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates, *, drafts: int
) -> StepOutcome:
    last: Last = slots.verify
    all_rows = jnp.ones_like(window.active)
    begin = Trail(canvas._replace(passes=last.steps), slots, all_rows, state.draft.logprobs, all_rows, all_rows)

    blind = replace(parts, procedure=parts.procedure.replace(control=None))
    nothing = jnp.zeros_like(last.steps)
    older = WindowOutput(last.hidden, last.predicted & ~window.entered[:, None], nothing, nothing)
    logits = forward.compute_logits(parts.denoiser, last.hidden)

    def draft(trail: Trail, step: Array) -> tuple[Trail, Canvas]:
        next_trail = _step(blind, state, window, trail, older, step, trail.running, logits)
        return next_trail, next_trail.canvas

    first = Canvas(*(x[None] for x in begin.canvas))
    canvases = first
    if drafts > 1:
        _, drafted_canvases = jax.lax.scan(draft, begin, jnp.arange(drafts - 1))
        canvases = Canvas(*(jnp.concatenate(pair) for pair in zip(first, drafted_canvases, strict=True)))
    assert parts.memory.several is not None
    output, memory = parts.memory.several(parts.denoiser, state.cache, canvases, window)
    control = parts.procedure.control
    if control is None or not control.wide:
        output = output._replace(canvas=None)

    def verify(trail: Trail, one: tuple[Array, Canvas, WindowOutput]) -> tuple[Trail, None]:
        step, drafted, output = one
        same = (drafted.tokens == trail.canvas.tokens) & (drafted.open == trail.canvas.open)
        next_trail = _step(parts, state, window, trail, output, step, trail.running & jnp.all(same, 1))
        hidden, predicted = _where(
            next_trail.running, (output.hidden, output.predicted), (trail.hidden, trail.predicted)
        )
        return next_trail._replace(hidden=hidden, predicted=predicted), None

    for_each = lambda x: jnp.broadcast_to(x, (drafts, *x.shape))
    each = (
        jnp.arange(drafts),
        canvases,
        output._replace(columns=for_each(output.columns), computed=for_each(output.computed)),
    )
    end, _ = jax.lax.scan(verify, begin._replace(hidden=last.hidden, predicted=last.predicted), each)
    assert end.hidden is not None and end.predicted is not None
    new = canvas.open & ~end.canvas.open & (end.canvas.decided_at >= 0)
    return StepOutcome(
        canvas=end.canvas._replace(
            decided_at=jnp.where(new, canvas.passes[:, None], end.canvas.decided_at), passes=canvas.passes
        ),
        memory=memory,
        slots=end.slots._replace(verify=Last(end.hidden, end.predicted, end.canvas.passes)),
        columns=output.columns,
        computed=output.computed,
        finite=end.finite,
        passes=window.active.astype(jnp.int32),
        logprobs=end.logprobs,
        settled=None if parts.procedure.rule.settled is None else end.settled,
    )


def _step(
    parts: DenoisingParts, state: DecodeState, window: Window, trail: Trail, output: WindowOutput, step: Array,
    running: Array,
    logits: Array | None = None,
) -> Trail:  # fmt: skip
    """Take a static step in rows of `running`, if it is in the same window. The schedule has already placed step 0."""
    first = step == 0
    start, placed = parts.procedure.schedule.place(trail.slots.schedule, trail.canvas)
    running &= first | (start == window.start) | ~trail.settled
    running &= first | jnp.any(
        output.predicted, 1
    )  # a pass that only reads a finished block predicts no column, so no step follows it
    schedule = jax.tree.map(lambda new, old: jnp.where(first, old, new), placed, trail.slots.schedule)
    all_rows = window._replace(entered=window.entered & first)
    state = state._replace(draft=state.draft._replace(logprobs=trail.logprobs))
    decided = decide_window(
        parts, state, trail.canvas, all_rows, output, trail.slots._replace(schedule=schedule), logits
    )
    next_trail = Trail(
        decided.canvas._replace(passes=trail.canvas.passes + 1), decided.slots,
        trail.settled if decided.settled is None else decided.settled,
        decided.logprobs, trail.finite & decided.finite, running, trail.hidden, trail.predicted,
    )  # fmt: skip
    return _where(running, next_trail, trail)._replace(running=running)


def _where(rows: Array, new: Any, old: Any) -> PyTree:
    """Select the new arrays [B, ...] in `rows`."""
    choose = lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
    return jax.tree.map(choose, new, old)
