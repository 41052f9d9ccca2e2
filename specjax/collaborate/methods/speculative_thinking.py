"""Speculative thinking: a small model reasons, and a large one takes over where the text reflects or doubts.

Yang, Yue, Chaudhary, Han: Speculative Thinking: Enhancing Small-Model Reasoning with Large Model Guidance at Inference
Time (2025), arXiv 2504.12329.

Rule: the small model writes up to a delimiter, then looks ahead by n_look tokens. The sentiment of tokens is the larger
number of cues, positive ones against negative and verifying ones; a nonzero tie is negative. Without a sentiment of the
look-ahead, the small model continues from the delimiter. With one, or if the small model does not reason, the large
model writes n_look tokens instead. If its tokens have a verifying cue, it writes `long` more. Negative sentiments of
its tokens are counted. At the next delimiter after `patience` of them, there is no look-ahead: a sentence is inserted
and the large model writes n_long tokens, at first `long`. The count then restarts with n_long += 25 (up to 200) and
patience += 5 (up to 30).
Guarantee: lossy. Without cues the text is the small model's own, byte for byte.
Deviations: the authors' small model draws again from the delimiter if its look-ahead has no sentiment. Draws of a
position are equal, so the look-ahead up to the next delimiter stays. The end of `max_step_tokens` counts as a
delimiter. The authors' setting that lets the small model's tokens stay if the two sentiments agree is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import phrases, segments
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.phrases import PhraseCounter, Phrases
from specjax.collaborate.prepare import TextJob, check_ids, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalar
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.types import Array, Drafter, Target

METHOD = Method(
    name="speculative_thinking",
    kind="collaboration",
    guarantee="lossy",
    summary="reasons with a small model; a large one takes over where the text reflects or doubts",
    paper="Yang et al. 2025, arXiv 2504.12329",
    needs=frozenset({"draft", "segmenter"}),
    takes=frozenset({"cues"}),
    options=(
        Option("look_ahead", "int", 20, "tokens after a delimiter that are searched for cues"),
        Option("long", "int", 125, "tokens of a long takeover by the large model"),
        Option("patience", "int", 15, "negative takeovers before a long one"),
        Option("reasons", "yes_or_no", True, "the small model is a reasoning model"),
        Option("max_step_tokens", "int", 512, "maximum number of tokens per thought"),
        shared.WRITING_DRAFTER,
    ),
    words=(shared.steps("an empty line"),),
)


SMALL, LARGE = 0, 1
GROWTH, LONGEST = 25, 200  # tokens of a long takeover
MORE_PATIENCE, MOST_PATIENCE = 5, 30
OPENING = 100  # tokens of the large model where the small one does not reason


class Cues(NamedTuple):
    """Counters of cues."""

    positive: PhraseCounter
    negative: PhraseCounter
    verify: PhraseCounter


class Thought(NamedTuple):
    """The beginning of the current thought, which a look-ahead without cues wrote."""

    run: segments.Run  # the segmenter's state; over: the thought is complete
    tokens: Array  # int32[B], number of its tokens


class Takeovers(NamedTuple):
    """The state of the takeover rule, and the token counts of the large model."""

    negatives: Array  # int32[B], since the last long takeover
    patience: Array  # int32[B]
    length: Array  # int32[B], of the next long takeover
    cues: Array  # int32[B], takeovers after cues
    checks: Array  # int32[B], long takeovers
    short: Array  # int32[B], tokens written after cues
    verifying: Array  # int32[B], tokens written after verifying cues of the large model itself
    long: Array  # int32[B], tokens of long takeovers
    opening: Array  # int32[B], tokens at the beginning

    def summary(self, row: int) -> dict[str, Any]:
        """Return the number of takeovers of a row, and the tokens of each kind of takeover."""
        counts = {
            "takeovers": self.cues, "long_takeovers": self.checks, "takeover_tokens": self.short,
            "verifying_tokens": self.verifying, "long_takeover_tokens": self.long, "opening_tokens": self.opening,
        }  # fmt: skip
        return {name: scalar(x[row]) for name, x in counts.items()}


def speculative_thinking(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    positive: Phrases = (),
    negative: Phrases = (),
    verify: Phrases = (),
    check: Sequence[int] = (),
    look_ahead: int = 20,
    long: int = 125,
    patience: int = 15,
    reasons: bool = True,
    max_step_tokens: int = 512,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode the reasoning of a small model with the guidance of a large one.

    Args:
      segmenter: detects the ends of thoughts, such as `after_strings(["\\n\\n"], ...)`.
      max_step_tokens: maximum number of tokens per thought.
      positive, negative, verify: counters of cues, such as `count_strings(["wait"], ...)`, or cues as sequences of ids.
      check: ids of the sentence before a long takeover.
      look_ahead, long, patience: n_look, and the initial values of n_long and patience.
      reasons: whether the small model is a reasoning model.
      drafter: drafts within the large model's parts. settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target; its log is a `Takeovers`. The inserted sentence has the author -1.
    Raises: UsageError for a setting below 1, or models of different vocabularies.
    """
    checked = check_options(
        look_ahead=look_ahead, long=long, patience=patience, max_step_tokens=max_step_tokens, **settings
    )
    job = prepare_texts(
        (draft, target),
        prompts,
        key=key,
        max_new_tokens=max_new_tokens,
        method=METHOD.name,
        drafters=(None, drafter),
        settings=checked,
    )
    vocab = target.model.vocab_size
    check_ids("check", check, vocab)
    cues = Cues(*(phrases.to_counter(words, vocab) for words in (positive, negative, verify)))
    done = _run(
        job, segmenter, cues,
        jnp.asarray(check, jnp.int32).reshape(-1), jnp.array([look_ahead, long, patience, max_step_tokens], jnp.int32),
        jnp.bool_(reasons),
    )  # fmt: skip
    return mark_failures(done).cut(max_new_tokens)


