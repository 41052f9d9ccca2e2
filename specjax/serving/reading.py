"""Prompts that are being read, chunk by chunk, between the steps of a running batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.engine.job import Parts
from specjax.numerics.global_arrays import replicate
from specjax.serving import admission
from specjax.serving.admission import Admission, ServePrograms
from specjax.serving.prefixes import PrefixStore, StoredChunk
from specjax.types import DecodeState, TokenLogprobs

OLDEST_TURN = 4
"""The oldest prompt reads every fourth chunk, even if shorter prompts wait."""
MAX_STARTED = 2
"""Prompts that are read at the same time. Each one takes the memory of a row."""


@dataclasses.dataclass(eq=False)
class PromptReader:
    """A prompt of which some chunks are read. `node` is that of the last chunk, or None if nothing is stored."""

    request: Any  # the row of the batch that the request occupies; None: a text that is read only to be stored
    packed: Admission
    node: StoredChunk | None
    row: DecodeState | None = None  # None before the first chunk
    start: int = 0  # number of tokens that were read or copied
    num_stored: int = 0  # number of tokens that were copied from the store
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # of each chunk, if the request needs them

    @property
    def unread(self) -> int:
        """Return the number of tokens that are still to be read. The last token is part of the first step."""
        return max(int(self.packed.length[0]) - 1 - self.start, 0)

    def advance(self, parts: Parts, programs: ServePrograms, store: PrefixStore, *, wait: bool) -> None:
        """Copy the chunks that the store has, and read the one after them. `wait`: until the device has read it."""
        if self.row is None:
            self.row = programs.begin(parts, self.packed)
        size = admission.chunk_size(parts)
        if size is None:  # `begin` read the prompt
            self.start = int(self.packed.length[0])
            return
        while self._is_complete(parts, size):
            stored = store.find(self.node, self._tokens(parts, size))
            if stored is None:
                break
            self.row = programs.put_chunk(parts, self.row, self.packed, np.int32(self.start), stored.arrays)
            self._follow(stored, size)
            self.num_stored += size
        if self.unread:
            self._read(parts, programs, store, size)
        if wait:
            jax.block_until_ready(self.row.length)

    def leave(self) -> None:
        """Stop to follow the store, because the prompt was read or its request ended."""
        if self.node is not None:
            self.node.readers -= 1
            self.node = None

    def _read(self, parts: Parts, programs: ServePrograms, store: PrefixStore, size: int) -> None:
        """Read the next chunk, and store it if it is complete."""
        assert self.row is not None
        start, is_complete = np.int32(self.start), self._is_complete(parts, size)
        self.row, logprobs = programs.read(parts, self.row, self.packed, start)
        if logprobs is not None and self.packed.scores:
            self.logprobs.append(replicate(logprobs))
        if is_complete and self.node is not None:
            arrays = programs.take_chunk(parts, self.row, self.packed, start)
            self._follow(store.add(self.node, self._tokens(parts, size), arrays), size)
        else:
            self.start += size

    def _is_complete(self, parts: Parts, size: int) -> bool:
        """Return True if the state of the target and that of the drafter contain all of the next `size` tokens."""
        return self.unread >= size + parts.drafter.traits.lag - 1

    def _tokens(self, parts: Parts, size: int) -> np.ndarray:
        """Return the tokens of the next chunk. For a head the token after it is added, which its state depends on."""
        more = int(parts.drafter.hooks.prefill is not None)
        return self.packed.tokens[0, self.start : self.start + size + more]

    def _follow(self, node: StoredChunk | None, size: int) -> None:
        self.leave()
        self.node = node
        if node is not None:
            node.readers += 1
        self.start += size


def next_to_read(readers: list[PromptReader], turn: int) -> PromptReader:
    """Return the prompt that reads the next chunk: the one with the fewest tokens, or in some turns the oldest."""
    started = [reader for reader in readers if reader.row is not None]
    candidates = started if len(started) >= MAX_STARTED else readers
    return candidates[0] if turn % OLDEST_TURN == 0 else min(candidates, key=lambda reader: reader.unread)
