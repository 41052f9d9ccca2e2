"""Who writes what comes next: segmenter, proposer, judge and router of card C0, as plain functions.

Two loops. `judged_steps`: the draft model proposes a step, a judge scores it, a router keeps it or has the target write
another in its place. `token_by_token`: a function names the logits of each token, of one model or of several.
Strings are not known to a program: words are looked for as sequences of tokens (`patterns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.segments import Segmenter
from specjax.engine.job import Parts
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, node_keys, warp
from specjax.processors import pipeline
from specjax.types import Array, PyTree

DRAFT, TARGET = 0, 1
LOGGED = 128
"""Steps per row that a log has room for."""


class Step(NamedTuple):
    """What the draft model proposes, the last tokens of the text."""

    start: Array  # int32[B], length of the text before it
    number: Array  # int32[B], steps before it
    active: Array  # bool[B], rows that have one


Judge = Callable[[Writers, TextState, Step], tuple[TextState, Array]]
"""`judge(writers, text, step) -> (text, score float32[B])`. It may read; the text stays as it is."""
Route = Callable[[Array, Step], Array]
"""`route(score[B], step) -> bool[B]`: where the target writes another step in place of the draft's."""


class StepLog(NamedTuple):
    """The steps of a row, the first LOGGED of them."""

    author: Array  # int32[B, K], -1 behind the last
    tokens: Array  # int32[B, K], how many
    score: Array  # float32[B, K], of what the draft model proposed; NaN where it did not
    steps: Array  # int32[B]
    valid: Array  # bool[B], whether the judge always gave a score


def judged_steps(
    writers: Writers,
    text: TextState,
    *,
    segmenter: Segmenter,
    judge: Judge,
    route: Route,
    most: int,
    first: Array | int = 0,
    answer: Array | None = None,
) -> tuple[TextState, StepLog]:
    """Steps of at most `most` tokens until every row has ended, repeats a step or has given its answer.

    The target writes where it must, in one call of its step loop; rows that do not need it idle there.

    Args:
      first: so many steps are the target's, without a proposal. answer: `patterns`, of which one ends the row's text
        with the step that has it.
    """
    batch = len(text.length)
    log = StepLog(
        jnp.full((batch, LOGGED), texts.PROMPT), jnp.zeros((batch, LOGGED), jnp.int32),
        jnp.full((batch, LOGGED), jnp.nan), jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool),
    )  # fmt: skip

    def body(carry: tuple[TextState, Array, Array, StepLog]) -> tuple[TextState, Array, Array, StepLog]:
        text, over, before, log = carry
        start, going = text.length, text.going & ~over
        forced = going & (log.steps < first)
        text, _ = texts.extend(writers, text, DRAFT, segmenter=segmenter, limit=most, active=going & ~forced)
        step = Step(start, log.steps, going & ~forced)
        text, score = judge(writers, text, step)
        valid = ~step.active | ~jnp.isnan(score)
        rewrites = forced | step.active & valid & route(score, step)
        text = texts.rewind(writers, text, jnp.where(rewrites, start, text.length))
        text, _ = texts.extend(writers, text, TARGET, segmenter=segmenter, limit=most, active=rewrites)
        author = jnp.where(rewrites, TARGET, DRAFT)
        over |= ~valid | going & _repeats(text, start, before)
        if answer is not None:
            over |= going & (count_patterns(text, start, text.length, answer) > 0)
        return (
            text,
            over,
            jnp.where(going, start, before),
            _logged(log, going, author, text.length - start, jnp.where(step.active, score, jnp.nan), valid),
        )

    carry = text, jnp.zeros((batch,), bool), text.length, log
    text, _, _, log = jax.lax.while_loop(lambda carry: jnp.any(carry[0].going & ~carry[1]), body, carry)
    return text, log


def _logged(log: StepLog, going: Array, author: Array, count: Array, score: Array, valid: Array) -> StepLog:
    rows, place = jnp.arange(len(going)), jnp.where(going, log.steps, LOGGED)
    put = lambda x, new: x.at[rows, place].set(new, mode="drop")
    return StepLog(
        put(log.author, author), put(log.tokens, count), put(log.score, score), log.steps + going, log.valid & valid
    )