def check_options(*, look_ahead: int, long: int, patience: int, max_step_tokens: int, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    sizes = {"look_ahead": look_ahead, "long": long, "patience": patience, "max_step_tokens": max_step_tokens}
    for name, value in sizes.items():
        whole(name, value, 1)
    return Settings(**settings)


def sentiment(positive: Array, negative: Array) -> Array:
    """Return int32[B]: 1, -1 or, without cues, 0; a nonzero tie is -1."""
    return jnp.where(positive > negative, 1, jnp.where(negative > 0, -1, 0))


def grow(x: Array, increment: int, limit: int) -> Array:
    """Increase x int32[B] by `increment`, up to `limit`; values above the limit stay."""
    return jnp.maximum(x, jnp.minimum(x + increment, limit))


def feeling(cues: Cues, text: TextState, start: Array) -> Array:
    """Return int32[B], the sentiment of the text from `start` int32[B] on. Verifying cues count as negative."""
    number = lambda cue: phrases.count(cue, text.tokens, start, text.length)
    return sentiment(number(cues.positive), number(cues.negative) + number(cues.verify))


@jax.jit
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, cues: Cues, check: Array, numbers: Array, reasons: Array
) -> TextResult:  # fmt: skip
    writers, (look, long, patience, max_step_tokens) = job.writers, numbers
    batch = len(job.lengths)

    def by(who: int, text: TextState, limit: Array, active: Array) -> tuple[TextState, Array]:
        new, _ = texts.extend(writers, text, who, limit=limit, active=active)
        return new, new.length - text.length

    def take_over(text: TextState, takes: Takeovers, looks: Array) -> tuple[TextState, Takeovers, Thought]:
        """Look ahead in the rows `looks` bool[B], and let the large model write after cues."""
        place = text.length
        text, ahead = by(SMALL, text, look, looks)
        hands_over = looks & (ahead > 0) & ((feeling(cues, text, place) != 0) | ~reasons)
        run, stays = _first_thought(segmenter, text, place, look)
        text = texts.rewind(writers, text, jnp.where(looks, place + jnp.where(hands_over, 0, stays), text.length))
        text, short = by(LARGE, text, look, hands_over)
        negative = hands_over & (feeling(cues, text, place) < 0)
        verifies = hands_over & (phrases.count(cues.verify, text.tokens, place, text.length) > 0)
        text, verifying = by(LARGE, text, long, verifies)
        takes = takes._replace(
            negatives=takes.negatives + negative, cues=takes.cues + hands_over, short=takes.short + short,
            verifying=takes.verifying + verifying,
        )  # fmt: skip
        keeps = looks & ~hands_over
        run = segments.Run(jnp.where(keeps, run.at, 0), keeps & run.over)
        return text, takes, Thought(run, jnp.where(keeps, stays, 0))

    def check_steps(text: TextState, takes: Takeovers, due: Array) -> tuple[TextState, Takeovers]:
        """Insert the sentence in the rows `due` bool[B], and let the large model write a long part."""
        sentence = jnp.broadcast_to(check, (batch, len(check)))
        text = texts.append(text, sentence, jnp.where(due, len(check), 0), texts.PROMPT)
        text, longer = by(LARGE, text, takes.length, due)
        return text, takes._replace(
            negatives=jnp.where(due, 0, takes.negatives),
            patience=jnp.where(due, grow(takes.patience, MORE_PATIENCE, MOST_PATIENCE), takes.patience),
            length=jnp.where(due, grow(takes.length, GROWTH, LONGEST), takes.length),
            checks=takes.checks + due,
            long=takes.long + longer,
        )

    def body(carry: tuple[TextState, Takeovers, Thought]) -> tuple[TextState, Takeovers, Thought]:
        text, takes, thought = carry
        room = jnp.maximum(max_step_tokens - thought.tokens, 0)
        text, _ = texts.extend(
            writers, text, SMALL, segmenter=segmenter, run=thought.run, limit=room,
            active=text.unfinished & ~thought.run.over,
        )  # fmt: skip
        unfinished, due = text.unfinished, text.unfinished & (takes.negatives >= takes.patience)
        text, takes = check_steps(text, takes, due)
        return take_over(text, takes, unfinished & ~due)

    text = job.begin()
    zero, like = jnp.zeros_like(text.length), jnp.ones_like(text.length)
    text, opening = by(LARGE, text, jnp.int32(OPENING), text.unfinished & ~reasons)
    takes = Takeovers(zero, patience * like, long * like, zero, zero, zero, zero, zero, opening)
    carry = text, takes, Thought(segments.start(batch), zero)
    text, takes, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, carry)
    return result(text, takes)


def _first_thought(segmenter: Segmenter, text: TextState, start: Array, look: Array) -> tuple[segments.Run, Array]:
    """Return the segmenter's state after the first thought from `start` int32[B] on, and int32[B], its tokens."""
    size = text.tokens.shape[1]

    def read(offset: Array, carry: tuple[segments.Run, Array]) -> tuple[segments.Run, Array]:
        place = start + offset
        token = take_along(text.tokens, jnp.clip(place, 0, size - 1)[:, None], 1)
        run, more = segments.follow(segmenter, carry[0], token, (place < text.length).astype(jnp.int32))
        return run, carry[1] + more

    return jax.lax.fori_loop(0, look, read, (segments.start(len(start)), jnp.zeros_like(start)))
