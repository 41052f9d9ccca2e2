"""SentencePiece BPE: merge the neighbours with the best-scored join until no join is in the vocabulary.

Reference: `llm_tokenizer_spm` of llama.cpp. It is used for GGUF vocabularies of type "llama" (Llama 2, Gemma) and for
llama2.c, which both store no list of merges.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specjax.models.loading.tokenizers.chat import appears_in_template

SPACE = "▁"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, eq=False)
class Spm:
    """A vocabulary with scores. `pieces` write a space as ▁ and the byte 10 as <0x0A>."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]  # higher merges first
    atomic: frozenset[int]  # matched in the text before any merging: control and user-defined tokens
    hidden: frozenset[int]  # omitted from decoded text unless `special`
    unknown: int
    bos: int | None = None  # put before the text if `special`
    eos: int | None = None  # put after the text if `special`
    dummy_prefix: bool = False  # put a space before the text

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with bos and eos if the model has them and `special` is set."""
        return self.encode_parts([text], special)

    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        """Return the ids of the joined parts. No token crosses a border between parts."""
        ids: list[int] = [self.bos] if special and self.bos is not None else []
        for n, part in enumerate(piece for text in parts for piece in self._split(text)):
            if isinstance(part, int):
                ids.append(part)
                continue
            prefix = SPACE if self.dummy_prefix and n == 0 else ""
            for piece in merge_pieces(prefix + part.replace(" ", SPACE), self._ids, self.scores):
                ids += self._lookup(piece)
        return ids + ([self.eos] if special and self.eos is not None else [])

    def find(self, text: str, template: str) -> list[tuple[int, int]]:
        """Return the spans of hidden tokens in a text, and of other atomic tokens that also appear in the template."""
        spans, at = [], 0
        for part in self._split(text):
            end = at + len(self.pieces[part] if isinstance(part, int) else part)
            if isinstance(part, int) and (part in self.hidden or appears_in_template(template, self.pieces[part])):
                spans.append((at, end))
            at = end
        return spans

    def decode(self, ids: Sequence[int], special: bool) -> str:
        """Return the text of ids. Incomplete UTF-8 becomes U+FFFD."""
        shown = [i for i in ids if 0 <= i < len(self.pieces) and (special or i not in self.hidden)]
        text = b"".join(self._bytes[i] for i in shown).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.dummy_prefix else text

    def spellings(self) -> list[bytes | None]:
        """Return the bytes of each token; None for control tokens and the unknown token."""
        return [None if i in self.hidden or i == self.unknown else spelling for i, spelling in enumerate(self._bytes)]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        """Map pieces to ids. A duplicate piece has its first id."""
        return {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        return [piece_bytes(piece) for piece in self.pieces]

    @functools.cached_property
    def _atomic_by_letter(self) -> dict[str, list[str]]:
        """Map first characters to the pieces of `atomic`, longest first."""
        table: dict[str, list[str]] = {}
        for piece in sorted((self.pieces[i] for i in self.atomic), key=len, reverse=True):
            if piece:
                table.setdefault(piece[0], []).append(piece)
        return table

    def _split(self, text: str) -> Iterator[str | int]:
        """Split a text at its atomic tokens. Yield stretches of text, and ids."""
        start = at = 0
        while at < len(text):
            piece = next(
                (candidate for candidate in self._atomic_by_letter.get(text[at], ()) if text.startswith(candidate, at)),
                None,
            )
            if piece is None:
                at += 1
                continue
            if start < at:
                yield text[start:at]
            yield self._ids[piece]
            start = at = at + len(piece)
        if start < len(text):
            yield text[start:]

    def _lookup(self, piece: str) -> list[int]:
        """Return the id of a piece, or the ids of its bytes for an unknown character."""
        if piece in self._ids:
            return [self._ids[piece]]
        encoded = [self._ids.get(f"<0x{byte:02X}>") for byte in piece.encode("utf-8", "surrogatepass")]
        return [self.unknown] if None in encoded else [i for i in encoded if i is not None]


def piece_bytes(piece: str) -> bytes:
    """Return the bytes of a piece."""
    if BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def merge_pieces(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[str]:
    """Return the pieces of a text. The best score is merged first, and among equals the leftmost."""
    pieces: list[str] = list(text)  # a merged-away piece is empty
    previous, following = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))
    heap: list[tuple[float, int, int, str]] = []

    def push(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            joined = pieces[left] + pieces[right]
            token = ids.get(joined)
            if token is not None:
                heapq.heappush(heap, (-scores[token], left, right, joined))

    for i in range(len(pieces) - 1):
        push(i, i + 1)
    while heap:
        _, left, right, joined = heapq.heappop(heap)
        if not pieces[left] or not pieces[right] or pieces[left] + pieces[right] != joined:
            continue  # one of them is already merged
        pieces[left], pieces[right] = joined, ""
        following[left] = following[right]
        if following[left] < len(pieces):
            previous[following[left]] = left
        push(previous[left], left)
        push(left, following[left])
    return [piece for piece in pieces if piece]
