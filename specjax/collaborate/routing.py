"""Routing between writers: segmenters, proposers, judges and routers as plain functions.

There are two loops. In `judged_steps` the draft model proposes a step and a judge scores it. A router then accepts
it or lets the target write another step in its place. In `token_by_token` a function returns the logits of each
token, from one model or from several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import phrases
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.phrases import PhraseCounter
from specjax.collaborate.results import scalar
from specjax.collaborate.segments import Segmenter
from specjax.engine.job import Parts
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import draw, node_keys
from specjax.processors import pipeline
from specjax.types import Array, PyTree

DRAFT, TARGET = 0, 1
LOGGED = 128
"""Maximum number of logged steps per row."""


class Step(NamedTuple):
    """A step that the draft model proposes: the last tokens of the text."""

    start: Array  # int32[B], length of the text before it
    number: Array  # int32[B], steps before it
    active: Array  # bool[B], rows that have one


Judge = Callable[[Writers, TextState, Step], tuple[TextState, Array]]
"""`judge(writers, text, step) -> (text, score float32[B])`. It may prefill caches; the tokens stay unchanged."""
Route = Callable[[Array, Step], Array]
"""`route(score[B], step) -> bool[B]`. True means that the target replaces the draft model's step."""


class StepLog(NamedTuple):
    """The first LOGGED steps of a row."""

    author: Array  # int32[B, K], writer of each step, then -1
    tokens: Array  # int32[B, K], number of tokens of each step
    score: Array  # float32[B, K], score of the draft model's step; NaN if it proposed none
    steps: Array  # int32[B]
    valid: Array  # bool[B], True: the judge always returned a score

    def summary(self, row: int) -> dict[str, Any]:
        """Return the number of steps of a row, how many the target wrote, the mean score, and the first steps."""
        steps = int(self.steps[row])
        fields = {"author": self.author, "tokens": self.tokens, "score": self.score}
        logged = [{name: scalar(x[row, i]) for name, x in fields.items()} for i in range(min(steps, LOGGED))]
        scores = [step["score"] for step in logged if step["score"] is not None]
        return {
            "steps": steps,
            "steps_by_target": sum(step["author"] == TARGET for step in logged),
            "mean_score": sum(scores) / len(scores) if scores else None,
            "logged_steps": logged,
        }


def judged_steps(
    writers: Writers,
    text: TextState,
    *,
    segmenter: Segmenter,
    judge: Judge,
    route: Route,
    max_step_tokens: int,
    first: Array | int = 0,
    answer: PhraseCounter | None = None,
) -> tuple[TextState, StepLog]:
    """Write steps of up to `max_step_tokens` tokens until every row has ended, repeats a step or contains an answer.

    The target rewrites steps in one call of its step loop. Rows that need no rewriting idle there.

    Args:
      first: number of first steps that the target writes without a proposal.
      answer: counter of the marks of an answer. A step that contains one of them ends the row.
    """
    batch = len(text.length)
    log = StepLog(
        jnp.full((batch, LOGGED), texts.PROMPT), jnp.zeros((batch, LOGGED), jnp.int32),
        jnp.full((batch, LOGGED), jnp.nan), jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool),
    )  # fmt: skip

    def body(carry: tuple[TextState, Array, Array, StepLog]) -> tuple[TextState, Array, Array, StepLog]:
        text, over, previous, log = carry
        start, unfinished = text.length, text.unfinished & ~over
        forced = unfinished & (log.steps < first)
        text, _ = texts.extend(
            writers, text, DRAFT, segmenter=segmenter, limit=max_step_tokens, active=unfinished & ~forced
        )
        step = Step(start, log.steps, unfinished & ~forced)
        text, score = judge(writers, text, step)
        valid = ~step.active | ~jnp.isnan(score)
        rewrites = forced | step.active & valid & route(score, step)
        text = texts.rewind(writers, text, jnp.where(rewrites, start, text.length))
        text, _ = texts.extend(writers, text, TARGET, segmenter=segmenter, limit=max_step_tokens, active=rewrites)
        author = jnp.where(rewrites, TARGET, DRAFT)
        over |= ~valid | unfinished & _repeats(text, start, previous)
        if answer is not None:
            over |= unfinished & (phrases.count(answer, text.tokens, start, text.length) > 0)
        return (
            text,
            over,
            jnp.where(unfinished, start, previous),
            _logged(log, unfinished, author, text.length - start, jnp.where(step.active, score, jnp.nan), valid),
        )

    carry = text, jnp.zeros((batch,), bool), text.length, log
    text, _, _, log = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished & ~carry[1]), body, carry)
    return text, log


def _logged(log: StepLog, unfinished: Array, author: Array, count: Array, score: Array, valid: Array) -> StepLog:
    rows, place = jnp.arange(len(unfinished)), jnp.where(unfinished, log.steps, LOGGED)
    put = lambda x, new: x.at[rows, place].set(new, mode="drop")
    return StepLog(
        put(log.author, author),
        put(log.tokens, count),
        put(log.score, score),
        log.steps + unfinished,
        log.valid & valid,
    )


def _repeats(text: TextState, start: Array, previous: Array) -> Array:
    """Return bool[B], True where the step from `start` on equals the step from `previous` on, token by token."""
    index, count = jnp.arange(text.tokens.shape[1]), start - previous
    earlier = take_along(text.tokens, jnp.maximum(index - count[:, None], 0), 1)
    inside = (index >= start[:, None]) & (index < text.length[:, None])
    return (count > 0) & (text.length - start == count) & ~jnp.any(inside & (earlier != text.tokens), 1)


# --- token by token ---------------------------------------------------------------------------------------------------

Choose = Callable[[TextState, PyTree, Array], tuple[TextState, Array, Array, PyTree]]
"""`choose(text, state, unfinished[B]) -> (text, logits float32[B, V] before temperature, author int32[B], state)`."""


def token_by_token(
    writers: Writers, text: TextState, choose: Choose, state: PyTree, *, warped: bool = False
) -> tuple[TextState, PyTree]:
    """Draw every token with the row's own key from the logits that `choose` returns.

    Processors, temperature, top-k, top-p and min-p shape these logits first.

    warped: True if the logits are final distributions that need no shaping.
    """
    writer = writers[0]
    processors = () if warped else writer.processors  # those of all writers

    def body(carry: tuple[TextState, PyTree, PyTree]) -> tuple[TextState, PyTree, PyTree]:
        text, state, states = carry
        unfinished = text.unfinished
        text, logits, author, state = choose(text, state, unfinished)
        if processors:
            logits = pipeline.process_root(processors, states, texts.last(text), logits)
            text = text._replace(
                finite=text.finite & (jnp.any(logits > -jnp.inf, 1) | ~unfinished)
            )  # the processors allow a token
        token = sample(writer, text, logits, warped)
        new = texts.append_one(writers, text, token, author, unfinished)
        if processors:
            states = pipeline.update_states(processors, states, token[:, None], new.length - text.length)
        return new, state, states

    states = texts.processor_states(writers, text, 0, text.unfinished)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, (text, state, states))[:2]


def sample(writer: Parts, text: TextState, logits: Array, warped: bool = False) -> Array:
    """Return int32[B], the token after the text, drawn with the row's key as in `decode`."""
    keys = node_keys(text.keys[:, 0], text.length, jnp.zeros((len(text.length), 1), jnp.int32))[:, 0]
    return draw(keys, logits) if warped else draw_warped(keys, logits, writer.sampling)
