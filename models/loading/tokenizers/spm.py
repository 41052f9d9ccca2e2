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
    dummy_prefix: bool = False  # put a space before the text, and before the text after each atomic token
    first_only: bool = False  # put that space only before a text that begins without an atomic token
    left_strip: frozenset[int] = frozenset()  # atomic tokens that remove the spaces before them
    right_strip: frozenset[int] = frozenset()  # atomic tokens that remove the spaces after them

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with bos and eos if the model has them and `special` is set."""
        return self.encode_parts([text], special)

    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        """Return the ids of the joined parts. No token crosses a border between parts."""
        ids: list[int] = [self.bos] if special and self.bos is not None else []
        is_start = True  # no stretch of text directly before
        for text in parts:
            for token, start, stop in self._split(text):
                if token is None:
                    prefix = SPACE if self.dummy_prefix and is_start else ""
                    ids += self._merge(prefix + text[start:stop].replace(" ", SPACE))
                else:
                    ids.append(token)
                is_start = token is not None and not self.first_only
        return ids + ([self.eos] if special and self.eos is not None else [])

    def find(self, text: str, template: str) -> list[tuple[int, int]]:
        """Return the spans of hidden tokens in a text, and of other atomic tokens that also appear in the template."""
        return [
            (start, stop)
            for token, start, stop in self._split(text)
            if token is not None and (token in self.hidden or appears_in_template(template, self.pieces[token]))
        ]

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
    def _mergeable(self) -> dict[str, int]:
        """Map the pieces that merging can lead to. Control tokens and bytes are none of them, however a text spells."""
        return {p: i for p, i in self._ids.items() if i not in self.hidden and not BYTE.fullmatch(p)}

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

    def _split(self, text: str) -> Iterator[tuple[int | None, int, int]]:
        """Split a text at its atomic tokens.

        Yield (id, start, stop) of each token, with the spaces that it removes, and (None, start, stop) of the text
        between them.
        """
        start = at = 0
        while at < len(text):
            piece = next(
                (candidate for candidate in self._atomic_by_letter.get(text[at], ()) if text.startswith(candidate, at)),
                None,
            )
            if piece is None:
                at += 1
                continue
            token, first, stop = self._ids[piece], at, at + len(piece)
            while token in self.left_strip and first > start and text[first - 1].isspace():
                first -= 1
            while token in self.right_strip and stop < len(text) and text[stop].isspace():
                stop += 1
            if start < first:
                yield None, start, first
            yield token, first, stop
            start = at = stop
        if start < len(text):
            yield None, start, len(text)

    def _merge(self, text: str) -> list[int]:
        """Return the ids of a stretch of text. Neighbours that the vocabulary lacks are one unknown token."""
        ids: list[int] = []
        for piece in merge_pieces(text, self._mergeable, self.scores):
            piece_ids = self._lookup(piece)
            if piece_ids != [self.unknown] or ids[-1:] != piece_ids:
                ids += piece_ids
        return ids

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
