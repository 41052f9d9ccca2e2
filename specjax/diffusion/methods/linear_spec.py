"""LinearSpec: a block-causal model drafts a block in one pass and verifies it in its autoregressive mode.

Fu, Whalen, Garg et al.: Nemotron-Labs-Diffusion: A Tri-Mode Language Model Unifying Autoregressive, Diffusion, and
Self-Speculation Decoding (2026), arXiv 2607.05722, the linear form of self-speculation. SGLang calls it LinearSpec.

Rule: one bidirectional pass over the next W columns gives drafts d_i. One causal pass over the last decided token and d
gives the autoregressive distributions p_i. The chain verifier (`specjax.verifiers.exact.standard`) accepts a prefix of
d and adds one token. At temperature 0 this is the longest prefix with d_i = argmax p_i, followed by argmax p.
Guarantee: distribution, that of the model's autoregressive mode: the same weights with blocks of one and shifted rows.
All columns are drafted in one pass, independently given the text. The distribution that d_i was drawn from is therefore
its conditional distribution given the earlier drafts, as the verifier requires. Drafts have separate noise.
Deviations: the release is greedy. The window starts after the last decided column, not at a multiple of the block,
because the cache is token-causal and has no blocks. The paper's quadratic form is not implemented.
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
    make_proposal,
    make_view,
    propose,
    store_logprobs,
)
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Verify, View, Window
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
    paper="Fu et al. 2026, arXiv 2607.05722",
)


class VerifiedWindow(NamedTuple):
    """Result of verifying a window in the autoregressive mode."""

    canvas: Canvas
    num_accepted: Array  # int32[B], accepted tokens, root included
    finite: Array  # bool[B]
    logprobs: Array | None


@checked
def linear_spec(denoiser: Denoiser) -> Procedure:
    """Return the procedure. Each round drafts one block.

    Raises: UsageError for a model with full attention, which has no autoregressive mode.
    """
    block = causal_block(denoiser, "linear_spec")
    return Procedure(schedules.leading(block), rules.quota(), TOKEN_CAUSAL, verify=AUTOREGRESSIVE_VERIFY)


def causal_block(denoiser: Denoiser, method: str) -> int:
    """Return the number of columns in a block.

    Raises: UsageError for a model with full attention.
    """
    if denoiser.block is None:
        raise UsageError(f"{method} needs a block-causal model, and this one has full attention; choose freedave")
    return denoiser.block


def draft_keys(state: DecodeState, view: View) -> Array:
    """Return keys [B, W] of the drafts. They differ from the target's keys and from those of other rounds."""
    return fold_in(fold_in(fold_in(state.keys, view.start), DRAFT)[:, None], view.columns)


def decide(
    parts: DenoisingParts,
    state: DecodeState,
    canvas: Canvas,
    window: Window,
    slots: PartStates,
    *,
    mask_rows: bool = False,
) -> StepOutcome:
    """Draft and verify one round.

    mask_rows: the verifying pass reads a mask token at each column and uses its output. Otherwise it uses the output of
    the previous column.
    """
    output, memory = parts.memory.look(parts.denoiser, state.cache, canvas, window)
    view = make_view(parts, state, canvas, window, output)
    proposal, slots = propose(parts, view, forward.compute_logits(parts.denoiser, output.hidden), slots)
    drafts = draw_tokens(parts, draft_keys(state, view), proposal.warped)
    root = take_along(canvas.tokens, window.start[:, None] - 1, 1)
    tokens = jnp.concatenate([root, drafts], 1)  # int32[B, 1 + W]
    masks = jnp.full_like(tokens, parts.denoiser.blank) if mask_rows else None
    hidden, pending = token_causal.read(parts.denoiser, memory, tokens, masks)
    logits = forward.compute_logits(parts.denoiser, hidden)
    verified = verify_drafts(parts, state, canvas, view, tokens, proposal.warped, logits)
    num_accepted = jnp.where(window.active, verified.num_accepted, 0)
    verified_columns = tokens.shape[1] * (1 + mask_rows)
    return StepOutcome(
        canvas=verified.canvas,
        memory=token_causal.keep(parts.denoiser, memory, pending, num_accepted, tokens.shape[1]),
        slots=slots,
        columns=output.columns + verified_columns,
        computed=output.computed + verified_columns,
        finite=is_finite(proposal, view) & verified.finite,
        passes=2 * window.active.astype(jnp.int32),
        logprobs=verified.logprobs,
    )


def verify_drafts(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, view: View, tokens: Array, drafted: Array, logits: Array
) -> VerifiedWindow:
    """Verify root and drafts, tokens [B, 1 + W], and decide the accepted part and the next token.

    drafted: warped logits [B, W, V] that the drafts were drawn from. logits: [B, 1 + W, V], of the verifying pass.
    """
    batch, count = tokens.shape
    depth = jnp.arange(count)
    columns = view.start[:, None] + depth  # the column that each row predicts
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
    target_proposal = make_proposal(token, logits, rows, parts.sampling)
    return VerifiedWindow(
        forward.decide_columns(canvas, columns, take, token), verdict.num_nodes, is_finite(target_proposal, wide),
        store_logprobs(parts, state, wide, take, token, target_proposal),
    )  # fmt: skip


def check(procedure: Procedure) -> None:
    """Check that the procedure has no parts that verification would ignore.

    Raises: UsageError.
    """
    for name in ("score", "control"):
        if getattr(procedure, name) is not None:
            raise UsageError(f"verification of drafts does not support a {name}; leave it out")
    if procedure.schedule != schedules.leading(procedure.schedule.width) or procedure.rule != rules.quota():
        raise UsageError("verification of drafts uses its own schedule and rule; leave both as they are")


def shifted_mode(denoiser: Denoiser) -> Denoiser:
    """Return the autoregressive mode: blocks of one, in which the row of a column predicts the next column."""
    return denoiser.replace(block=1, alignment="shifted", seeding="seed_and_mask")


AUTOREGRESSIVE_VERIFY = Verify(decide, exact_memory=False, memory=TOKEN_CAUSAL, check=check, mode=shifted_mode)
