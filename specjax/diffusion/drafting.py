"""A denoiser as a drafter for an autoregressive target, with several drafted tokens per denoiser pass.

Christopher et al.: Speculative Diffusion Decoding (SpecDiff, 2024), arXiv 2408.05636; several rounds as in DiffuSpec
(Li et al. 2025, arXiv 2510.02358) and DEER (Cheng et al. 2025, arXiv 2512.15176), without their path searches.

Rule: W masked columns follow the text. With one round, every column is drawn from its own row q_j = q(x_j | text). This
is a chain with true draft probabilities. With several rounds, a rule decides some columns in each pass, and the next
pass reads them.
Guarantee: distribution, by the verifier. With several rounds, all tokens are the most likely ones, so the draft has no
randomness and is a point mass. Drawn tokens would have no known q(x_j | x_<j): columns are decided in order of
confidence, so x_j may depend on later tokens. The ratio p/q with the row that x_j was drawn from would be biased.
Deviations: columns after the draft, up to the end of its last block, are read as masked. A model with full attention
reads the full text in each round. A block-causal model caches finished blocks, and reads new text with the draft.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.diffusion import forward
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Proposal, View
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, fold_in, node_keys, warp
from specjax.types import Array, Context, Drafter, PyTree, TokenTree, Traits, TreeSize


class DenoiserDrafterState(NamedTuple):
    cache: PyTree  # cache of the text's finished blocks for block-causal models, empty for other models
    columns: Array  # int32[B], number of columns in the cache


def as_drafter(denoiser: Denoiser, *, width: int, rounds: int = 1, rule: ColumnRule | None = None) -> Drafter:
    """Return a drafter that proposes chains of `width` tokens.

    Args:
      width: drafted tokens per step. rounds: passes of the denoiser for one draft.
      rule: rule that selects the columns of a pass. The default decides an equal share in each pass, the most confident
        columns first. The last round decides all remaining columns.

    Raises: UsageError for numbers below 1, or a rule that revises decided columns.
    """
    for name, value in (("width", width), ("rounds", rounds)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    rule = rule or quota()
    if rule.settled is not None:
        raise UsageError("a rule that revises decided columns cannot draft; choose another rule")
    make = functools.partial(_propose, width=width, rounds=rounds)
    return Drafter(
        propose=make,
        size=TreeSize(width + 1, width),
        init=functools.partial(init, width=width),
        params=(denoiser, rule),
        traits=Traits(draws="chain" if rounds == 1 else "point_mass", chains=True, rewinds=False),
    )


def _columns(denoiser: Denoiser, width: int) -> int:
    """Return the number of columns in one pass of a block-causal model over the uncached part.

    This part is the last block of the text, the tokens of one step, and the draft to the end of its block.
    """
    assert denoiser.block is not None
    return -(-(denoiser.block + 2 * width + 1) // denoiser.block) * denoiser.block


def init(params: tuple[Denoiser, *tuple[Any, ...]], context: Context, *, width: int) -> DenoiserDrafterState:
    """Initialise the drafter state from the prompts. The first entry of `params` is the denoiser.

    Raises: UsageError if the vocabulary differs from the target's.
    """
    denoiser = params[0]
    batch, size = context.tokens.shape
    if context.target is not None and context.target.model.vocab_size != denoiser.model.vocab_size:
        raise UsageError(
            f"the denoiser has {denoiser.model.vocab_size} tokens in its vocabulary and the target "
            f"{context.target.model.vocab_size}; use a denoiser with the target's vocabulary"
        )
    if not denoiser.is_causal:
        return DenoiserDrafterState(
            denoiser.model.init_cache(denoiser.params, None, batch, 1), jnp.zeros((batch,), jnp.int32)
        )
    room = size + 2 * _columns(denoiser, width) + forward.extra_slots(denoiser)
    cache = denoiser.model.init_cache(denoiser.params, None, batch, room)
    count = _finished_columns(denoiser, context.length)
    return DenoiserDrafterState(forward.read_blocks(denoiser, cache, context.tokens, count), count)


def _finished_columns(denoiser: Denoiser, length: Array) -> Array:
    """Return int32[B]: the number of columns in complete blocks before the last token.

    The last token is never cached, because its row may predict the next token.
    """
    assert denoiser.block is not None
    return (length - 1) // denoiser.block * denoiser.block


def _propose(
    params: tuple[Denoiser, ColumnRule],
    keys: Array,
    state: DenoiserDrafterState,
    context: Context,
    limit: Array,
    *,
    width: int,
    rounds: int,
) -> tuple[TokenTree, DenoiserDrafterState]:
    denoiser, rule = params
    batch = len(context.tokens)
    canvas, nothing = open_canvas(context, width), jnp.zeros((batch,), jnp.int32)
    drafted = context.length[:, None] + jnp.arange(width)
    rule_state = rule.init(rule.params, canvas, width, denoiser.model.vocab_size)
    pending, logits = None, jnp.zeros(())
    for number in range(rounds):
        hidden, pending = look(denoiser, state, canvas, width)
        logits = forward.compute_logits(denoiser, hidden)
        if rounds == 1:
            break
        take, token, rule_state = _decide_columns(
            denoiser, rule, rule_state, canvas, drafted, logits, keys, width, rounds, number
        )
        canvas = forward.decide_columns(canvas, drafted, take, token)._replace(passes=nothing + number + 1)
    if rounds == 1:
        rows = warp(logits, context.sampling)
        if context.noise is None:
            draw_keys = fold_in(keys[:, None], jnp.arange(width))
        else:  # the same noise as the target's draws
            draw_keys = node_keys(context.noise, context.length, jnp.broadcast_to(jnp.arange(width), (batch, width)))
        token = draw(draw_keys, rows)
        logits = jnp.pad(rows, ((0, 0), (0, 1), (0, 0)))
    else:
        token = take_along(canvas.tokens, drafted, 1)
    return build_chain(context, token, limit, logits if rounds == 1 else None), update_cache(
        denoiser, state, context, pending, width
    )


def open_canvas(context: Context, width: int) -> Canvas:
    """Return a canvas of the text followed by `width` masked columns."""
    batch, size = context.tokens.shape
    opened = jnp.arange(size + width) >= context.length[:, None]
    decided_at, nothing = jnp.where(opened, -1, jnp.full(opened.shape, -2)), jnp.zeros((batch,), jnp.int32)
    tokens = jnp.pad(context.tokens, ((0, 0), (0, width)))
    return Canvas(tokens, opened, context.length, context.length + width, nothing, decided_at, nothing)


def build_chain(context: Context, token: Array, limit: Array, logits: Array | None = None) -> TokenTree:
    """Return a chain of the root and the first `limit` [B] of tokens [B, W].

    logits: float32[B, 1 + W, V], the rows that the tokens were drawn from.
    """
    node = jnp.arange(token.shape[1] + 1)
    return TokenTree(
        tokens=jnp.concatenate([context.root, token], 1),
        parents=jnp.broadcast_to(node - 1, (len(token), len(node))),
        valid=node <= limit[:, None],
        logits=logits,
    )


def update_cache(
    denoiser: Denoiser, state: DenoiserDrafterState, context: Context, pending: PyTree, width: int
) -> DenoiserDrafterState:
    """Return the state after a block-causal model caches the newly finished blocks.

    pending: the pending cache entries of the last `look`.
    """
    if not denoiser.is_causal:
        return state
    path = jnp.broadcast_to(jnp.arange(_columns(denoiser, width)), (len(state.columns), _columns(denoiser, width)))
    count = _finished_columns(denoiser, context.length) - state.columns
    return DenoiserDrafterState(denoiser.model.commit(state.cache, pending, path, count), state.columns + count)


def look(denoiser: Denoiser, state: DenoiserDrafterState, canvas: Canvas, width: int) -> tuple[Array, PyTree]:
    """Run the denoiser on the text and the draft, without the cached columns.

    Returns: (hidden [B, W, D] that predict the columns after the text, pending cache entries).
    """
    if denoiser.block is None:
        hidden, pending = forward.forward_canvas(denoiser, state.cache, canvas)
        return forward.align_rows(denoiser, hidden, canvas.start, width), pending
    count = _columns(denoiser, width)
    offset = jnp.arange(count)
    columns = state.columns[:, None] + offset
    block = offset // denoiser.block
    mask = jnp.broadcast_to(block[None, :] <= block[:, None], (len(columns), count, count))
    shown = forward.input_tokens(denoiser, canvas, columns)
    # All columns past the end of the canvas are masked.
    shown = jnp.where(columns < canvas.tokens.shape[1], shown, denoiser.blank)
    hidden, pending = forward.forward(denoiser, state.cache, shown, columns, mask)
    return forward.align_rows(denoiser, hidden, canvas.start - state.columns, width), pending


def _decide_columns(
    denoiser: Denoiser, rule: ColumnRule, rule_state: PyTree, canvas: Canvas, drafted: Array, logits: Array,
    keys: Array, width: int, rounds: int, number: int,
) -> tuple[Array, Array, PyTree]:  # fmt: skip
    """Return (take, token, state) of a round. The last round takes all remaining columns."""
    opened = take_along(canvas.open, drafted, 1)
    token = first_largest(logits)
    everywhere = jnp.ones((len(drafted),), bool)
    view = View(
        start=canvas.start,
        columns=drafted,
        tokens=forward.input_tokens(denoiser, canvas, drafted),
        exists=jnp.ones_like(opened),
        open=opened,
        eligible=opened,
        revisable=jnp.zeros_like(opened),
        entered=everywhere if number == 0 else ~everywhere,
        active=everywhere,
        keys=forward.column_keys(keys, drafted, canvas.start, canvas.decided),
        passes=canvas.passes,
    )
    share = jnp.full((len(drafted),), -(-width // rounds), jnp.int32)
    proposal = Proposal(token, logits, logits, logits, jnp.ones((len(token),), bool))
    take, token, rule_state = rule.select(rule.params, rule_state, proposal, view, share)
    return opened & (take | (number == rounds - 1)), token, rule_state
