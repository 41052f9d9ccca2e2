"""ETE: a pass that decides too few columns explores several tokens for one uncertain column and keeps the best of them.

From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models (2025), arXiv 2511.21103.

Rule: *exploit*: decide every column with confidence >= tau in the current block and the `ahead` next ones. If these are
fewer than `min_columns`, *explore*. Choose the masked column of the current block with the largest entropy among those
next to a decided column. One pass evaluates `words` canvases, each with one of the most likely tokens at that column.
Keep the canvas with the largest

    log p(word) + gain * (number of masked columns with confidence >= tau).

The next exploit uses the output of that pass, so no pass is wasted.
Reason: confident columns carry little information. A pass of n columns by the factor rule decides at most `most_bits`
nats. Deciding one uncertain column may make many others confident.
Guarantee: lossy; min_columns=0 and ahead=0 is the threshold rule.
Deviations: the abstract states the principle; the concrete rule is our choice. A pass that explores always decides the
explored column, which need not be the most confident one. The last masked column takes its most likely token without a
pass. With a temperature the candidate tokens are drawn without replacement.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option, shared
from specjax.diffusion import forward, measures
from specjax.diffusion.loop import (
    DenoisingParts,
    PartStates,
    StepOutcome,
    apply_bound,
    apply_control,
    is_finite,
    make_view,
    propose,
    select,
    store_logprobs,
)
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import (
    Canvas,
    ColumnRule,
    Denoiser,
    Procedure,
    Proposal,
    Verify,
    View,
    Window,
    WindowOutput,
)
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.numerics.sampling import noise
from specjax.types import Array, DecodeState, PyTree

METHOD = Method(
    name="ete",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns; if these are few, tries several tokens for one uncertain column",
    paper="arXiv 2511.21103",
    options=(
        Option("block", "int", 32, "columns per block"),
        shared.tau(0.9),
        Option("ahead", "int", 1, "later blocks whose columns may be decided too"),
        Option("min_columns", "int", 2, "number of confident columns below which a pass explores"),
        Option("words", "int", 2, "tokens to explore"),
        Option("gain", "float", 0.1, "value in nats of each column that an explored token makes confident"),
    ),
)


def most_bits(count: int, factor: float) -> float:
    """Return the maximum nats of `count` columns decided by the factor rule, log((n + 1) / ((1 - f) n + 1)).

    A text of -log p(x) nats needs at least -log p(x) divided by this number of passes.
    """
    return math.log((count + 1) / ((1 - factor) * count + 1))


@checked
def ete(
    denoiser: Denoiser,
    *,
    block: int = 32,
    tau: float = 0.9,
    ahead: int = 1,
    min_columns: int = 2,
    words: int = 2,
    gain: float = 0.1,
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block. tau: confidence at which a column is decided.
      ahead: later blocks whose columns may be decided too.
      min_columns: a pass explores if it has fewer confident columns.
      words: tokens to explore. gain: nats that each confident column adds to the score of a token.

    Raises: UsageError for a block-causal model, which reads no later block, or for numbers that are too small.
    """
    if denoiser.is_causal:
        raise UsageError("ete reads later blocks, which block-causal attention does not allow; choose sdar")
    for name, value, smallest in (("words", words, 1), ("ahead", ahead, 0), ("min_columns", min_columns, 0)):
        if value < smallest:
            raise UsageError(f"{name} must be at least {smallest}, not {value}")
    schedule = dataclasses.replace(blocks(block), width=(1 + ahead) * block)
    return Procedure(schedule, sure(tau, block), verify=exploring(tau, block, min_columns, words, gain))


@functools.cache
def sure(tau: float, block: int) -> ColumnRule:
    """Return a rule that takes every column with confidence >= tau.

    If the first `block` columns of the window have none, it also takes the most confident of these.
    """

    def take_those(params: PyTree, state: PyTree, proposal: Proposal, view: View, quota: Array):
        confidence = measures.confidence(proposal)
        high = view.eligible & (confidence >= tau)
        current = view.eligible & _in_block(view, block)
        forced = ~jnp.any(high & current, 1, keepdims=True) & measures.top(confidence, current, jnp.ones_like(quota))
        return high | forced, proposal.token, state

    return ColumnRule(take_those)


class Known(NamedTuple):
    """Cached output of the model for the current canvas."""

    hidden: Array  # [B, N, D]
    ready: Array  # bool[B], True if the last pass explored: `hidden` is then valid


@functools.cache
def exploring(tau: float, block: int, min_columns: int, words: int, gain: float) -> Verify:
    """Return the decision of a step: one pass unless its output is cached, and a second one if a row explores."""
    decide = functools.partial(_decide, tau=tau, block=block, min_columns=min_columns, words=words, gain=gain)
    return Verify(decide, _init, exact_memory=False, several=True)


def _in_block(view: View, block: int) -> Array:
    return view.columns < view.start[:, None] + block


def _init(parts: DenoisingParts, canvas: Canvas) -> Known:
    shape = jax.eval_shape(lambda canvas: _look(parts, parts.memory.init(parts.denoiser, canvas, 1), canvas), canvas)
    return Known(jnp.zeros(shape.shape, shape.dtype), jnp.zeros(canvas.start.shape, bool))


def _look(parts: DenoisingParts, memory: PyTree, canvas: Canvas) -> Array:
    """Return hidden states [B, N, D] of the full canvas."""
    nothing = jnp.zeros_like(canvas.start)
    output, _ = parts.memory.look(parts.denoiser, memory, canvas, Window(nothing, nothing == 0, nothing == 0, 1))
    assert output.canvas is not None
    return output.canvas


