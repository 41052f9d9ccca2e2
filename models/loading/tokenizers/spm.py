"""SentencePiece BPE: the neighbours whose join scores best are merged until none is in the vocabulary.

Reference: `llm_tokenizer_spm` of llama.cpp. Used for GGUF vocabularies of type "llama" (Llama 2, Gemma) and for
llama2.c, neither of which stores a list of merges.
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
    whole: frozenset[int]  # matched in the text before any merging: control tokens and user-defined ones
    hidden: frozenset[int]  # left out of decoded text unless asked for
    unknown: int
    bos: int | None = None  # put before the text if `special`
    eos: int | None = None  # put behind it, likewise
    dummy_prefix: bool = False  # a space before the text

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text, between bos and eos if the model has them and `special`."""
        return self.encode_parts([text], special)

    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        """Ids of the parts joined; no token reaches over a border."""
        ids: list[int] = [self.bos] if special and self.bos is not None else []
        for n, part in enumerate(piece for text in parts for piece in self._split(text)):
            if isinstance(part, int):
                ids.append(part)
                continue
            prefix = SPACE if self.dummy_prefix and n == 0 else ""
            for piece in merge(prefix + part.replace(" ", SPACE), self._ids, self.scores):
                ids += self._lookup(piece)
        return ids + ([self.eos] if special and self.eos is not None else [])

    def find(self, text: str, template: str) -> list[tuple[int, int]]:
        """Where hidden tokens stand in a text, and other whole ones that stand in the template too."""
        found, at = [], 0
        for part in self._split(text):
            end = at + len(self.pieces[part] if isinstance(part, int) else part)
            if isinstance(part, int) and (part in self.hidden or appears_in_template(template, self.pieces[part])):
                found.append((at, end))
            at = end
        return found

    def decode(self, ids: Sequence[int], special: bool) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD."""
        shown = [i for i in ids if 0 <= i < len(self.pieces) and (special or i not in self.hidden)]
        text = b"".join(self._bytes[i] for i in shown).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.dummy_prefix else text

    def spellings(self) -> list[bytes | None]:
        """The bytes that each token stands for; None of control tokens and of the unknown one."""
        return [None if i in self.hidden or i == self.unknown else whole for i, whole in enumerate(self._bytes)]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        """Ids by piece; where a piece occurs twice, the first."""
        return {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        return [spelled(piece) for piece in self.pieces]

    @functools.cached_property
    def _whole(self) -> dict[str, list[str]]:
        """Pieces of `whole` by first character, the longest first."""
        table: dict[str, list[str]] = {}
        for piece in sorted((self.pieces[i] for i in self.whole), key=len, reverse=True):
            if piece:
                table.setdefault(piece[0], []).append(piece)
        return table

    def _split(self, text: str) -> Iterator[str | int]:
        """Cut a text at its whole tokens: stretches of text, and ids."""
        start = at = 0
        while at < len(text):
            found = next((piece for piece in self._whole.get(text[at], ()) if text.startswith(piece, at)), None)
            if found is None:
                at += 1
                continue
            if start < at:
                yield text[start:at]
            yield self._ids[found]
            start = at = at + len(found)
        if start < len(text):
            yield text[start:]

    def _lookup(self, piece: str) -> list[int]:
        """The id of a piece; of an unknown character, the ids of its bytes."""
        if piece in self._ids:
            return [self._ids[piece]]
        encoded = [self._ids.get(f"<0x{byte:02X}>") for byte in piece.encode("utf-8", "surrogatepass")]
        return [self.unknown] if None in encoded else [i for i in encoded if i is not None]


def spelled(piece: str) -> bytes:
    """The bytes that a piece stands for."""
    if BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def merge(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[str]:
    """Pieces of a text: best score first, leftmost first among equals."""
    pieces: list[str] = list(text)  # a merged-away piece is empty
    before, after = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))
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
            continue  # one of the two has been merged meanwhile
        pieces[left], pieces[right] = joined, ""
        after[left] = after[right]
        if after[left] < len(pieces):
            before[after[left]] = left
        push(before[left], left)
        push(left, after[left])
    return [piece for piece in pieces if piece]
