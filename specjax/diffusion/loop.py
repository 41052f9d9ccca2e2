"""The denoising loop: each step places a window, runs the model on it and decides columns. `specjax.engine` drives it.

A token is *final* if no earlier column of its row is open. Only final tokens are emitted. A row ends when its text is
final up to its last column or up to an eos token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import first_largest, take_along
from specjax.diffusion import forward
from specjax.diffusion.measures import gap, log_probability
from specjax.diffusion.types import (
    Canvas,
    CanvasCache,
    CanvasOutput,
    Denoiser,
    Procedure,
    Proposal,
    View,
    Window,
    WindowOutput,
    is_eos,
)
from specjax.engine.job import DecodeLoop, Keep
from specjax.engine.results import DecodeResult
from specjax.engine.step import on_mesh
from specjax.errors import UsageError
from specjax.numerics.sampling import filter_logits, is_greedy, noise, warp
from specjax.types import Array, DecodeState, Drafter, Info, PyTree, Sampling, Target, TreeSize


def _no_draft(*_: Any) -> Any:
    raise AssertionError("a denoising loop has no drafter")


NO_DRAFTER = Drafter(_no_draft, size=TreeSize(1, 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoisingParts:
    """The parts of a denoising loop, the counterpart of `specjax.engine.job.Parts`."""

    denoiser: Denoiser
    procedure: Procedure
    sampling: Sampling
    eos: Array  # int32[E], or per row int32[B, E]
    memory: CanvasCache
    width: int = field(metadata={"static": True})  # W
    keep: Keep = field(default=Keep(), metadata={"static": True})
    loop: DecodeLoop = field(kw_only=True, metadata={"static": True})
    serving: bool = field(default=False, metadata={"static": True})
    drafter: Drafter = NO_DRAFTER
    processors: tuple[()] = ()

    @property
    def target(self) -> Target:
        """The model."""
        return self.denoiser.target


class PartStates(NamedTuple):
    """The states of a procedure's parts."""

    schedule: PyTree
    rule: PyTree
    score: PyTree
    control: PyTree
    verify: PyTree


class DenoisingState(NamedTuple):
    """The state of a denoising loop in `DecodeState.draft`: the canvas without its tokens, and the parts' states."""

    open: Array  # bool[B, N]
    start: Array  # int32[B]
    end: Array  # int32[B]
    origin: Array  # int32[B]
    decided_at: Array  # int32[B, N]
    passes: Array  # int32[B]
    window: Array  # int32[B], first column of the previous window; -1: none
    settled: Array  # bool[B], True if the window may move
    columns: Array  # int32[B], columns of the row's canvas in all passes so far
    computed: Array  # int32[B], columns that the program computed for the row so far
    logprobs: Array | None  # float32[B, N], log-probabilities of decided columns
    slots: PartStates


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Denoised(DecodeResult):
    """The result of `denoise`: that of `decode`, the order in which columns were decided, and the cost.

    The cost is the number of columns of all passes. `columns` counts the columns of the row's own canvas, from its
    first column to its end. It does not depend on the batch. `computed` counts what the program computed for the row,
    which includes padding: compiled sizes, longer prompts in the batch, and refreshes that another row needed. Both
    count the passes until the row ends. A prompt that a block-causal cache reads before the first pass is not counted.
    """

    decided_at: Array  # int32[B, max_new_tokens], index of the pass that decided each token; -1 after the end
    columns: Array  # int32[B], columns of the row's own canvas, summed over its passes
    computed: Array  # int32[B], columns that the program computed for the row, summed over its passes

    def cut(self, max_new_tokens: int) -> Self:
        """Return a copy with arrays of `max_new_tokens` tokens, which must fit all rows."""
        shorter = super().cut(max_new_tokens)
        return replace(shorter, decided_at=self.decided_at[:, :max_new_tokens])

    @property
    def columns_per_token(self) -> Array:
        """Number of columns of the row's canvas per token, float32[B]."""
        return self.columns / jnp.maximum(self.lengths, 1)

    @property
    def computed_per_token(self) -> Array:
        """Number of computed columns per token, padding included, float32[B]."""
        return self.computed / jnp.maximum(self.lengths, 1)