def _decide(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates, *, tau: float,
    block: int,
    min_columns: int, words: int, gain: float,
) -> StepOutcome:  # fmt: skip
    cached: Known = slots.verify
    active, rows = window.active, jnp.arange(len(canvas.tokens))
    place = jnp.clip(window.start[:, None] + jnp.arange(window.width), 0, canvas.tokens.shape[1] - 1)

    looks, size = active & ~cached.ready, canvas.tokens.shape[1]
    anew = jax.lax.cond(jnp.any(looks), lambda: _look(parts, state.cache, canvas), lambda: cached.hidden)
    hidden = jnp.where(looks[:, None, None], anew, cached.hidden)
    output = WindowOutput(
        take_along(hidden, place[..., None], 1), jnp.ones(place.shape, bool), canvas.end * looks,
        jnp.full_like(canvas.end, size) * jnp.any(looks), canvas=hidden,
    )  # fmt: skip

    # `decided_at` counts the pass whose output decided the column: for cached output, the pass before.
    current = canvas._replace(passes=canvas.passes - 1 + looks)
    view = make_view(parts, state, current, window, output)
    proposal, slots = propose(parts, view, forward.window_logits(parts.denoiser, output), slots)
    view, share, slots = apply_bound(parts, current, proposal, view, slots)
    take, token, slots = select(parts, proposal, view, share, slots)
    high = take & (measures.confidence(proposal) >= tau)
    left = view.open & ~high & _in_block(view, block)
    explores = active & (jnp.sum(high, 1) < min_columns) & jnp.any(left, 1)
    take = jnp.where(explores[:, None], high, take)
    updated = forward.decide_columns(current, view.columns, take, token)

    at = _column(proposal, left, updated, place)
    tried, value = _words(parts, proposal, view, at, words)
    alone = explores & (jnp.sum(updated.open, 1) == 1)
    branches = explores & ~alone
    column = take_along(view.columns, at[:, None], 1)
    put = lambda word: forward.decide_columns(
        updated._replace(passes=current.passes + branches), column, explores[:, None], word[:, None]
    )
    canvases = jax.vmap(put, 1)(tried)  # [k, B, ...]
    assert parts.memory.several is not None
    several = parts.memory.several

    def look() -> tuple[Array, Array]:
        output, _ = several(parts.denoiser, state.cache, canvases, window)
        logits = forward.compute_logits(parts.denoiser, output.hidden)
        confidence = jnp.exp(jnp.max(logits, -1) - jax.nn.logsumexp(logits, -1))
        opened = jax.vmap(lambda one: take_along(one.open, place, 1))(canvases) & view.eligible
        assert output.canvas is not None
        return output.canvas, jnp.sum(opened & (confidence >= tau), 2).astype(jnp.float32)

    unseen = lambda: (jnp.broadcast_to(hidden, (words, *hidden.shape)), jnp.zeros((words, len(rows))))
    looked, num_sure = jax.lax.cond(jnp.any(branches), look, unseen)
    score = value.T + jnp.where(branches, gain * num_sure, 0.0)  # float32[k, B]
    best = first_largest(score.T)
    best_canvas = jax.tree.map(lambda many: many[best, rows], canvases)
    slots = slots._replace(
        verify=Known(
            jnp.where(branches[:, None, None], looked[best, rows], hidden), jnp.where(active, branches, cached.ready)
        )
    )
    spot = explores[:, None] & (jnp.arange(window.width) == at[:, None])
    token = jnp.where(spot, tried[rows, best][:, None], token)
    logprobs = store_logprobs(parts, state, view, take | spot, token, proposal)
    updated, logprobs, slots = apply_control(parts, current, best_canvas, logprobs, proposal, view, output, slots)
    return StepOutcome(
        canvas=updated._replace(passes=canvas.passes),
        memory=state.cache,
        slots=slots,
        columns=canvas.end * (looks + words * branches),
        computed=output.computed + jnp.full_like(canvas.end, words * size) * jnp.any(branches),
        finite=is_finite(proposal, view),
        passes=looks.astype(jnp.int32) + branches,
        logprobs=logprobs,
    )


def _column(proposal: Proposal, left: Array, updated: Canvas, place: Array) -> Array:
    """Return int32[B]: the column of `left` with the largest entropy among those next to a decided column."""
    decided = jnp.pad(~updated.open & (updated.decided_at != -1), ((0, 0), (1, 1)))
    beside = take_along(decided[:, :-2] | decided[:, 2:], place, 1)
    return first_largest(jnp.where(left & beside, measures.entropy(proposal.logits), -jnp.inf))


def _words(parts: DenoisingParts, proposal: Proposal, view: View, at: Array, words: int) -> tuple[Array, Array]:
    """Return (int32[B, k], float32[B, k] log-probabilities) of a column's candidates. Missing candidates have -inf."""
    drawn = measures.drawn_logits(proposal)
    warped, logits = (take_along(x, at[:, None, None], 1)[:, 0] for x in (drawn, proposal.logits))
    if parts.sampling.temperature is not None:
        key = take_along(view.rule_keys, at[:, None], 1)
        warped = warped + jnp.where(proposal.greedy[:, None], 0.0, noise(key, warped.shape[-1])[:, 0])
    value, tried = jax.lax.top_k(warped, words)
    log_probs = take_along(jax.nn.log_softmax(logits, -1), tried, 1)
    return tried, jnp.where(value > -jnp.inf, log_probs, -jnp.inf)
