"""Suffix matching: copy what followed the longest earlier occurrence of the end of the text; else ask another drafter.

Hu et al., SAM Decoding: Speculative Decoding via Suffix Automaton (2024), arXiv 2411.10666.

Rule: m is the length of the longest suffix of the text (at most max_match) that occurs earlier. If m >= min_match,
draft the num_tokens tokens that follow an occurrence, preferring a shorter match with a full continuation to a longer
one without; else the tree of `fallback`.
Guarantee: distribution (a point-mass chain, or the fallback's tree).
Deviations: the authors keep an automaton, on the host; a compare of the whole text finds the same match on the device,
up to `max_match`. They copy from the earliest occurrence (`occurrence="earliest"`); the latest follows the recent
topic. Their static automaton over a corpus is the drafter `rest`. Alone they ask for min_match = 5 and use another
drafter below; without a fallback short matches are better than none.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.drafters.autoregressive import autoregressive
from specjax.errors import UsageError
from specjax.suffixes import copied_chain, last_tokens, match_length
from specjax.tree import pad_nodes
from specjax.types import Array, Drafter


def suffix(
    num_tokens: int = 15,
    *,
    max_match: int = 16,
    min_match: int | None = None,
    occurrence: Literal["latest", "earliest"] = "latest",
    fallback: Drafter | None = None,
) -> Drafter:
    """A chain of up to `num_tokens` copied tokens where a suffix of `min_match` or more recurs (default: 2, with a
    fallback 5), else the fallback's point-mass tree, else nothing.

    Raises: UsageError if num_tokens < 1, not 1 <= min_match <= max_match, or the fallback has randomness or a
    model of its own.
    """
    if min_match is None:
        min_match = 2 if fallback is None else 5
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if not 1 <= min_match <= max_match:
        raise UsageError(f"min_match must be from 1 to max_match ({max_match}), not {min_match}")
    fallback = fallback or autoregressive()
    if fallback.draws != "point_mass" or not fallback.follows_any_tree:
        raise UsageError("fallback must be a drafter without randomness and without a model, such as token_recycling")
    bare = fallback.replace(params=())
    return _functions(bare, num_tokens, max_match, min_match, occurrence).replace(params=fallback.params)


def find(tokens: Array, length: Array, num_tokens: int, max_match: int, occurrence: str) -> tuple[Array, Array]:
    """Where the continuation of the best match starts int32[B] (-1: none), and how long the match is int32[B]."""
    matched = match_length(tokens, length - 1, last_tokens(tokens, length, max_match))
    position = jnp.arange(tokens.shape[1])
    full = jnp.where(position + 1 + num_tokens <= length[:, None], matched, 0)
    # A shorter match that can be copied from in full beats a longer one at the end of the text.
    usable = jnp.where(jnp.any(full > 0, 1, keepdims=True), full, matched)
    best = jnp.max(usable, 1)
    candidate = (usable == best[:, None]) & (best[:, None] > 0)
    earliest = jnp.argmax(candidate, 1)
    latest = tokens.shape[1] - 1 - jnp.argmax(candidate[:, ::-1], 1)
    # Where no continuation is full, the earliest match copies most.
    choose_latest = jnp.any(full > 0, 1) & (occurrence == "latest")
    return jnp.where(best > 0, jnp.where(choose_latest, latest, earliest) + 1, -1), best


@functools.cache
def _functions(other: Drafter, num_tokens: int, max_match: int, min_match: int, occurrence: str) -> Drafter:
    nodes = max(num_tokens + 1, other.num_nodes)

    def propose(params, keys, state, context, limit):
        start, matched = find(context.tokens, context.length, num_tokens, max_match, occurrence)
        root = last_tokens(context.tokens, context.length, 1)
        copied = pad_nodes(copied_chain(root, context.tokens, context.length, start, num_tokens, limit), nodes)
        drafted, state = other.propose(params, keys, state, context, limit)
        copies = (matched >= min_match)[:, None]
        pick = lambda ours, theirs: jnp.where(copies, ours, theirs)
        return jax.tree.map(pick, copied, pad_nodes(drafted, nodes)), state

    return other.replace(
        propose=propose,
        num_nodes=nodes,
        max_depth=max(num_tokens, other.max_depth),
        widths=tuple(sorted({w for w in (1, 4, 8, *other.widths, other.num_nodes) if w < nodes})),
    )