def get_canvas(state: DecodeState) -> Canvas:
    """Return the canvas of a state."""
    denoising: DenoisingState = state.draft
    return Canvas(
        state.tokens,
        denoising.open,
        denoising.start,
        denoising.end,
        denoising.origin,
        denoising.decided_at,
        denoising.passes,
    )


@on_mesh
def init(
    parts: DenoisingParts, tokens: Array, length: Array, keys: Array, stop: Array, inputs: PyTree = None,
    beside: DecodeState | None = None,
) -> DecodeState:  # fmt: skip
    """Return the state after prefill, as `specjax.engine.step.init` does."""
    batch, size = tokens.shape
    denoiser, procedure, vocab = parts.denoiser, parts.procedure, parts.denoiser.model.vocab_size
    block = denoiser.block or 1
    end = (
        -(-stop // block) * block
    )  # the last block is decided in full, so that a longer text starts with a shorter one
    column = jnp.arange(size)
    tokens = jnp.where(column < length[:, None], tokens, denoiser.blank)  # the padding of prompts must not matter
    opened = (column >= length[:, None]) & (column < end[:, None])
    decided_at = jnp.where(column < length[:, None], -2, jnp.full((batch, size), -1))
    nothing = jnp.zeros((batch,), jnp.int32)
    origin = nothing if denoiser.is_causal else length
    canvas = Canvas(tokens, opened, length, end, origin, decided_at, nothing)
    schedule, score, rule, control = procedure.schedule, procedure.score, procedure.rule, procedure.control
    slots = PartStates(
        schedule.init(schedule.params, canvas, parts.width),
        rule.init(rule.params, canvas, parts.width, vocab),
        () if score is None else score.init(score.params, canvas, parts.width, vocab),
        () if control is None else control.init(control.params, canvas, parts.width),
        () if procedure.verify is None else procedure.verify.init(parts, canvas),
    )
    cache = parts.memory.init(denoiser, canvas, parts.width)
    progress = DenoisingState(
        opened, length, end, origin, decided_at, nothing, nothing - 1, jnp.ones((batch,), bool), nothing, nothing,
        jnp.zeros((batch, size)) if parts.keep.logprobs else None, slots,
    )  # fmt: skip
    state = DecodeState(tokens, length, length >= stop, keys, stop, cache, progress, (), jnp.ones((batch,), bool))
    if beside is not None:
        places = axes(parts, state)
        state = state._replace(
            cache=batch_axes.with_shared(cache, beside.cache, places.cache),
            draft=batch_axes.with_shared(progress, beside.draft, places.draft),
        )
    return state


class StepOutcome(NamedTuple):
    """The outcome of a step."""

    canvas: Canvas
    memory: PyTree
    slots: PartStates
    columns: Array  # int32[B], columns of the row's canvas in the passes of this step
    computed: Array  # int32[B], columns that the program computed for the row in this step
    finite: Array  # bool[B]
    passes: Array  # int32[B], passes of the model in this step
    logprobs: Array | None = None  # float32[B, N], of all columns decided so far
    settled: Array | None = None  # bool[B], True if the window may move; None: all True


@on_mesh
def step(parts: DenoisingParts, state: DecodeState) -> tuple[DecodeState, Info]:
    """Run one pass over the window of each row, and emit the tokens that became final."""
    denoising: DenoisingState = state.draft
    procedure, schedule = parts.procedure, parts.procedure.schedule
    canvas, active = get_canvas(state), ~state.done
    start, placed = schedule.place(denoising.slots.schedule, canvas)
    start = jnp.where(denoising.settled, start, denoising.window)
    window = Window(start, start != denoising.window, active, parts.width)
    slots = denoising.slots._replace(schedule=placed)
    function = decide if procedure.verify is None else procedure.verify.decide
    decided = function(parts, state, canvas, window, slots)
    return finish_step(parts, state, window, decided)


def decide(parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates) -> StepOutcome:
    """Run the model once and apply the rule."""
    output, memory = parts.memory.look(parts.denoiser, state.cache, canvas, window)
    return decide_window(parts, state._replace(cache=memory), canvas, window, output, slots)


def decide_window(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, output: WindowOutput, slots: PartStates,
    logits: Array | None = None,
) -> StepOutcome:  # fmt: skip
    """Apply score, rule and control to the model's output. `logits` are the logits of `output`, if already computed."""
    logits = forward.window_logits(parts.denoiser, output) if logits is None else logits
    view = make_view(parts, state, canvas, window, output)
    proposal, slots = propose(parts, view, logits, slots)
    view, quota, slots = apply_bound(parts, canvas, proposal, view, slots)
    take, token, slots = select(parts, proposal, view, quota, slots)
    new_canvas = forward.decide_columns(canvas, view.columns, take, token)
    logprobs = store_logprobs(parts, state, view, take, token, proposal)
    new_canvas, logprobs, slots = apply_control(parts, canvas, new_canvas, logprobs, proposal, view, output, slots)
    rule = parts.procedure.rule
    return StepOutcome(
        canvas=new_canvas,
        memory=state.cache,
        slots=slots,
        columns=output.columns,
        computed=output.computed,
        finite=is_finite(proposal, view),
        passes=window.active.astype(jnp.int32),
        logprobs=logprobs,
        settled=None if rule.settled is None else rule.settled(rule.params, slots.rule),
    )


def make_view(parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, output: WindowOutput) -> View:
    """Return the view of the window for the parts of a procedure, before the schedule bounds it."""
    columns = window.start[:, None] + jnp.arange(window.width)
    exists = columns < canvas.end[:, None]
    inside = jnp.clip(columns, 0, canvas.tokens.shape[1] - 1)
    opened = take_along(canvas.open, inside, 1) & exists
    active = window.active[:, None]
    return View(
        start=window.start,
        columns=columns,
        tokens=forward.input_tokens(parts.denoiser, canvas, columns),
        exists=exists,
        open=opened,
        eligible=opened & output.predicted & active,
        revisable=~opened & exists & (columns >= canvas.start[:, None]) & output.predicted & active,
        entered=window.entered,
        active=window.active,
        keys=forward.column_keys(state.keys, columns, canvas.start, canvas.decided),
        passes=canvas.passes,
        eos=parts.eos,
        canvas=canvas,
    )


def propose(parts: DenoisingParts, view: View, logits: Array, slots: PartStates) -> tuple[Proposal, PartStates]:
    """Return the model's proposal after the score."""
    score = parts.procedure.score
    if score is not None and score.transform is not None:
        logits, changed = score.transform(score.params, slots.score, logits, view)
        slots = slots._replace(score=changed)
    if score is None or score.warp is None:
        warped = warp(logits, parts.sampling)
    else:
        warped = score.warp(score.params, logits, parts.sampling, view)
    proposal = make_proposal(draw_tokens(parts, view.keys, warped), logits, warped, parts.sampling)
    if score is not None and score.weigh is not None:
        proposal = proposal._replace(weight=score.weigh(score.params, slots.score, proposal, view))
    return proposal, slots


def make_proposal(token: Array, logits: Array, warped: Array, sampling: Sampling) -> Proposal:
    """Return the proposal of tokens int32[B, W] that were drawn from `warped`."""
    greedy = is_greedy(sampling, len(logits))
    filtered = jnp.where(greedy[:, None, None], filter_logits(logits, sampling), warped)
    return Proposal(token, logits, warped, filtered, greedy)


def draw_tokens(parts: DenoisingParts, keys: Array, warped: Array) -> Array:
    """Draw one token per column of the warped logits: int32[B, W]. A greedy program takes the largest."""
    if parts.sampling.temperature is not None:
        warped = warped + noise(keys, warped.shape[-1])
    return first_largest(warped)


def apply_bound(
    parts: DenoisingParts, canvas: Canvas, proposal: Proposal, view: View, slots: PartStates
) -> tuple[View, Array, PartStates]:
    """Return (the view with the columns that may be decided now, quota, slots)."""
    end, quota, bound = parts.procedure.schedule.bound(slots.schedule, canvas, proposal, view)
    within = view.columns < end[:, None]
    view = view._replace(eligible=view.eligible & within, revisable=view.revisable & within)
    return view, quota, slots._replace(schedule=bound)


def select(
    parts: DenoisingParts, proposal: Proposal, view: View, quota: Array, slots: PartStates
) -> tuple[Array, Array, PartStates]:
    """Return (take bool[B, W], token int32[B, W], slots) of the rule."""
    rule, score = parts.procedure.rule, parts.procedure.score
    take, token, rule_state = rule.select(rule.params, slots.rule, proposal, view, quota)
    take &= view.eligible if rule.settled is None else view.eligible | view.revisable
    slots = slots._replace(rule=rule_state)
    if score is not None and score.learn is not None:
        slots = slots._replace(score=score.learn(score.params, slots.score, view, take, token))
    return take, token, slots


def apply_control(
    parts: DenoisingParts, old_canvas: Canvas, new_canvas: Canvas, logprobs: Array | None, proposal: Proposal,
    view: View, output: WindowOutput, slots: PartStates,
) -> tuple[Canvas, Array | None, PartStates]:  # fmt: skip
    """Apply the control to the canvas after the rule and to its log-probabilities."""
    control = parts.procedure.control
    if control is None:
        return new_canvas, logprobs, slots
    wide = None
    if control.wide:
        assert output.canvas is not None
        logits = forward.compute_logits(parts.denoiser, output.canvas)
        wide = CanvasOutput(first_largest(logits), gap(logits))
    act, changed = control.act(control.params, slots.control, new_canvas, proposal, view, wide)
    slots = slots._replace(control=changed)
    if act.fill is not None:
        if wide is None:
            raise UsageError(
                "a control that fills a canvas needs the output for the whole canvas; create it with wide=True"
            )
        columns = jnp.broadcast_to(jnp.arange(new_canvas.tokens.shape[1]), new_canvas.tokens.shape)
        fill = old_canvas.open & act.fill[:, None] & view.active[:, None]
        new_canvas = forward.decide_columns(new_canvas, columns, fill, wide.best)
        logprobs = (
            None if logprobs is None else jnp.where(fill, 0.0, logprobs)
        )  # a fill has no alternative: probability 1
    if act.end is not None:
        end = jnp.where(view.active, jnp.minimum(act.end, new_canvas.end), new_canvas.end)
        new_canvas = new_canvas._replace(
            end=end, open=new_canvas.open & (jnp.arange(new_canvas.open.shape[1]) < end[:, None])
        )
    return new_canvas, logprobs, slots


def is_finite(proposal: Proposal, view: View) -> Array:
    """Return bool[B]: True if the logits of all eligible columns are valid: no NaN, no +inf, and not all -inf."""
    wrong = jnp.any(jnp.isnan(proposal.logits) | (proposal.logits == jnp.inf), -1) | (
        jnp.max(proposal.logits, -1) == -jnp.inf
    )
    return ~jnp.any(wrong & view.eligible, 1)


def store_logprobs(
    parts: DenoisingParts, state: DecodeState, view: View, take: Array, token: Array, proposal: Proposal
) -> Array | None:
    """Store the log-probabilities of decided columns under the distributions that they were drawn from."""
    denoising: DenoisingState = state.draft
    if denoising.logprobs is None:
        return None
    place = jnp.where(take, view.columns, denoising.logprobs.shape[1])
    value = log_probability(proposal.warped, token)
    return denoising.logprobs.at[jnp.arange(len(place))[:, None], place].set(value, mode="drop")


def finish_step(
    parts: DenoisingParts, state: DecodeState, window: Window, decided: StepOutcome
) -> tuple[DecodeState, Info]:
    """Return the next state, and the tokens that became final in this step."""
    denoising: DenoisingState = state.draft
    active = ~state.done
    keep = lambda new, old: jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
    canvas = decided.canvas
    settled = jnp.ones_like(active) if decided.settled is None else decided.settled
    known_length = jnp.minimum(
        jnp.where(settled, canvas.first_open, jnp.maximum(window.start, state.length)), state.stop
    )
    known_length = jnp.where(decided.finite, known_length, state.length)
    size = state.tokens.shape[1]
    index = jnp.arange(size)
    new = (index >= state.length[:, None]) & (index < known_length[:, None])
    ends = new & is_eos(parts.eos, canvas.tokens)
    hit = active & jnp.any(ends, 1)
    length = jnp.where(hit, jnp.argmax(ends, 1).astype(jnp.int32) + 1, known_length)
    length = jnp.where(active, jnp.maximum(length, state.length), state.length)
    done = state.done | hit | ~decided.finite | (length >= jnp.minimum(state.stop, canvas.end))
    count = length - state.length
    place = jnp.minimum(state.length[:, None] + index, size - 1)
    emitted = jnp.where(index < count[:, None], take_along(canvas.tokens, place, 1), 0)
    finite = state.finite & (decided.finite | state.done)
    info = Info(
        tokens=emitted,
        emitted=count,
        accepted=jnp.zeros_like(count),
        drafted=jnp.zeros_like(count),
        drafted_depth=jnp.zeros_like(count),
        active=active,
        hit_eos=hit,
        logprobs=None if decided.logprobs is None else jnp.where(
            index < count[:, None], take_along(decided.logprobs, place, 1), 0.0
        ),
        finite=finite,
        done=done,
    )  # fmt: skip
    progress = DenoisingState(
        open=keep(canvas.open, denoising.open),
        start=denoising.start,
        end=canvas.end,
        origin=denoising.origin,
        decided_at=keep(canvas.decided_at, denoising.decided_at),
        passes=denoising.passes + jnp.where(active, decided.passes, 0),
        window=jnp.where(active, window.start, denoising.window),
        settled=settled | ~active,
        columns=denoising.columns + jnp.where(active, decided.columns, 0),
        computed=denoising.computed + jnp.where(active, decided.computed, 0),
        logprobs=decided.logprobs,
        slots=decided.slots,
    )
    return state._replace(
        tokens=keep(canvas.tokens, state.tokens), length=length, done=done, cache=decided.memory, draft=progress,
        finite=finite,
    ), info  # fmt: skip


def axes(parts: DenoisingParts, state: DecodeState) -> DecodeState:
    """Return the row axis of each array of a state."""
    places = batch_axes.rows_first(state)
    memory = parts.memory
    return places if memory.axes is None else places._replace(cache=memory.axes(parts.denoiser, state.cache))


def _result(state: DecodeState, lengths: Array, result: DecodeResult) -> Denoised:
    denoising: DenoisingState = state.draft
    size = state.tokens.shape[1]
    index = jnp.arange(size)
    order = take_along(denoising.decided_at, jnp.minimum(lengths[:, None] + index, size - 1), 1)
    order = jnp.where(index < (state.length - lengths)[:, None], order, -1)
    fields = {name: getattr(result, name) for name in DecodeResult.__dataclass_fields__}
    fields["stats"] = result.stats._replace(target_passes=denoising.passes)  # a step may have several passes
    return Denoised(**fields, decided_at=order, columns=denoising.columns, computed=denoising.computed)


LOOP = DecodeLoop(init, step, axes, _result)
