"""Ids to text while they arrive, each piece with who wrote it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specjax.cli.console import visible
from specjax.engine.results import StreamStep

DRAFTED_STYLE = "bold green"
UNFINISHED = "\ufffd"


class TextStream:
    """The text of one row. Bytes that are not a whole character yet are held back."""

    def __init__(self, tokenizer, eos: Sequence[int]):
        self._tokenizer, self._eos = tokenizer, frozenset(eos)
        self._ids: list[int] = []
        self._shown = ""
        self.text = Text()

    @property
    def plain(self) -> str:
        """As the tokenizer gives it; `text` is to be shown."""
        return self._shown

    def push(self, token: int, drafted: bool) -> Text:
        """Add a token; returns the text that became whole, in the style of the token that completed it."""
        if token in self._eos:
            return self.flush()
        self._ids.append(token)
        return self._add(self._tokenizer.decode(self._ids).rstrip(UNFINISHED), drafted)

    def flush(self) -> Text:
        """What is still held back: the text ends here."""
        return self._add(self._tokenizer.decode(self._ids), False)

    def push_step(self, step: StreamStep, row: int) -> Text:
        """Add what a step gave a row."""
        drafted = int(step.accepted[row])
        return Text().join([self.push(token, i < drafted) for i, token in enumerate(step.tokens[row])])

    def _add(self, whole: str, drafted: bool) -> Text:
        new = Text(visible(whole[len(self._shown) :]), style=DRAFTED_STYLE if drafted else "")
        self._shown = whole
        self.text.append_text(new)
        return new
