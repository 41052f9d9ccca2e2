"""LinearSpec: a block-causal model drafts a block in one pass, and judges it as the autoregressive model that it is.

SGLang's algorithm LinearSpec for Nemotron-Labs-Diffusion (2026); without a paper.

Rule: one pass in both directions over the next W columns gives d_i; one causal pass over the last decided token and d
gives the model's own rows p_i. Of d the prefix that the chain verifier accepts stands, and one token more of it
(`specjax.verifiers.exact.standard`): at temperature 0 the longest prefix with d_i = argmax p_i, and argmax p behind it.
Guarantee: distribution, of the model's own autoregressive mode: the same weights with blocks of one whose row of a
column predicts the next. All columns are drafted in one pass, independently given the text, so the row that d_i was
drawn from is its law given what stands before it, which the verifier needs; drafts have noise of their own.
Deviations: the release is greedy. The window begins behind the last decided column, not at a multiple of the block:
what is kept is token-causal, and knows no blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method
from specjax.diffusion import forward, rules, schedules
from specjax.diffusion.caches import TOKEN_CAUSAL, token_causal
from specjax.diffusion.loop import (
    DenoisingParts,
    PartStates,
    StepOutcome,
    draw_tokens,
    is_finite,
    make_view,
    propose,
    store_logprobs,
)
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Verify, View, Window
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.numerics.sampling import DRAFT, fold_in, node_keys, warp
from specjax.types import Array, DecodeState, TokenTree
from specjax.verifiers.exact.standard import standard

METHOD = Method(
    name="linear_spec",
    kind="diffusion",
    guarantee="distribution",
    summary="for block-causal models: drafts a block in one pass and verifies it in the model's autoregressive mode",
    paper="SGLang, Nemotron-Labs-Diffusion 2026",
)


class Judged(NamedTuple):
    """What the autoregressive mode lets stand."""

    canvas: Canvas
    kept: Array  # int32[B], of the tokens judged, root included
    finite: Array  # bool[B]
    logprobs: Array | None


@checked
def linear_spec(denoiser: Denoiser) -> Procedure:
    """A pass drafts one block.

    Raises: UsageError for a model with full attention, which has no autoregressive mode.
    """
    block = causal_block(denoiser, "linear_spec")
    return Procedure(schedules.leading(block), rules.quota(), TOKEN_CAUSAL, verify=JUDGED)


def causal_block(denoiser: Denoiser, method: str) -> int:
    """Columns of a block.

    Raises: UsageError for a model with full attention.
    """
    if denoiser.block is None:
        raise UsageError(f"{method} needs a block-causal model, and this one has full attention; choose freedave")
    return denoiser.block


def draft_keys(state: DecodeState, view: View) -> Array:
    """Keys [B, W] of what is drafted from here on: neither the target's own nor those of another round."""
    return fold_in(fold_in(fold_in(state.keys, view.start), DRAFT)[:, None], view.columns)


def decide(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates, *, asked: bool = False
) -> StepOutcome:
    """A round. asked: the model's rows are those of a mask at each column, else of the column before."""
    seen, memory = parts.memory.look(parts.denoiser, state.cache, canvas, window)
    view = make_view(parts, state, canvas, window, seen)
    proposal, slots = propose(parts, view, forward.compute_logits(parts.denoiser, seen.hidden), slots)
    drafts = draw_tokens(parts, draft_keys(state, view), proposal.warped)
    root = take_along(canvas.tokens, window.start[:, None] - 1, 1)
    tokens = jnp.concatenate([root, drafts], 1)  # int32[B, 1 + W]
    masks = jnp.full_like(tokens, parts.denoiser.blank) if asked else None
    hidden, pending = token_causal.read(parts.denoiser, memory, tokens, masks)
    logits = forward.compute_logits(parts.denoiser, hidden)
    after = judged(parts, state, canvas, view, tokens, proposal.warped, logits)
    kept = jnp.where(window.active, after.kept, 0)
    return StepOutcome(
        canvas=after.canvas,
        memory=token_causal.keep(parts.denoiser, memory, pending, kept, tokens.shape[1]),
        slots=slots,
        columns=seen.columns + tokens.shape[1] * (1 + asked),
        finite=is_finite(proposal, view) & after.finite,
        passes=2 * window.active.astype(jnp.int32),
        logprobs=after.logprobs,
    )


def judged(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, view: View, tokens: Array, drafted: Array, logits: Array
) -> Judged:
    """What stands of root and drafts, tokens [B, 1 + W], that were drawn from warped rows [B, W, V], by the model's own
    logits [B, 1 + W, V], and the token behind it."""
    batch, count = tokens.shape
    depth = jnp.arange(count)
    columns = view.start[:, None] + depth  # that a row predicts
    exists = columns < canvas.end[:, None]
    tree = TokenTree(
        tokens=tokens,
        parents=jnp.broadcast_to(depth - 1, tokens.shape),
        valid=jnp.concatenate([jnp.ones((batch, 1), bool), exists[:, :-1]], 1),
        logits=jnp.concatenate([drafted, jnp.zeros_like(drafted[:, :1])], 1),
    )
    rows = warp(logits, parts.sampling)
    verdict = standard.rule(node_keys(state.keys, view.start, jnp.broadcast_to(depth, tokens.shape)), tree, rows)
    last = verdict.num_nodes[:, None] - 1
    token = jnp.where(depth == last, verdict.next_token[:, None], jnp.roll(tokens, -1, 1))
    take = (depth <= last) & exists & view.active[:, None]
    wide = view._replace(columns=columns, eligible=take)
    own = Proposal(token, logits, rows)
    return Judged(
        forward.decide_columns(canvas, columns, take, token), verdict.num_nodes, is_finite(own, wide),
        store_logprobs(parts, state, wide, take, token, own),
    )  # fmt: skip


def check(procedure: Procedure) -> None:
    """Raises: UsageError for parts that would not be asked, or not heard by what judges."""
    for name in ("score", "control"):
        if getattr(procedure, name) is not None:
            raise UsageError(f"drafts are judged by the model alone, which hears no {name}; leave it out")
    if procedure.schedule != schedules.leading(procedure.schedule.width) or procedure.rule != rules.quota():
        raise UsageError("drafts are the next columns, and the model decides; leave schedule and rule as they are")


JUDGED = Verify(decide, exact_memory=False, memory=TOKEN_CAUSAL, check=check)
