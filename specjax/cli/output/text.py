"""Text of a stream of tokens, with the style of its author."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from specjax.cli.output.console import visible
from specjax.engine.results import StreamStep
from specjax.serving.detokenizer import Detokenizer

DRAFTED_STYLE = "bold green"


class TextStream:
    """The text of one row, up to a stop string. Bytes of an incomplete character wait for the next tokens."""

    def __init__(self, tokenizer: Any, eos: Sequence[int], stop: Sequence[str] = ()):
        self._detokenizer, self._eos = Detokenizer(tokenizer, stop), frozenset(eos)
        self.num_tokens = 0  # without those after a stop string
        self.has_ended = False  # True: an eos or a stop string ended the text
        self.text = Text()  # the text for the console
        self.plain = ""  # the text as the tokenizer decodes it

    def push(self, token: int, drafted: bool) -> Text:
        """Add a token; return the text that it completed, in the token's style."""
        if self.has_ended:
            return Text()
        self.num_tokens += 1
        if token in self._eos:
            self.has_ended = True
            return self.flush()
        new = self._add(self._detokenizer.add(token), drafted)
        self.has_ended = self._detokenizer.stopped
        return new

    @property
    def is_stopped(self) -> bool:
        """Return True if a stop string ended the text."""
        return self._detokenizer.stopped

    def flush(self) -> Text:
        """Return the waiting bytes at the end of the text."""
        return self._add(self._detokenizer.flush(), False)

    def push_step(self, step: StreamStep, row: int) -> Text:
        """Add the tokens of one row of a step."""
        drafted = int(step.accepted[row])
        return Text().join([self.push(token, i < drafted) for i, token in enumerate(step.tokens[row])])

    def _add(self, piece: str, drafted: bool) -> Text:
        self.plain += piece
        new = Text(visible(piece), style=DRAFTED_STYLE if drafted else "")
        self.text.append_text(new)
        return new
