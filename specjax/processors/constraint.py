"""Constraints: texts are restricted to those of an automaton, such as a regular expression or a JSON schema.

Willard, Louf: Efficient Guided Generation for Large Language Models (2023), arXiv 2307.09702.

Rule: x = -inf for every token without a transition from the current state. An eos token is allowed only in accepting
states. The state of a tree node follows from the tokens on the path to it. After an eos, only eos is allowed.
The same is true after a token without a transition, which only a lossy rule accepts.

The tables of several automata lie one behind the other in one array of integers. A row of the batch has the address of
its automaton. So other automata in the same room need no compilation (`constraint_room`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import gather_at
from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.processors.automaton import NONE, Automaton
from specjax.types import Array, Processor, TokenTree

FREE = -1
"""Address of the automaton of an unconstrained row."""
WORD = 32
"""Number of tokens whose bits share one integer."""
HEADER = 3
"""Numbers before the tables of an automaton: tokens with a class, states, and classes."""


class Tables(NamedTuple):
    """The automata of a constraint."""

    starts: Array  # int32[A], address of each automaton
    words: Array  # int32[M], the packed automata


class Location(NamedTuple):
    """The automaton of each row, and its state. The last state of an automaton is the one after the end of a text."""

    start: Array  # int32[B], address of the automaton, or FREE
    state: Array  # int32[B]


def constraint(*automata: Automaton, follow: int | Sequence[int | None] | None = 0) -> Processor:
    """Restrict texts to those that one of the `automata` accepts.

    Args:
      follow: number of the automaton, or one number per row. None does not constrain the rows. `following` changes it
        for a request, if `serve` has `constraint(a, b, follow=None)`. `serve` also accepts an automaton per request,
        if it has a `constraint_mib`.

    Raises: UsageError for a number without an automaton.
    """
    if not automata:
        raise UsageError("a constraint needs an automaton, such as processors.regex(...)")
    num_tokens = max(automaton.highest for automaton in automata) + 1
    parts, width = [pack(automaton, num_tokens) for automaton in automata], _width(num_tokens)
    starts = np.cumsum([0, *map(len, parts)])[:-1].astype(np.int32)
    return following(_processor(Tables(jnp.asarray(starts), jnp.asarray(np.concatenate(parts))), width), follow)


def following(processor: Processor, follow: int | Sequence[int | None] | None) -> Processor:
    """Return the constraint with other automata for its rows. `follow` is as in `constraint`."""
    rows = follow if isinstance(follow, Sequence) else [follow]
    starts = gather(processor.params.starts)
    for number in rows:
        if number is not None and not 0 <= number < len(starts):
            raise UsageError(f"follow is {number}, but the constraint has {len(starts)} automata, numbered from 0")
    return at_addresses(processor, [FREE if number is None else int(starts[number]) for number in rows])


def constraint_room(size: int, vocab_size: int) -> Processor:
    """Return a constraint of unconstrained rows, with room for automata of `size` integers.

    The room takes no memory. Its owner replaces it by an array on the device before the first step.
    """
    room: Any = np.broadcast_to(np.int32(0), size)
    tables = Tables(jnp.zeros(0, jnp.int32), room)
    return at_addresses(_processor(tables, _width(vocab_size)), [FREE])


def at_addresses(processor: Processor, starts: Sequence[int]) -> Processor:
    """Return the constraint with the automata at these addresses for its rows."""
    return processor.replace(settings=np.array(starts, np.int32))


def _width(num_tokens: int) -> int:
    """Return the number of words of a set of tokens."""
    return -(-num_tokens // WORD)


def pack(automaton: Automaton, num_tokens: int) -> np.ndarray:
    """Return the tables of an automaton as int32[M].

    The header is followed by the class of each token [V] and the state after each class [S + 1, C]. Then come the
    number of each state's set of allowed tokens [S + 1], and these sets, in bits of words.

    Args:
      num_tokens: size of the vocabulary, or at least the highest token and one.
    """
    width = _width(num_tokens)
    following, end = automaton.following, len(automaton.following)
    classes = automaton.classes[: automaton.highest + 1]
    states = np.append(np.where(following == NONE, end, following), np.full((1, following.shape[1]), end), 0)
    allowed = np.append(following != NONE, automaton.accepting[:, None], 1)  # by class, and at last eos
    is_end = np.arange(allowed.shape[1]) == following.shape[1]
    sets, set_of = np.unique(np.append(allowed, is_end[None], 0), axis=0, return_inverse=True)
    is_member = np.zeros((len(sets), width * WORD), bool)
    tokens = np.flatnonzero(classes != NONE)
    is_member[:, tokens] = sets[:, classes[tokens]]
    is_member[:, list(automaton.eos)] = sets[:, -1:]
    bits = np.packbits(is_member, 1, bitorder="little").view("<i4")
    header = [len(classes), len(states), following.shape[1]]
    tables = (header, classes, states.reshape(-1), set_of.reshape(-1), bits.reshape(-1))
    return np.concatenate([np.asarray(table, np.int32) for table in tables])


def _processor(tables: Tables, width: int) -> Processor:
    return Processor(
        process=_process_of(width), init=_init, update=_update, check=_check, by_row=True, params=tables
    )  # fmt: skip


def _check(processor: Processor, vocab_size: int) -> None:
    """Check that the model has all tokens of the automata. Otherwise some states would allow no token."""
    starts, words = processor.params
    if isinstance(words, jax.core.Tracer) or not starts.size:
        return
    highest = int(np.max(gather(words[starts]))) - 1
    if highest >= vocab_size:
        raise UsageError(
            f"the constraint has tokens up to {highest}, but the model's vocabulary has {vocab_size}; compile it for "
            "the model's own tokenizer"
        )


def _init(tables: Tables, start: Array, tokens: Array, length: Array, vocab_size: int) -> Location:
    return Location(start, jnp.zeros_like(start))


@functools.cache
def _process_of(width: int):
    def process(tables: Tables, place: Location, tree: TokenTree, above: Array, logits: Array) -> Array:
        drafted = above & (jnp.arange(above.shape[2]) > 0)  # bool[B, R, N]: the path to each node, without the root
        depth = jnp.cumsum(drafted, 2)  # int32[B, R, N], depth of each node of the path

        def next_level(level: Array, rows: Location) -> Location:
            """Return the places [B, R] after the first `level` + 1 drafted nodes of each path."""
            is_next = drafted & (depth == level + 1)
            token = jnp.sum(jnp.where(is_next, tree.tokens[:, None], 0), 2)
            state = jnp.where(jnp.any(is_next, 2), _after(tables, rows, token), rows.state)
            return rows._replace(state=state)

        root = Location(*(jnp.broadcast_to(x[:, None], drafted.shape[:2]) for x in place))
        rows = jax.lax.fori_loop(0, jnp.max(depth[:, :, -1]), next_level, root)
        words = _allowed(tables, rows, width)  # uint32[B, R, W]
        bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
        bits, vocab = bits.reshape(*words.shape[:2], -1), logits.shape[2]
        bits = jnp.pad(bits, ((0, 0), (0, 0), (0, max(vocab - bits.shape[2], 0))))[..., :vocab]
        return jnp.where((bits > 0) | (rows.start == FREE)[..., None], logits, -jnp.inf)

    return process


def _update(tables: Tables, place: Location, tokens: Array, count: Array) -> Location:
    def step(i: Array, place: Location) -> Location:
        return place._replace(state=jnp.where(i < count, _after(tables, place, tokens[:, i]), place.state))

    return jax.lax.fori_loop(0, jnp.max(count), step, place)


def _after(tables: Tables, place: Location, token: Array) -> Array:
    """Return the states after tokens, int32 of the shape of `place`."""
    start, size, count, classes = _header(tables, place)
    is_known = (token >= 0) & (token < size)
    number = _word(tables, start + HEADER + jnp.where(is_known, token, 0))
    following = start + HEADER + size + place.state * classes
    state = _word(tables, following + jnp.maximum(number, 0))
    return jnp.where(place.start == FREE, place.state, jnp.where(is_known & (number >= 0), state, count - 1))


def _allowed(tables: Tables, place: Location, width: int) -> Array:
    """Return the bits of the allowed tokens, uint32[..., width]. Those of unconstrained rows have any value."""
    start, size, count, classes = _header(tables, place)
    set_of = start + HEADER + size + count * classes
    address = set_of + count + _word(tables, set_of + place.state) * width
    take = lambda address: jax.lax.dynamic_slice_in_dim(tables.words, address, width)
    words = jax.vmap(take)(address.reshape(-1)).reshape(*address.shape, width)
    return jax.lax.bitcast_convert_type(words, jnp.uint32)


def _header(tables: Tables, place: Location) -> tuple[Array, Array, Array, Array]:
    """Return the addresses of the automata, and their numbers of tokens, states and classes."""
    start = jnp.maximum(place.start, 0)
    size, count, classes = (_word(tables, start + i) for i in range(HEADER))
    return start, size, count, classes


def _word(tables: Tables, address: Array) -> Array:
    """Look up words. Rows that have ended may have the address of an automaton that was replaced."""
    return gather_at(tables.words, jnp.clip(address, 0, len(tables.words) - 1))
