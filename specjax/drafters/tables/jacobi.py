"""Speculative Jacobi decoding: the target's last pass provides the draft of its next pass.

Teng, Shi, Liu, Ning, Dai, Wang, Li, Liu: Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding (ICLR 2025), arXiv 2410.01699.

Rule: one pass over [last token, d_1 ... d_W] gives p_1 ... p_{W+1}. Accept d_i with probability
min(1, p_i(d_i) / q_i(d_i)). Let i be the first rejected token. For the positions j > i set q'_j = p_j, although the
pass computed p_j after rejected tokens. Draw new tokens d'_j ~ q'_j. Later positions get an initial token with a
one-hot q:
  random: uniform over `ids`;
  repeat: the token `stride` positions earlier (1: the left neighbour; the width of an image row: the token above);
  sample: the most likely token under the left neighbour's distribution.
If there is no such neighbour yet, the token is random.
Guarantee: distribution. q' is a function of the past, and d' is a new draw from it, independent of the committed token.
Any exact rule for chains then keeps the target's distribution. Keeping the old d with the new q would not.
Deviations: each row shifts by its own number of accepted tokens; the released code shifts by the minimum of the batch.
The window works from the first token to the last; theirs starts 3 tokens after the prompt and stops 10 tokens before
the end, which a controller can do. The distributions are stored unwarped and warped before each draw. Neighbours come
from the text, so the first column of an image copies the last column of the row above. Guidance belongs to the target
(`specjax.models.guided`).
Forced tokens: places of the answer whose token is known before (`forced`) get it with a one-hot q. A processor that
allows no other token there (`processors.by_place`) accepts it with probability 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.trees.contracts import verify_widths
from specjax.trees.operations import chain
from specjax.types import Array, Context, Drafter, Hooks, Output, Sampling, TokenTree, Traits, TreeSize, Verdict

METHOD = Method(
    name="jacobi",
    kind="drafter",
    guarantee="distribution",
    summary="drafts the target's own predictions for a window of guesses (Jacobi iteration)",
    paper="Teng et al. 2025, arXiv 2410.01699",
    options=(
        Option("window", "int", 15, "drafted tokens per step"),
        Option("initial", ("random", "repeat", "sample"), "random", "initial guesses at the end of the window"),
        Option("ids", "two_integers", None, "range of token ids for random guesses, END excluded; default: all"),
        Option("stride", "int", 1, "distance of the token that `repeat` copies"),
    ),
    arguments=("vocab_size",),
)


Initial = Literal["random", "repeat", "sample"]


class JacobiState(NamedTuple):
    """Outputs of the last target pass for the positions after the text."""

    logits: Array  # float32[B, W, V], not warped
    num_valid: Array  # int32[B], number of valid rows of `logits`
    likeliest: Array  # int32[B], most likely token of the last row of the pass; -1 before the first pass
    prompt_length: Array  # int32[B]


def jacobi(
    vocab_size: int,
    *,
    window: int = 15,
    initial: Initial = "random",
    ids: Sequence[int] | None = None,
    stride: int = 1,
    forced: Sequence[int] = (),
) -> Drafter:
    """Draft a chain of `window` tokens from the distributions that the last target pass computed for their positions.

    Args:
      initial: the initial tokens at the end of the window: "random", "repeat" or "sample".
      ids: (first, end), the range of token ids for random tokens; default: all.
      stride: distance of the token that "repeat" copies.
      forced: the known token of each place of the answer, -1 where it is not known (`processors.forced_tokens`).

    State: JacobiState, window x V floats per row.
    Raises: UsageError for a setting out of range.
    """
    first, end = (0, vocab_size) if ids is None else ids
    if window < 1:
        raise UsageError(f"window must be at least 1, not {window}; use the drafter autoregressive for plain decoding")
    if initial not in ("random", "repeat", "sample"):
        raise UsageError(f'initial must be "random", "repeat" or "sample", not "{initial}"')
    if not 0 <= first < end <= vocab_size:
        raise UsageError(f"ids must be a range within 0 to {vocab_size}, not {first} to {end}")
    if stride < 1 or (stride > 1 and initial != "repeat"):
        raise UsageError(f'stride must be at least 1, and 1 unless initial is "repeat"; it is {stride}')
    if any(token != int(token) or not -1 <= token < vocab_size for token in forced):
        raise UsageError(f"forced must be token ids below {vocab_size}, or -1 for a place with a choice, not {forced}")
    return _functions(vocab_size, window, initial, int(first), int(end), stride, tuple(map(int, forced)))


@functools.cache  # equal settings give the same drafter, so that nothing is recompiled
def _functions(
    vocab_size: int, window: int, initial: Initial, first: int, end: int, stride: int, forced: tuple[int, ...]
) -> Drafter:
    """Return the drafter of checked settings."""

    def init(params, context: Context) -> JacobiState:
        batch = context.tokens.shape[0]
        none = jnp.zeros((batch,), jnp.int32)
        return JacobiState(jnp.zeros((batch, window, vocab_size), jnp.float32), none, none - 1, context.length)

    def propose(params, keys: Array, state: JacobiState, context: Context, limit: Array):
        slot_keys = jax.vmap(lambda key: jax.vmap(lambda s: jax.random.fold_in(key, s))(jnp.arange(2 * window)))(keys)
        draw_keys = slot_keys[:, :window]
        if context.noise is not None:  # the target's own noise at each position
            slots = jnp.broadcast_to(jnp.arange(window), (keys.shape[0], window))
            draw_keys = sampling.node_keys(context.noise, context.length, slots)
        drawn, distributions = _draw(draw_keys, state.logits, context.sampling)
        randoms = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), first, end)))(slot_keys[:, window:])
        is_stored = jnp.arange(window) < state.num_valid[:, None]
        fixed_tokens = _fixed_tokens(state, context)
        drawn, is_stored = jnp.where(fixed_tokens < 0, drawn, fixed_tokens), is_stored | (fixed_tokens >= 0)
        tokens = _fill(drawn, is_stored, randoms, state.likeliest, context)
        nodes = jnp.concatenate([_text(context, 1), tokens], 1)
        valid = jnp.arange(window + 1) <= limit[:, None]
        if distributions is None or context.noise is not None:
            return chain(nodes, valid), state
        one_hot = jnp.where(jnp.arange(vocab_size) == tokens[:, :, None], 0.0, -jnp.inf)
        distributions = jnp.where((is_stored & (fixed_tokens < 0))[:, :, None], distributions, one_hot)
        return chain(nodes, valid, jnp.pad(distributions, ((0, 0), (0, 1), (0, 0)))), state

    def _fixed_tokens(state: JacobiState, context: Context) -> Array:
        """Return the known tokens int32[B, W] of the window, or -1."""
        place = context.length[:, None] - state.prompt_length[:, None] + jnp.arange(window)
        table = jnp.asarray((*forced, -1), jnp.int32)  # places behind the last one have a choice
        return table[jnp.clip(place, 0, len(forced))]

    def _fill(drawn: Array, is_stored: Array, randoms: Array, likeliest: Array, context: Context) -> Array:
        """Return int32[B, W]: drawn tokens where a distribution is stored, then initial tokens."""
        if initial == "random":
            return jnp.where(is_stored, drawn, randoms)
        if initial == "sample":  # the left neighbour of later slots is one-hot, so its own token is the most likely one
            start = jnp.where(likeliest < 0, randoms[:, 0], likeliest)[:, None]
            return jnp.where(is_stored, drawn, start)
        tokens: list[Array] = []
        for slot in range(window):
            back = stride - slot  # of the copied token, from the end of the text
            source = tokens[-stride] if back <= 0 else _text(context, back)[:, 0]
            source = jnp.where(context.length >= back, source, randoms[:, slot])
            tokens.append(jnp.where(is_stored[:, slot], drawn[:, slot], source))
        return jnp.stack(tokens, 1)

    def observe(
        params, state: JacobiState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
    ) -> JacobiState:
        # Row i is the distribution of the position after node i. The row of the last accepted node gave the committed
        # token. Rows of invalid nodes are not part of the chain.
        last = jnp.sum(tree.valid, 1, dtype=jnp.int32) - 1
        rows = verdict.num_nodes[:, None] + jnp.arange(window)
        logits = take_along(output.logits, jnp.minimum(rows, last[:, None])[:, :, None], 1)
        end_of_pass = take_along(output.logits, last[:, None, None], 1)[:, 0]
        return JacobiState(
            logits.astype(jnp.float32),
            last + 1 - verdict.num_nodes,
            first_largest(end_of_pass),
            state.prompt_length,
        )

    def resume(params, state: JacobiState, length: Array) -> JacobiState:
        nothing = jnp.zeros_like(state.num_valid)
        return state._replace(num_valid=nothing, likeliest=nothing - 1)

    return Drafter(
        propose=propose,
        size=TreeSize(window + 1, window),
        init=init,
        observe=observe,
        update=lambda params, state, seen, verdict: seen,
        traits=Traits(draws="chain", widths=verify_widths(range(1, window + 2))),
        hooks=Hooks(resume=resume),
    )


def _draw(keys: Array, logits: Array, settings: Sampling) -> tuple[Array, Array | None]:
    """Draw tokens int32[B, W] with keys [B, W]; return them and their warped distributions (None if greedy)."""
    if settings.temperature is None:
        return first_largest(logits), None
    distributions = sampling.warp(logits, settings)
    return jax.vmap(sampling.draw)(keys, distributions), distributions


def _text(context: Context, back: int) -> Array:
    """Return int32[B, 1], the token at distance `back` from the end of the text (1: the last).

    The token is arbitrary if the text is shorter.
    """
    return take_along(context.tokens, jnp.maximum(context.length[:, None] - back, 0), 1)
