"""Constraints: texts are restricted to those of an automaton, such as a regular expression or a JSON schema.

Willard, Louf: Efficient Guided Generation for Large Language Models (2023), arXiv 2307.09702.

Rule: x = -inf for every token without a transition from the current state. An eos token is allowed only in accepting
states. The state of a tree node follows from the tokens on the path to it. After an eos, only eos is allowed.
The same is true after a token without a transition, which only a lossy rule accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import gather_at
from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.processors.automaton import Automaton
from specjax.types import Array, Processor, TokenTree

FREE = -1
"""State of an unconstrained row."""
WORD = 32
"""Number of tokens whose bits share one integer."""


class Tables(NamedTuple):
    """Several concatenated automata: their states in order, and then one state after the end of a text."""

    starts: Array  # int32[A], start state of each automaton
    allowed: Array  # uint32[S, ceil(V / 32)], one bit per token
    offsets: Array  # int32[S + 1], index of each state's first transition in `tokens` and `following`
    tokens: Array  # int32[T], increasing within a state
    following: Array  # int32[T], the state after each token


def constraint(*automata: Automaton, follow: int | Sequence[int | None] | None = 0) -> Processor:
    """Restrict texts to those that one of the `automata` accepts.

    Args:
      follow: number of the automaton, or one number per row. None does not constrain the rows. `following` changes it
        for a request, if `serve` has `constraint(a, b, follow=None)`.

    Raises: UsageError for a number without an automaton.
    """
    if not automata:
        raise UsageError("a constraint needs an automaton, such as processors.regex(...)")
    starts = np.cumsum([0, *(len(automaton.accepting) for automaton in automata)])
    end, edges = starts[-1], np.cumsum([0, *(len(automaton.tokens) for automaton in automata)])
    highest = max(max(*automaton.eos, automaton.tokens.max(initial=0)) for automaton in automata)
    rows = [_bits(automaton, state, highest) for automaton in automata for state in range(len(automaton.accepting))]
    rows.append(_packed(sorted({token for automaton in automata for token in automaton.eos}), highest))
    joined = lambda parts: jnp.asarray(np.concatenate(parts).astype(np.int32))
    tables = Tables(
        jnp.asarray(starts[:-1].astype(np.int32)),
        jnp.asarray(np.stack(rows)),
        joined([*(a.offsets[:-1] + n for a, n in zip(automata, edges, strict=False)), [edges[-1]] * 2]),
        joined([*(a.tokens for a in automata), [-1]]),  # never empty
        joined([*(a.following + n for a, n in zip(automata, starts, strict=False)), [end]]),
    )
    assert len(tables.offsets) == end + 2
    free = Processor(process=_process, init=_init, update=_update, check=_check, by_row=True, params=tables)
    return following(free, follow)


def following(processor: Processor, follow: int | Sequence[int | None] | None) -> Processor:
    """Return the constraint with other automata for its rows. `follow` is as in `constraint`."""
    rows = follow if isinstance(follow, Sequence) else [follow]
    count = len(processor.params.starts)
    for number in rows:
        if number is not None and not 0 <= number < count:
            raise UsageError(f"follow is {number}, but the constraint has {count} automata, numbered from 0")
    return processor.replace(settings=np.array([FREE if number is None else number for number in rows], np.int32))


def _bits(automaton: Automaton, state: int, highest: int) -> np.ndarray:
    tokens = automaton.tokens[automaton.offsets[state] : automaton.offsets[state + 1]]
    return _packed([*tokens, *automaton.eos] if automaton.accepting[state] else tokens, highest)


def _packed(tokens: Sequence[int] | np.ndarray, highest: int) -> np.ndarray:
    """Pack a set of tokens into bits, uint32[ceil(V / 32)]."""
    bits = np.zeros((highest // WORD + 1) * WORD, bool)
    bits[np.asarray(tokens, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def _check(processor: Processor, vocab_size: int) -> None:
    """Check that the model has all tokens of the automata. Otherwise some states would allow no token."""
    tokens = processor.params.tokens
    if isinstance(tokens, jax.core.Tracer):
        return
    highest = int(np.max(gather(tokens)))
    if highest >= vocab_size:
        raise UsageError(
            f"the constraint has tokens up to {highest}, but the model's vocabulary has {vocab_size}; compile it for "
            "the model's own tokenizer"
        )


def _init(tables: Tables, follow: Array, tokens: Array, length: Array, vocab_size: int) -> Array:
    return jnp.where(follow < 0, FREE, gather_at(tables.starts, jnp.maximum(follow, 0)))  # int32[B]


def _process(tables: Tables, state: Array, tree: TokenTree, above: Array, logits: Array) -> Array:
    drafted = above & (jnp.arange(above.shape[2]) > 0)  # bool[B, R, N]: the path to each row's node, without the root
    depth = jnp.cumsum(drafted, 2)  # int32[B, R, N], depth of each node of the path

    def next_level(level: Array, states: Array) -> Array:
        """Return the states int32[B, R] after the first `level` + 1 drafted nodes of each path."""
        is_next = drafted & (depth == level + 1)
        token = jnp.sum(jnp.where(is_next, tree.tokens[:, None], 0), 2)
        return jnp.where(jnp.any(is_next, 2), _after(tables, states, token), states)

    root = jnp.broadcast_to(state[:, None], drafted.shape[:2])
    states = jax.lax.fori_loop(0, jnp.max(depth[:, :, -1]), next_level, root)
    words = gather_at(tables.allowed, jnp.maximum(states, 0))  # uint32[B, R, W]
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    bits, vocab = bits.reshape(*words.shape[:2], -1), logits.shape[2]
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, max(vocab - bits.shape[2], 0))))[..., :vocab]
    return jnp.where((bits > 0) | (states == FREE)[..., None], logits, -jnp.inf)


def _update(tables: Tables, state: Array, tokens: Array, count: Array) -> Array:
    step = lambda i, state: jnp.where(i < count, _after(tables, state, tokens[:, i]), state)
    return jax.lax.fori_loop(0, jnp.max(count), step, state)


def _after(tables: Tables, state: Array, token: Array) -> Array:
    """Look up the states after tokens, int32 of any shape, by bisection among the transitions of each state."""
    row = jnp.maximum(state, 0)
    low, stop = gather_at(tables.offsets, row), gather_at(tables.offsets, row + 1)
    high, last = stop, len(tables.tokens) - 1
    for _ in range(len(tables.tokens).bit_length()):
        middle = (low + high) // 2
        is_less = (middle < high) & (gather_at(tables.tokens, jnp.minimum(middle, last)) < token)
        low, high = jnp.where(is_less, middle + 1, low), jnp.where(is_less, high, middle)
    place = jnp.minimum(low, last)
    exists = (low < stop) & (gather_at(tables.tokens, place) == token)
    end = len(tables.allowed) - 1
    return jnp.where(state == FREE, FREE, jnp.where(exists, gather_at(tables.following, place), end))
