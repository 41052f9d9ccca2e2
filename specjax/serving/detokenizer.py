"""Incremental detokenization of token ids, token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
BYTES = 4
"""Largest number of bytes of a character. Some tokenizers decode each byte of an unfinished character to one U+FFFD,
and even the bytes of the complete characters before it."""


class TextDecoder(Protocol):
    """The part of a tokenizer that decodes ids to text."""

    def decode(self, ids: list[int], /) -> str: ...


class Detokenizer:
    """A converter from the tokens of one row to text, token by token.

    It buffers bytes that are not a complete character yet, and text that may be the beginning of a stop string. If the
    text contains a stop string, the returned text ends before it, and `stopped` is True.

    Each call decodes only the last tokens again: the tokens since the text last ended with a complete character, and
    the tokens that completed it. Some tokenizers drop a space at the beginning of a decoded text. So the new text is
    the part that follows the text of the older tokens.
    """

    def __init__(
        self, tokenizer: TextDecoder, stop: Sequence[str] = (), *, includes_stop: bool = False, min_tokens: int = 0
    ):  # fmt: skip
        """Create the converter.

        Args:
          includes_stop: the text ends after its stop string. min_tokens: number of tokens in which none is looked for.
        """
        self.stopped = False
        self._includes_stop, self._num_unchecked = includes_stop, min_tokens
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._num_complete = 0  # number of leading ids whose text ends with a complete character
        self._num_returned = 0  # number of returned characters of the text of `_ids`
        self._tail = ""  # text that may begin a stop string
        self.num_shown = 0  # number of tokens whose text was returned, at least in part
        self._starts: deque[int] = deque()  # characters before each of the other tokens
        self._size = self._size_returned = 0  # characters of complete text, and of the returned text

    def add(self, token: int) -> str:
        """Add a token and return the text that is now certain. After a stop string, return an empty string."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self._starts.append(self._size)
        text = self._tokenizer.decode(self._ids)
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        if len(self._ids) - self._num_complete > BYTES:  # more tokens than one character can have bytes
            unfinished = min(unfinished, BYTES - 1)
        new = text[self._num_returned : len(text) - unfinished]
        self._num_returned += len(new)
        if new and not unfinished:
            del self._ids[: self._num_complete]
            self._num_complete, self._num_returned = len(self._ids), len(self._tokenizer.decode(self._ids))
        self._size += len(new)
        is_checked, self._num_unchecked = not self._num_unchecked, max(self._num_unchecked - 1, 0)
        return self._show(self._until_stop(new) if is_checked else new)

    def flush(self) -> str:
        """Return the buffered text, at the end of the row."""
        if self.stopped:
            return ""
        text = self._tail + self._tokenizer.decode(self._ids)[self._num_returned :]
        self._ids, self._num_complete, self._num_returned, self._tail = [], 0, 0, ""
        self.num_shown += len(self._starts)
        self._starts.clear()
        return text

    def _show(self, text: str) -> str:
        """Return text, and count its tokens."""
        self._size_returned += len(text)
        while self._starts and self._starts[0] < self._size_returned:
            self._starts.popleft()
            self.num_shown += 1
        return text

    def add_all(self, tokens: Iterable[int]) -> tuple[str, int]:
        """Add several tokens. Return their text, and the number of tokens up to a stop string."""
        text, count = "", 0
        for token in tokens:
            if self.stopped:
                break
            text, count = text + self.add(token), count + 1
        return text, count

    def _until_stop(self, new: str) -> str:
        """Return the text up to a stop string, without an ending that may be the beginning of a stop string."""
        text = self._tail + new
        places = [(place, len(stop)) for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._tail = True, ""
            place, size = min(places)
            return text[: place + size * self._includes_stop]
        prefixes = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        length = max(prefixes, default=0)
        self._tail = text[len(text) - length :]
        return text[: len(text) - length]
