"""Prompts that are being read, chunk by chunk, between the steps of a running batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.engine.job import Parts
from specjax.serving.admission import Admission, ServePrograms
from specjax.serving.prefixes import PrefixStore, StoredChunk
from specjax.types import DecodeState

NEVER_LAST = 4
"""The oldest prompt reads every fourth chunk, even if shorter prompts wait."""


@dataclasses.dataclass(eq=False)
class PromptReader:
    """A prompt of which some chunks are read. `node` is that of the last chunk, or None if nothing is stored."""

    request: Any  # the row of the batch that the request occupies, or None to read a text for the store only
    admission: Admission
    row: DecodeState
    chunk: int | None  # tokens of a chunk; None: the prompt was read as a whole
    node: StoredChunk | None
    start: int = 0  # number of tokens that were read or num_stored in the store
    num_stored: int = 0  # number of tokens that were num_stored

    @property
    def unread(self) -> int:
        """Return the number of tokens that are still to be read. The last token is part of the first step."""
        return 0 if self.chunk is None else max(int(self.admission.length[0]) - 1 - self.start, 0)

    def restore(self, parts: Parts, programs: ServePrograms, store: PrefixStore) -> None:
        """Write the following chunks that the store has."""
        while self.chunk is not None and self.unread >= self.chunk:
            node = store.find(self.node, self._tokens)
            if node is None:
                return
            self.row = programs.put_chunk(parts, self.row, self.admission, np.int32(self.start), node.arrays)
            self._follow(node)
            self.num_stored += self.chunk

    def read(self, parts: Parts, programs: ServePrograms, store: PrefixStore) -> None:
        """Read the next chunk, and store it if it is complete."""
        assert self.chunk is not None
        start, is_complete = np.int32(self.start), self.unread >= self.chunk
        self.row = programs.read(parts, self.row, self.admission, start)
        if is_complete and self.node is not None:
            arrays = programs.take_chunk(parts, self.row, self.admission, start)
            self._follow(store.add(self.node, self._tokens, arrays))
        else:
            self.start += self.chunk

    def leave(self) -> None:
        """Stop to follow the store, because the prompt was read or its request ended."""
        if self.node is not None:
            self.node.readers -= 1
            self.node = None

    @property
    def _tokens(self) -> np.ndarray:
        return self.admission.tokens[0, self.start : self.start + self.chunk]

    def _follow(self, node: StoredChunk | None) -> None:
        self.leave()
        self.node = node
        if node is not None:
            node.readers += 1
        self.start += self.chunk


def next_to_read(readings: list[PromptReader], turn: int) -> PromptReader:
    """Return the prompt that reads the next chunk: the one with the fewest tokens, or in some turns the oldest."""
    return readings[0] if turn % NEVER_LAST == 0 else min(readings, key=lambda reading: reading.unread)
