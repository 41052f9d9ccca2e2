"""Console output with escaped control characters.

A model's text, a tensor's name or a template's message may contain sequences that set a terminal's title or hide a
line. All output goes through `Console`, `print_json` or `print_error`, also to pipes, which often end at a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import rich.console
from rich.segment import Segment
from rich.text import Text

from specjax.errors import CheckpointWarning, UsageError
from specjax.files.untrusted import SENTENCE, shorten

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tabs and line ends, C1, marks that turn the direction of writing, and halves of surrogate pairs."""


def visible(text: str) -> str:
    r"""Return the text with control characters escaped, such as \x1b or \u202e."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class Console(rich.console.Console):
    """A console that prints strings without rich's markup, colours and emoji, and with escaped control characters."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        super().__init__(stderr=stderr, quiet=quiet, markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # rich removes some of them

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def print_json(document: Any) -> None:
    """Print a document in one line. Control characters become escapes, which JSON readers undo."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    print(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def print_error(message: str) -> None:
    """Print one line to stderr after the program's name. Long messages are shortened."""
    with contextlib.suppress(OSError):  # the disk is full
        print(f"specjax: {visible(shorten(' '.join(message.split()), 2 * SENTENCE))}", file=sys.stderr)


@contextlib.contextmanager
def drop_library_messages() -> Iterator[None]:
    """Drop the messages that libraries write to stderr before a UsageError; otherwise print them afterwards.

    Libraries in Rust print a panic and its position before Python can catch the error.
    """
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.dup(2)
            messages = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(messages.fileno(), 2)
        except OSError:  # there is no stderr, or no room for such a file
            yield
            return
        drop = False
        try:
            yield
        except UsageError:
            drop = True
            raise
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)
            messages.seek(0)
            if not drop:
                os.write(2, messages.read())


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Print a warning about a checkpoint as a note, without the line of the library that gives it."""
    if issubclass(category, CheckpointWarning):
        print_error(f"note: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def show_traceback(kind, error, trace) -> None:
    """Print an unexpected exception as Python does.

    TensorStore's callbacks after a failed write are left out, since the error was reported already.
    """
    if trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe":
        return
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
