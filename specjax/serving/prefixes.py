"""A store of prompt chunks that were read, by their tokens and those before them (a radix tree over chunks).

Zheng et al.: SGLang: Efficient Execution of Structured Language Model Programs (2312.07104), section 3.

Rule: a node has the arrays of one chunk of a prompt, and its children continue it. A prompt follows the nodes with its
own tokens as far as they exist. If the arrays exceed a number of bytes, the leaf that was used least recently is
dropped, and so on.
Guarantee: a node has exactly the arrays that reading the chunk would compute, to the bit, because all chunks begin at
multiples of their size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.types import Array

PREFIX_GIB = 0.5
"""Default size of the store in GiB: 23,000 tokens of SmolLM2 in bfloat16, or 4,000 of Llama 3 8B."""


@dataclasses.dataclass(eq=False)
class StoredChunk:
    """The arrays of a chunk that follows the chunks of its ancestors. A root has no arrays."""

    parent: StoredChunk | None
    key: Any
    arrays: list[Array] = dataclasses.field(default_factory=list)
    children: dict[Any, StoredChunk] = dataclasses.field(default_factory=dict)
    used: int = 0  # time of the last use
    readers: int = 0  # prompts that are being read and follow this node

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the arrays."""
        return sum(x.nbytes for x in self.arrays)


class PrefixStore:
    """Chunks of prompts, up to a number of bytes. Prompts with different salts share nothing."""

    def __init__(self, max_bytes: int):
        """Create an empty store. With 0 bytes it stores nothing."""
        self.max_bytes, self.num_bytes, self._time = max_bytes, 0, 0
        self._roots: dict[Any, StoredChunk] = {}

    def root(self, salt: Any = None) -> StoredChunk | None:
        """Return the node before the first chunk, or None if nothing is stored."""
        return self._roots.setdefault(salt, StoredChunk(None, salt)) if self.max_bytes else None

    def find(self, node: StoredChunk | None, tokens: np.ndarray) -> StoredChunk | None:
        """Return the node that continues `node` with the chunk `tokens` int32[C], or None."""
        child = None if node is None else node.children.get(_key(tokens))
        if child is not None:
            child.used = self._tick()
        return child

    def add(self, node: StoredChunk | None, tokens: np.ndarray, arrays: list[Array]) -> StoredChunk | None:
        """Add a chunk after `node`. Return its node, or None if there is no room for it."""
        if node is None:
            return None
        child = StoredChunk(node, _key(tokens), arrays, used=self._tick())
        node.readers += 1  # `_make_room` must not drop it
        has_room = self._make_room(child.num_bytes)
        node.readers -= 1
        if not has_room:
            return None
        node.children[child.key] = child
        self.num_bytes += child.num_bytes
        return child

    def clear(self) -> None:
        """Drop all chunks that no prompt follows."""
        while self._drop_oldest():
            pass

    def _make_room(self, num_bytes: int) -> bool:
        while self.num_bytes + num_bytes > self.max_bytes:
            if not self._drop_oldest():
                return False
        return True

    def _drop_oldest(self) -> bool:
        """Drop the leaf that was used least recently. Return False if there is none that may be dropped."""
        leaves = [node for node in self._nodes() if not node.children and not node.readers]
        if not leaves:
            return False
        oldest = min(leaves, key=lambda node: node.used)
        assert oldest.parent is not None
        del oldest.parent.children[oldest.key]
        self.num_bytes -= oldest.num_bytes
        return True

    def _nodes(self) -> list[StoredChunk]:
        nodes, queue = [], list(self._roots.values())
        while queue:
            node = queue.pop()
            queue.extend(node.children.values())
            nodes += [node] if node.parent is not None else []
        return nodes

    def _tick(self) -> int:
        self._time += 1
        return self._time


def _key(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()
