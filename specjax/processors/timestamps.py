"""Timestamps of Whisper (arXiv 2212.04356): tokens of times that open and close the segments of a transcript.

Rules for the text so far, without the prompt:
- The first token is a time, of at most `max_initial` steps.
- Two times in a row are the end of a segment and the start of the next one, so text follows. After text and one time,
  only a time or the end of the text follows.
- Times do not decrease, and a segment has a length.
- If all times together are likelier than the best other token, the next token is a time.

The last rule reads the logits, so this processor runs after those that exclude tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, Processor, TokenTree

NO_TIME = -1


class TimeRules(NamedTuple):
    """Ids and limits. Arrays are int32[]."""

    first: Array  # the token of time 0; later times have higher ids
    end: Array  # the token that ends a text; text tokens have lower ids
    excluded: Array  # the token that turns times off
    max_initial: Array  # largest number of steps of the first time


class Times(NamedTuple):
    """The facts about a decoded text that the rules read."""

    num_tokens: Array  # int32[B]
    last: Array  # bool[B], the last token is a time
    before_last: Array  # bool[B], the token before it is a time
    latest: Array  # int32[B], the last time, or NO_TIME


def timestamps(no_timestamps: int, end: int, *, max_initial: int | None = None) -> Processor:
    """Build the processor.

    Args:
      no_timestamps: id of the token that turns times off, which the token of time 0 follows.
      end: id of the token that ends a text. max_initial: largest number of steps of the first time; None: any.

    Raises: UsageError for an invalid id or number.
    """
    limit = np.iinfo(np.int32).max - no_timestamps - 2 if max_initial is None else max_initial
    for name, value in (("no_timestamps", no_timestamps), ("end", end), ("max_initial", limit)):
        if not 0 <= value < 1 << 31 or value != int(value):
            raise UsageError(f"timestamps needs {name} as a whole number from 0, not {value!r}")
    values: Any = [np.asarray(value, np.int32) for value in (no_timestamps + 1, end, no_timestamps, limit)]
    rules = TimeRules(*values)
    return Processor(process=_process, init=_init, update=_update, check=_check, by_row=True, params=rules)


def _check(processor: Processor, vocab_size: int) -> None:
    rules = processor.params
    if not isinstance(rules.first, jax.core.Tracer) and max(int(rules.first), int(rules.end)) >= vocab_size:
        raise UsageError(
            f"timestamps has the ids {int(rules.first)} and {int(rules.end)}, and the vocabulary of the model has "
            f"{vocab_size} tokens; use the ids of its own tokenizer"
        )


def _init(rules: TimeRules, settings, tokens: Array, length: Array, vocab_size: int) -> Times:
    zeros = jnp.zeros(len(length), jnp.int32)
    return Times(zeros, zeros > 0, zeros > 0, zeros + NO_TIME)


def _process(rules: TimeRules, state: Times, tree: TokenTree, above: Array, logits: Array) -> Array:
    drafted = above & (jnp.arange(above.shape[2]) > 0)  # bool[B, R, N]: the path to each row, without the root
    place = jnp.cumsum(drafted, 2, dtype=jnp.int32)
    depth = place[:, :, -1]  # int32[B, R]
    is_time = (tree.tokens >= rules.first)[:, None] & drafted
    is_time_at = lambda number: jnp.any(is_time & (place == number[..., None]), 2)
    of_state = lambda x: jnp.broadcast_to(x[:, None], depth.shape)
    last = jnp.where(depth >= 1, is_time_at(depth), of_state(state.last))
    earlier = jnp.where(depth == 1, of_state(state.last), of_state(state.before_last))
    before_last = jnp.where(depth >= 2, is_time_at(depth - 1), earlier)
    newest = jnp.max(jnp.where(is_time, place, 0), 2)  # int32[B, R], place of the last time on the path; 0: none
    is_newest = is_time & (place == newest[..., None])
    on_path = jnp.sum(jnp.where(is_newest, tree.tokens[:, None], 0), 2, dtype=jnp.int32)
    latest = jnp.where(newest > 0, on_path, of_state(state.latest))
    num_tokens = of_state(state.num_tokens) + depth
    return _restrict(rules, Times(num_tokens, last, before_last, latest), logits)


def _restrict(rules: TimeRules, times: Times, logits: Array) -> Array:
    """Apply the rules to logits float32[B, R, V] after texts with these facts [B, R]."""
    token = jnp.arange(logits.shape[2], dtype=jnp.int32)
    is_time = token >= rules.first
    of = lambda x: x[..., None]
    starts_segment = times.last & (times.before_last | (times.num_tokens < 2))
    ends_segment = times.last & ~starts_segment
    smallest = jnp.where(ends_segment, times.latest, times.latest + 1)
    smallest = jnp.where(times.latest == NO_TIME, rules.first, smallest)
    forbidden = token == rules.excluded
    forbidden |= of(starts_segment) & is_time
    forbidden |= of(ends_segment) & (token < rules.end)
    forbidden |= is_time & (token < of(smallest))
    is_late = token - rules.first > rules.max_initial
    forbidden |= of(times.num_tokens == 0) & (~is_time | is_late)
    logits = jnp.where(forbidden, -jnp.inf, logits)
    total = jax.nn.logsumexp(jnp.where(is_time, logits, -jnp.inf), -1, keepdims=True)
    best = jnp.max(jnp.where(is_time, -jnp.inf, logits), -1, keepdims=True)
    return jnp.where((total > best) & ~is_time, -jnp.inf, logits)


def _update(rules: TimeRules, state: Times, tokens: Array, count: Array) -> Times:
    def step(i: Array, state: Times) -> Times:
        token = tokens[:, i].astype(jnp.int32)
        is_time = token >= rules.first
        latest = jnp.where(is_time, token, state.latest)
        updated = Times(state.num_tokens + 1, is_time, state.last, latest)
        return jax.tree.map(lambda new, old: jnp.where(i < count, new, old), updated, state)

    return jax.lax.fori_loop(0, jnp.max(count), step, state)
