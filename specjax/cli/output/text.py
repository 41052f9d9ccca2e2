"""Text while it arrives, each piece with who wrote it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specjax.cli.output.console import visible
from specjax.engine.results import StreamStep
from specjax.serving.detokenizer import Detokenizer

DRAFTED_STYLE = "bold green"


class TextStream:
    """The text of one row, up to a stop string. Bytes that are not a whole character yet are held back."""

    def __init__(self, tokenizer, eos: Sequence[int], stop: Sequence[str] = ()):
        self._whole, self._eos = Detokenizer(tokenizer, stop), frozenset(eos)
        self.taken = 0  # tokens, without those after a stop string
        self.is_over = False  # by an eos or a stop string
        self.text = Text()  # to be shown
        self.plain = ""  # as the tokenizer gives it

    def push(self, token: int, drafted: bool) -> Text:
        """Add a token; returns the text that became whole, in the style of the token that completed it."""
        if self.is_over:
            return Text()
        self.taken += 1
        if token in self._eos:
            self.is_over = True
            return self.flush()
        new = self._add(self._whole.add(token), drafted)
        self.is_over = self._whole.stopped
        return new

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._whole.stopped

    def flush(self) -> Text:
        """What is still held back: the text ends here."""
        return self._add(self._whole.flush(), False)

    def push_step(self, step: StreamStep, row: int) -> Text:
        """Add what a step gave a row."""
        drafted = int(step.accepted[row])
        return Text().join([self.push(token, i < drafted) for i, token in enumerate(step.tokens[row])])

    def _add(self, whole: str, drafted: bool) -> Text:
        self.plain += whole
        new = Text(visible(whole), style=DRAFTED_STYLE if drafted else "")
        self.text.append_text(new)
        return new
