"""Speculative thinking: a small model reasons, and a large one takes over where the text reflects or doubts.

Yang, Yue, Chaudhary, Han: Speculative Thinking: Enhancing Small-Model Reasoning with Large Model Guidance at Inference
Time (2025), arXiv 2504.12329.

Rule: the small model writes up to a delimiter, then looks ahead by n_look tokens. Positive, negative and verifying cues
in these tokens are counted. The sentiment is the larger side, and a nonzero tie is negative. With a sentiment, or
a small model that does not reason, the look-ahead is dropped and the large model writes n_look tokens. With a verifying
cue it also writes n_long more. Negative sentiments are counted. When the count reaches `patience`, a sentence is
inserted and the large model writes n_long tokens. The count then restarts with n_long += 25 (up to 200) and
patience += 5 (up to 30).
Guarantee: lossy. Without cues the text is the small model's own, byte for byte.
Deviations: cues are token sequences from the caller. A look-ahead without cues stays in the text, and the search for
the next delimiter starts after it. A verifying cue alone counts as a sentiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, check_ids, prepare_texts, whole
from specjax.collaborate.results import TextResult, result
from specjax.collaborate.routing import count_patterns, patterns
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
        Option("look_ahead", "int", 20, "tokens after a break that are searched for cues"),
        Option("long", "int", 125, "tokens of a long takeover by the large model"),
        Option("patience", "int", 15, "negative cues before a long takeover"),
        Option("reasons", "yes_or_no", True, "the small model is a reasoning model"),
        Option("max_step_tokens", "int", 512, "maximum number of tokens per thought"),
    ),
)


SMALL, LARGE = 0, 1
GROWTH, LONGEST = 25, 200  # tokens of a long takeover
MORE_PATIENCE, MOST_PATIENCE = 5, 30
OPENING = 100  # tokens of the large model where the small one does not reason


class Cues(NamedTuple):
    """The `routing.patterns` of cue words."""

    positive: Array
    negative: Array
    verify: Array


class Takeovers(NamedTuple):
    """The state of the takeover rule, and the token counts of the large model."""

    negatives: Array  # int32[B], since the last long takeover
    patience: Array  # int32[B]
    length: Array  # int32[B], of the next long takeover
    short: Array  # int32[B], tokens written after cues
    verifying: Array  # int32[B], tokens written after verifying ones
    long: Array  # int32[B], tokens of long takeovers
    opening: Array  # int32[B], tokens at the beginning


def speculative_thinking(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    positive: Sequence[Sequence[int]] = (),
    negative: Sequence[Sequence[int]] = (),
    verify: Sequence[Sequence[int]] = (),
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
      positive, negative, verify: sequences of ids that are cues. check: ids of the sentence before a long takeover.
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
        (draft, target), prompts, key=key, max_new_tokens=max_new_tokens, drafters=(None, drafter), settings=checked
    )
    check_ids("check", check, target.model.vocab_size)
    done = _run(
        job, segmenter, Cues(patterns(positive), patterns(negative), patterns(verify)),
        jnp.asarray(check, jnp.int32).reshape(-1), jnp.array([look_ahead, long, patience, max_step_tokens], jnp.int32),
        jnp.bool_(reasons),
    )  # fmt: skip
    return done.cut(max_new_tokens)


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


@jax.jit
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, cues: Cues, check: Array, numbers: Array, reasons: Array
) -> TextResult:  # fmt: skip
    writers, (look, long, patience, max_step_tokens) = job.writers, numbers

    def by(who: int, text: TextState, limit: Array, active: Array, segmenter: Segmenter | None = None):
        new, _ = texts.extend(writers, text, who, limit=limit, active=active, segmenter=segmenter)
        return new, new.length - text.length

    def body(carry: tuple[TextState, Takeovers]) -> tuple[TextState, Takeovers]:
        text, takes = carry
        unfinished = text.unfinished
        text, _ = by(SMALL, text, max_step_tokens, unfinished, segmenter)
        place = text.length
        text, _ = by(SMALL, text, look, unfinished)
        count = lambda cue: jnp.where(unfinished, count_patterns(text, place, text.length, cue), 0)
        feels, verifies = sentiment(count(cues.positive), count(cues.negative)), count(cues.verify) > 0
        hands_over = unfinished & (text.length > place) & ((feels != 0) | verifies | ~reasons)
        text = texts.rewind(writers, text, jnp.where(hands_over, place, text.length))
        text, short = by(LARGE, text, look, hands_over)
        text, verifying = by(LARGE, text, long, hands_over & verifies)
        negatives = takes.negatives + (feels < 0)
        doubts = unfinished & (negatives >= takes.patience) & text.unfinished
        text = texts.append(
            text, jnp.broadcast_to(check, (len(unfinished), len(check))), jnp.where(doubts, len(check), 0), texts.PROMPT
        )
        text, longer = by(LARGE, text, takes.length, doubts)
        return text, Takeovers(
            jnp.where(doubts, 0, negatives),
            jnp.where(doubts, grow(takes.patience, MORE_PATIENCE, MOST_PATIENCE), takes.patience),
            jnp.where(doubts, grow(takes.length, GROWTH, LONGEST), takes.length),
            takes.short + short,
            takes.verifying + verifying,
            takes.long + longer,
            takes.opening,
        )

    text = job.begin()
    zero, like = jnp.zeros_like(text.length), jnp.ones_like(text.length)
    text, opening = by(LARGE, text, jnp.int32(OPENING), text.unfinished & ~reasons)
    takes = Takeovers(zero, patience * like, long * like, zero, zero, zero, opening)
    text, takes = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, (text, takes))
    return result(text, takes)
