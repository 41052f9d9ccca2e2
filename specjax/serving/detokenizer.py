"""Ids to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
BYTES = 4
"""Of a character at most. Some tokenizers show each byte of an unfinished one as one U+FFFD, and those of the whole
characters before it too."""


class Decodes(Protocol):
    """A tokenizer, as far as is needed here."""

    def decode(self, ids: list[int], /) -> str: ...


class Detokenizer:
    """The text of one row, token by token.

    Held back are bytes that are not a whole character yet, and what may be the beginning of one of the strings `stop`.
    Where one of these is in the text, the text ends before it, and `stopped` is true.

    Only the last tokens are decoded anew, those since the text was last whole and the ones that made it whole: some
    tokenizers drop a space at the beginning of what they decode, so what is new is what follows the text of these.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = ()):
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._known = 0  # of these ids, those whose text was whole before the rest
        self._given = 0  # characters of their text that have been given
        self._tail = ""  # may begin a stop string

    def add(self, token: int) -> str:
        """The text that is known for sure with one more token; nothing after a stop string."""
        if self.stopped:
            return ""
        self._ids.append(token)
        whole = self._tokenizer.decode(self._ids)
        held = len(whole) - len(whole.rstrip(UNFINISHED))
        if len(self._ids) - self._known > BYTES:  # these are not all of one character
            held = min(held, BYTES - 1)
        new = whole[self._given : len(whole) - held]
        self._given += len(new)
        if new and not held:
            del self._ids[: self._known]
            self._known, self._given = len(self._ids), len(self._tokenizer.decode(self._ids))
        return self._until_stop(new)

    def flush(self) -> str:
        """What is still held back: the text ends here."""
        if self.stopped:
            return ""
        rest = self._tail + self._tokenizer.decode(self._ids)[self._given :]
        self._ids, self._known, self._given, self._tail = [], 0, 0, ""
        return rest

    def add_all(self, tokens: Iterable[int]) -> tuple[str, int]:
        """The text of several tokens, and how many of them were taken: those after a stop string are not."""
        text, taken = "", 0
        for token in tokens:
            if self.stopped:
                break
            text, taken = text + self.add(token), taken + 1
        return text, taken

    def _until_stop(self, new: str) -> str:
        text = self._tail + new
        places = [place for place in map(text.find, self._stop) if place >= 0]
        if places:
            self.stopped, self._tail = True, ""
            return text[: min(places)]
        begun = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        held = max(begun, default=0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]
