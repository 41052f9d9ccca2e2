"""The automata of running requests, in an array of fixed size on the device.

The array is a parameter of the step. An automaton is written into free pieces of it, and rows have its address. So no
request compiles a program. Requests with the same automaton share it. An automaton without requests stays until its
place is needed, and the one that was used least recently is replaced first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.numerics.global_arrays import place
from specjax.processors.automaton import Automaton
from specjax.processors.constraint import constraint_room, pack
from specjax.types import Array, Processor

PIECE = 1 << 14
"""Integers that are written at a time. Every automaton takes whole pieces."""
WORD_BYTES = 4


def num_pieces(mib: float) -> int:
    """Return the pieces of a room of some MiB."""
    return int(mib * 2**20 / WORD_BYTES) // PIECE


def table_of(mib: float, vocab_size: int) -> tuple[Processor, ...]:
    """Return the processor of a room of some MiB, or none if there is no room."""
    return (constraint_room(num_pieces(mib) * PIECE, vocab_size),) if num_pieces(mib) else ()


def check_room(automaton: Automaton, mib: float, vocab_size: int, flag: str) -> None:
    """Check that an automaton fits into a room. Its tables are built once.

    Args:
      flag: the argument that sets the room, for errors.

    Raises: UsageError if it does not.
    """
    count = _num_pieces(_packed(automaton, vocab_size))
    if count > num_pieces(mib):
        raise UsageError(
            f"its constraint takes {count * PIECE * WORD_BYTES / 2**20:.2f} MiB, and there is room for {mib:g}; raise "
            f"{flag}, or limit the lengths in the constraint"
        )


@functools.partial(jax.jit, donate_argnames=("words",))
def _put(words: Array, piece: Array, address: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(words, piece, address, 0)


@functools.lru_cache(maxsize=32)
def _packed(automaton: Automaton, vocab_size: int) -> np.ndarray:
    words = pack(automaton, vocab_size)
    words.flags.writeable = False
    return words


def _num_pieces(words: np.ndarray) -> int:
    return -(-len(words) // PIECE)


@dataclasses.dataclass
class _Entry:
    """An automaton in the array."""

    first: int  # piece
    count: int  # of pieces
    users: int = 0


class AutomatonTable:
    """The automata in the array `words`, and the number of requests that each of them has."""

    def __init__(self, mib: float, vocab_size: int, mesh: Mesh | None = None):
        """Allocate a room of some MiB on the device, or on each device of a mesh. Compile the program that writes."""
        self._vocab_size = vocab_size
        size = num_pieces(mib) * PIECE
        room = jnp.zeros(size, jnp.int32) if mesh is None else place(np.broadcast_to(np.int32(0), size), mesh)
        self.words = _put(room, np.zeros(PIECE, np.int32), np.int32(0))
        self._entries: dict[Automaton, _Entry] = {}  # the one that was used least recently comes first

    def acquire(self, automaton: Automaton) -> int | None:
        """Return the address of an automaton for one more request. None: there is no room until another one ends."""
        entry = self._entries.pop(automaton, None) or self._write(automaton)
        if entry is None:
            return None
        entry.users += 1
        self._entries[automaton] = entry
        return entry.first * PIECE

    def release(self, automaton: Automaton) -> None:
        """End the use of an automaton by a request."""
        self._entries[automaton].users -= 1

    def _write(self, automaton: Automaton) -> _Entry | None:
        words = _packed(automaton, self._vocab_size)
        count = _num_pieces(words)
        first = self._find(count)
        if first is None:
            return None
        pieces = np.pad(words, (0, count * PIECE - len(words))).reshape(count, PIECE)
        for number, piece in enumerate(pieces):
            self.words = _put(self.words, piece, np.int32((first + number) * PIECE))
        return _Entry(first, count)

    def _find(self, count: int) -> int | None:
        """Return the first of `count` free pieces. Automata without requests are dropped until there are as many."""
        while (first := self._gap(count)) is None:
            unused = next((automaton for automaton, entry in self._entries.items() if not entry.users), None)
            if unused is None:
                return None
            del self._entries[unused]
        return first

    def _gap(self, count: int) -> int | None:
        taken = sorted((entry.first, entry.first + entry.count) for entry in self._entries.values())
        limits = [(0, 0), *taken, (len(self.words) // PIECE, 0)]
        gaps = ((end, start) for (_, end), (start, _) in itertools.pairwise(limits))
        return next((end for end, start in gaps if start - end >= count), None)
