"""Decoding within a regular language: each pass decides only tokens with which the text can still become a valid word.

Mündler, Dekoninck, Vechev: Constrained Decoding of Diffusion LLMs with Context-Free Grammars (2025), arXiv 2508.10111,
reduced to regular languages, which include brackets and JSON of bounded depth.

Rule: F_i are the states that the automaton can reach before column i. R_i are those from which it can still accept.
Both follow from the decided tokens, and a masked column may take any token. Token v is feasible at a masked column i if
it leads from a state of F_i to one of R_(i+1). Other tokens get the logit -inf, before drawing and before confidences
are computed. Individually feasible tokens may be jointly infeasible. The columns are then decided one at a time, the
most confident first. Columns that became infeasible wait for another pass.
Guarantee: valid: every finished text, or its part up to an end token, is a word of the language (see
`TokenAutomaton.closed`). The language of all words gives the threshold rule. The distribution is not the model's
distribution conditioned on the language.
Deviations: a masked column is one token, so gaps have a fixed length and no lexer is needed. Full attention only: the
last block of block-causal models extends past the text, where it need not be a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, shared
from specjax.diffusion import measures
from specjax.diffusion.forward import decide_columns
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Procedure, Proposal, Score, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="constraint",
    kind="diffusion",
    guarantee="valid",
    summary="keeps the text in a regular language, given as an automaton, and decides all confident columns",
    paper="Mündler et al. 2025, arXiv 2508.10111",
    needs=frozenset({"automaton"}),
    options=(
        shared.BLOCK,
        shared.tau(0.9),
    ),
)


class TokenAutomaton(NamedTuple):
    """A deterministic automaton over tokens. It starts in state 0."""

    transitions: Any  # int32[Q, V], the next state; -1: no word continues with this token
    accepting: Any  # bool[Q], states in which a word may end

    def closed(self, eos: int | Sequence[int]) -> TokenAutomaton:
        """Return the automaton of the same words, followed by any number of `eos`, zero included."""
        table, accepting = np.array(self.transitions, np.int32), np.array(self.accepting, bool)
        ids = np.atleast_1d(np.asarray(eos))
        final = np.full((1, table.shape[1]), -1, np.int32)
        table[:, ids] = np.where(accepting[:, None], len(table), -1)
        final[:, ids] = len(table)
        return TokenAutomaton(np.concatenate([table, final]), np.append(accepting, True))


class Language(NamedTuple):
    """An automaton over C classes of tokens. Tokens of a class have the same transitions in every state."""

    kind: Array  # int32[V], the class of a token
    to: Array  # int32[Q, C], the next state; -1: none
    accepting: Array  # bool[Q]


@checked
def constraint(
    denoiser: Denoiser, *, automaton: TokenAutomaton | None = None, block: int | None = 32, tau: float = 0.9
) -> Procedure:
    """Return the procedure. automaton: automaton of the language. block: columns of a block; None: all new ones.

    tau: confidence at which a column is decided.

    Raises: UsageError if the automaton is missing or has another vocabulary, and for a block-causal model.
    """
    if automaton is None:
        raise UsageError("constraint needs the automaton of a language; give automaton=")
    if denoiser.is_causal:
        raise UsageError("constraint needs a model with full attention, and this one is block-causal")
    table, accepting = np.array(automaton.transitions), np.asarray(automaton.accepting, bool)
    vocab, states = denoiser.model.vocab_size, len(accepting)
    if table.shape != (states, vocab):
        raise UsageError(
            f"transitions of {states} states over the model's {vocab} tokens must have the shape [{states}, {vocab}], "
            f"not {list(table.shape)}"
        )
    if states < 1 or table.min() < -1 or table.max() >= states:
        raise UsageError(f"transitions must be -1 or the number of one of the {states} states")
    table[:, denoiser.mask_token] = -1  # the mask token is never decided
    columns, kind = np.unique(table, axis=1, return_inverse=True)
    language = Language(*map(jnp.asarray, (kind.reshape(-1).astype(np.int32), columns.astype(np.int32), accepting)))
    base = Procedure(blocks(block), threshold(tau))
    rule = together(base.rule).replace(params=(base.rule.params, language))
    return base.replace(rule=rule, score=feasible().replace(params=language))


@functools.cache
def feasible() -> Score:
    """Return the score that masks infeasible tokens. Its parameters are a `Language`."""

    def transform(language: Language, state: PyTree, logits: Array, view: View) -> tuple[Array, PyTree]:
        canvas = view.canvas
        assert canvas is not None
        inside = jnp.clip(view.columns, 0, canvas.tokens.shape[1] - 1)
        reachable = take_along(_forward_states(language, canvas), inside[..., None], 1)
        behind = take_along(_backward_states(language, canvas), inside[..., None], 1)
        fits = jnp.any(reachable[:, :, :, None] & behind[:, :, jnp.maximum(language.to, 0)] & (language.to >= 0), 2)
        allowed = fits[:, :, language.kind]
        return jnp.where(allowed | ~view.open[..., None], logits, -jnp.inf), state

    return Score(transform, check=_has_words)


@functools.cache
def together(rule: ColumnRule) -> ColumnRule:
    """Return a rule that decides only jointly feasible columns of `rule`.

    Its parameters are (parameters of `rule`, `Language`).
    """

    def select(params: PyTree, state: PyTree, proposal: Proposal, view: View, quota: Array):
        rule_params, language = params
        canvas = view.canvas
        assert canvas is not None
        take, token, state = rule.select(rule_params, state, proposal, view, quota)
        fits = lambda some: _is_open_to(language, decide_columns(canvas, view.columns, some, token))
        order = measures.rank(measures.confidence(proposal), take)
        at_once = fits(take)
        count = jnp.max(jnp.where(at_once, 0, jnp.sum(take, 1)))

        def body(carry):
            place, accepted = carry
            more = accepted | (take & (order == place))
            return place + 1, jnp.where(fits(more)[:, None], more, accepted)

        _, one_by_one = jax.lax.while_loop(lambda carry: carry[0] < count, body, (0, jnp.zeros_like(take)))
        return jnp.where(at_once[:, None], take, one_by_one), token, state

    return rule.replace(select=select, init=lambda params, *more: rule.init(params[0], *more))


def _steps(language: Language, canvas: Canvas) -> tuple[Array, Array, Array]:
    """Return the transitions and the classes of the columns.

    Returns: (bool[C + 1, Q, Q], True if tokens of a class lead from one state to another; int32[N, B], the class of
    each column; bool[N, B], True if the column is part of the text). The last class is "any token".
    """
    states = jnp.arange(len(language.accepting))
    leads = language.to.T[:, :, None] == states
    leads = jnp.concatenate([leads, jnp.any(leads, 0, keepdims=True)])
    kind = jnp.where(canvas.open, len(leads) - 1, language.kind[canvas.tokens])
    column = jnp.arange(canvas.tokens.shape[1])
    text = (column >= canvas.start[:, None]) & (column < canvas.end[:, None])
    return leads, kind.T, text.T


def _forward_states(language: Language, canvas: Canvas) -> Array:
    """Return bool[B, N + 1, Q]: the reachable states before each column and after the last."""
    leads, kind, text = _steps(language, canvas)

    def body(states, column):
        token_class, inside = column
        next_states = jnp.any(states[:, :, None] & leads[token_class], 1)
        return jnp.where(inside[:, None], next_states, states), states

    first = jnp.broadcast_to(jnp.arange(leads.shape[1]) == 0, (kind.shape[1], leads.shape[1]))
    last, reachable = jax.lax.scan(body, first, (kind, text))
    return jnp.concatenate([reachable, last[None]]).swapaxes(0, 1)


def _backward_states(language: Language, canvas: Canvas) -> Array:
    """Return bool[B, N, Q]: the states after each column from which a word can be completed."""
    leads, kind, text = _steps(language, canvas)

    def body(states, column):
        token_class, inside = column
        reachable = jnp.any(leads[token_class] & states[:, None, :], 2)
        return jnp.where(inside[:, None], reachable, states), states

    last = jnp.broadcast_to(language.accepting, (kind.shape[1], leads.shape[1]))
    return jax.lax.scan(body, last, (kind, text), reverse=True)[1].swapaxes(0, 1)


def _is_open_to(language: Language, canvas: Canvas) -> Array:
    """Return bool[B]: True if some word contains all decided tokens."""
    return jnp.any(_forward_states(language, canvas)[:, -1] & language.accepting, 1)


def _has_words(language: Language, count: int, eos: Array) -> None:
    """Check that the language has words of `count` tokens, and that a text which ends with one of `eos` is a word.

    Raises: UsageError.
    """
    if isinstance(language.to, jax.core.Tracer):
        return
    table, accepting = np.asarray(language.to), np.asarray(language.accepting)
    states, reached = np.arange(len(accepting)) == 0, np.zeros(len(accepting), bool)
    for _ in range(count):
        reached |= states
        states = np.isin(np.arange(len(states)), table[states])
    if not isinstance(eos, jax.core.Tracer):
        ends = accepting
        for _ in range(len(accepting)):  # states from which a word can be finished
            ends = accepting | np.any((table >= 0) & ends[table], 1)
        kinds = np.asarray(language.kind)
        behind = table[reached][:, kinds[[token for token in np.asarray(eos) if 0 <= token < len(kinds)]]]
        if np.any((behind >= 0) & ends[behind] & ~accepting[behind]):
            raise UsageError(
                "a text ends at eos, but the automaton has words that continue after it; pass automaton.closed(eos), "
                "or leave eos out"
            )
    if not np.any(states & accepting):
        raise UsageError(
            f"the automaton has no word of {count} tokens; choose another max_new_tokens, or pass "
            f"automaton.closed(eos) to allow shorter words"
        )
