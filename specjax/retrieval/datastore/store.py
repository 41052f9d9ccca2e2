"""Datastores on the host: shards of token ids, each with its suffix array.

The documents are concatenated. Each ends with the id END = `vocab_size`, which occurs in no text, so matches and
continuations never cross a document's end. A suffix array lists the places of a shard, sorted by the tokens from each
place on. END is the largest id. So all places where the same tokens begin are neighbours.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from specjax.errors import UsageError, optional_import
from specjax.retrieval.datastore.index import Index, to_device

SHARD_TOKENS = 1 << 25
"""Places per shard. Building one takes about 1 GB of memory, or 2 for vocabularies above 65,535 ids."""


class Shard(NamedTuple):
    """A part of the corpus, memory-mapped if it comes from a file."""

    tokens: np.ndarray  # uint16[n] or uint32[n], ends with END
    suffixes: np.ndarray  # int32[n], places sorted by the tokens from each place on


class Match(NamedTuple):
    """Occurrences of the longest end of a text that the corpus contains."""

    span: int  # number of tokens that match; 0: no match
    first: list[int]  # per shard, first rank of the suffix array whose suffix begins with these tokens
    counts: list[int]  # per shard, number of such ranks


@dataclass(frozen=True, eq=False)
class Datastore:
    """A corpus for retrieval. `info` is the content of the folder's meta.json, or empty for a store in memory."""

    shards: tuple[Shard, ...]
    vocab_size: int
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Return the number of places of all shards, including the ends of the documents."""
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def summary(self) -> dict[str, Any]:
        """Return counts, memory, and the hashes of vocabulary and text."""
        per_token = token_dtype(self.vocab_size).itemsize + 4
        return {
            "documents": self.info.get("documents"),
            "tokens": self.num_tokens,
            "shards": len(self.shards),
            "bytes": self.num_tokens * per_token,
            "vocab_size": self.vocab_size,
            "tokenizer": self.info.get("tokenizer"),
            "text": self.info.get("text"),
        }

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the ids of each document. A document that crosses the border of a shard is yielded in two pieces."""
        for tokens, _ in self.shards:
            start = 0
            for end in np.flatnonzero(tokens == self.vocab_size).tolist():
                yield tokens[start:end]
                start = end + 1

    def to_device(self, mesh: Mesh | None = None) -> Index:
        """Return the `Index` on the device, or distributed over the target's mesh. See `index.to_device`."""
        return to_device(self.shards, self.vocab_size, mesh)

    def search(self, text: Sequence[int], max_span: int = 16, min_span: int = 2) -> Match:
        """Find the longest end of `text`, of `min_span` to `max_span` tokens, that occurs in the corpus."""
        for span in range(min(max_span, len(text)), min_span - 1, -1):
            query = [int(token) for token in text[len(text) - span :]]
            if max(query) >= self.vocab_size:  # such an id matches no token
                continue
            first, count = [], []
            for shard in self.shards:
                tokens_at = lambda i, tokens=shard.tokens, span=span: tokens[i : i + span].tolist()
                first.append(bisect.bisect_left(shard.suffixes, query, key=tokens_at))
                count.append(bisect.bisect_right(shard.suffixes, query, key=tokens_at) - first[-1])
            if any(count):
                return Match(span, first, count)
        return Match(0, [0] * len(self.shards), [0] * len(self.shards))

    def continuations(self, match: Match, num_paths: int, length: int) -> np.ndarray:
        """Return the tokens after a match: int32[num_paths, length], -1 from a document's end on.

        All occurrences are returned if they are at most `num_paths`, followed by rows of -1. Otherwise `num_paths` of
        them are chosen at even distances in the order of the shards and their suffix arrays. So continuations appear in
        proportion to their frequency.
        """
        paths = np.full((num_paths, length), -1, np.int32)
        earlier = np.cumsum([0, *match.counts])  # occurrences in earlier shards
        total = int(earlier[-1])
        for path in range(min(total, num_paths)):
            rank = path if total <= num_paths else path * total // num_paths
            i = int(np.searchsorted(earlier, rank, side="right")) - 1
            tokens, suffixes = self.shards[i]
            start = int(suffixes[match.first[i] + rank - earlier[i]]) + match.span
            following = tokens[start : start + length].astype(np.int64)
            end = np.argmax(np.append(following, self.vocab_size) == self.vocab_size)
            paths[path, :end] = following[:end]
        return paths


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that can represent every id and END."""
    return np.dtype(np.uint16 if vocab_size < 1 << 16 else np.uint32)


def from_documents(
    documents: Iterable[Sequence[int]], vocab_size: int, *, shard_tokens: int = SHARD_TOKENS
) -> Datastore:
    """Build a datastore in memory. Raises: UsageError for ids outside the vocabulary, or a corpus without tokens."""
    pieces = (np.array([*document, vocab_size]) for document in documents if len(document))
    store = Datastore(
        tuple(make_shard(tokens) for tokens, _, _ in split_shards(pieces, vocab_size, shard_tokens)), vocab_size
    )
    if not store.shards:
        raise UsageError("the corpus has no tokens; give at least one document that is not empty")
    return store


def split_shards(
    pieces: Iterable[np.ndarray], vocab_size: int, shard_tokens: int, place: int = 0
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Split pieces of text (ids, END included) into shards, and yield the tokens of each.

    All shards except the last are full. A document that crosses the border of a shard is cut there, and every shard
    ends with END.

    Args:
      place: start in the first piece.

    Yields: tokens, the number of pieces that are used up, and the place in the next piece.
    """
    if shard_tokens < 2:
        raise UsageError(f"shard_tokens must be at least 2 (a token and the document's end), not {shard_tokens}")
    dtype = token_dtype(vocab_size)
    parts: list[np.ndarray] = []
    room, used = shard_tokens - 1, 0

    def close_shard():
        tokens = np.concatenate(parts)
        return tokens if tokens[-1] == vocab_size else np.append(tokens, dtype.type(vocab_size))

    for piece in pieces:
        if len(piece) and not 0 <= piece.min() <= piece.max() <= vocab_size:
            raise UsageError(
                f"the corpus has ids from {piece.min()} to {piece.max()}, but the vocabulary has ids from 0 to "
                f"{vocab_size - 1}; use the tokenizer that belongs to it"
            )
        while len(piece) - place > room:
            parts.append(piece[place : place + room].astype(dtype))
            place += room
            yield close_shard(), used, place
            parts, room = [], shard_tokens - 1
        parts.append(piece[place:].astype(dtype))
        room -= len(parts[-1])
        used, place = used + 1, 0
    if parts:
        yield close_shard(), used, 0


def make_shard(tokens: np.ndarray) -> Shard:
    """Sort the suffixes: 20 bytes of memory per token (twice that above 65,535 ids), 0.25 s per million.

    Raises: UsageError without the package pydivsufsort.
    """
    with optional_import("datastore", "building a datastore needs"):
        import pydivsufsort
    return Shard(tokens, pydivsufsort.divsufsort(tokens).astype(np.int32, copy=False))
