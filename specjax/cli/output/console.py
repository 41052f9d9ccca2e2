"""Where words leave the command line: control characters are escaped here, for names and texts are other people's.

A model's text, a tensor's name or a template's message may hold the sequences that set a terminal's title or hide a
line. Everything printed goes through `Console`, `print_json` or `complain`, to a terminal or not, since a pipe often
ends at one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from specjax.errors import UsageError
from specjax.files.untrusted import SENTENCE, shorten

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but for tabs and ends of lines, C1, what turns the direction of writing, and halves of characters."""


def visible(text: str) -> str:
    r"""The text with control characters escaped, such as \x1b or \u202e."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Console(rich.console.Console):
    """Strings are shown as they are, without markup, colours or emoji of rich's own, and all text is `visible`."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        super().__init__(stderr=stderr, quiet=quiet, markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # which would leave some of them out

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def print_json(document: Any) -> None:
    """One line on stdout. What a terminal could take for a command is written as an escape, which JSON reads back."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    print(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def complain(sentence: str) -> None:
    """One line on stderr, under the program's name. What was given can be of any length, and is quoted."""
    with contextlib.suppress(OSError):  # that of a disk which is full
        print(f"specjax: {visible(shorten(' '.join(sentence.split()), 2 * SENTENCE))}", file=sys.stderr)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """What libraries say on stderr by themselves is dropped where a UsageError says it; else it is shown afterwards.

    Those written in Rust print a panic and where it was before Python hears of it.
    """
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            ours = os.dup(2)
            said = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(said.fileno(), 2)
        except OSError:  # there is no stderr, or no room for such a file
            yield
            return
        dropped = False
        try:
            yield
        except UsageError:
            dropped = True
            raise
        finally:
            os.dup2(ours, 2)
            os.close(ours)
            said.seek(0)
            if not dropped:
                os.write(2, said.read())


def show_traceback(kind, error, trace) -> None:
    """As Python shows an exception that nobody expected.

    But not those with which TensorStore calls back after a write has failed, which was told already: nobody waits.
    """
    if trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe":
        return
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