def _repeats(text: TextState, start: Array, before: Array) -> Array:
    """bool[B]: whether the step from `start` on is, token by token, the one before it, from `before` on."""
    index, count = jnp.arange(text.tokens.shape[1]), start - before
    earlier = take_along(text.tokens, jnp.maximum(index - count[:, None], 0), 1)
    inside = (index >= start[:, None]) & (index < text.length[:, None])
    return (count > 0) & (text.length - start == count) & ~jnp.any(inside & (earlier != text.tokens), 1)


# --- token by token ---------------------------------------------------------------------------------------------------

Choose = Callable[[TextState, PyTree, Array], tuple[TextState, Array, Array, PyTree]]
"""`choose(text, state, going[B]) -> (text, logits float32[B, V] before temperature, author int32[B], state)`."""


def token_by_token(
    writers: Writers, text: TextState, choose: Choose, state: PyTree, *, warped: bool = False
) -> tuple[TextState, PyTree]:
    """Every token is drawn with the row's own key from the logits that `choose` names for it, as processors,
    temperature, top-k, top-p and min-p shape them.

    warped: they are distributions already, which nothing shapes.
    """
    writer = writers[0]
    processors = () if warped else writer.processors  # those of all writers

    def body(carry: tuple[TextState, PyTree, PyTree]) -> tuple[TextState, PyTree, PyTree]:
        text, state, known = carry
        going = text.going
        text, logits, author, state = choose(text, state, going)
        if processors:
            logits = pipeline.process_root(processors, known, texts.last(text), logits)
            text = text._replace(finite=text.finite & (jnp.any(logits > -jnp.inf, 1) | ~going))  # they left a token
        token = sample(writer, text, logits, warped)
        new = texts.append_one(writers, text, token, author, going)
        if processors:
            known = pipeline.update_states(processors, known, token[:, None], new.length - text.length)
        return new, state, known

    known = texts.known_to_processors(writers, text, 0, text.going)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0].going), body, (text, state, known))[:2]


def sample(writer: Parts, text: TextState, logits: Array, warped: bool = False) -> Array:
    """int32[B]: the token behind the text, drawn as `decode` draws it with the row's key."""
    keys = node_keys(text.keys[:, 0], text.length, jnp.zeros((len(text.length), 1), jnp.int32))[:, 0]
    return draw(keys, logits if warped else warp(logits, writer.sampling))


# --- words as tokens --------------------------------------------------------------------------------------------------


def patterns(sequences: Sequence[Sequence[int]]) -> Array:
    """int32[K, W] of sequences of token ids, -1 behind each: all the ways in which a word may be written in tokens.

    Raises: UsageError for an empty one.
    """
    if not all(len(ids) for ids in sequences):
        raise UsageError("a pattern of tokens must not be empty; leave it out")
    width = max((len(ids) for ids in sequences), default=1)
    filled = [[*ids, *[-1] * (width - len(ids))] for ids in sequences]
    return jnp.asarray(np.array(filled, np.int32).reshape(-1, width))


def count_patterns(text: TextState, start: Array, end: Array, wanted: Array) -> Array:
    """int32[B]: how often any of `patterns` lies between places `start` and `end` int32[B] of the text."""
    size = text.tokens.shape[1]
    found = jnp.ones((*text.tokens.shape, len(wanted)), bool)
    for offset in range(wanted.shape[1]):  # shifted compares
        ahead = take_along(text.tokens, jnp.minimum(jnp.arange(size) + offset, size - 1)[None], 1)
        found &= (ahead[:, :, None] == wanted[:, offset]) | (wanted[:, offset] < 0)
    place, length = jnp.arange(size)[:, None], jnp.sum(wanted >= 0, 1)
    inside = (place >= start[:, None, None]) & (place + length <= end[:, None, None])
    return jnp.sum(found & inside, (1, 2))
