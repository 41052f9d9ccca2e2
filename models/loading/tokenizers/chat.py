"""Conversations as text: chat templates in a process with limits, and protection against injected control tokens."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.loading.tokenizers import template_worker

TIME_LIMIT_SECONDS = 10.0
"""Time limit for rendering one conversation. An ordinary template takes milliseconds."""

SKIP_TEMPLATE = "use --raw, or encode the prompt without the template"

INVALID_MESSAGES = (
    'messages must be dicts of strings, numbers, lists and dicts, such as {"role": "user", "content": "hi"}'
)

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]


def render(template: str, messages: Messages, names: Mapping[str, str]) -> str:
    """Render a conversation up to the start of the assistant's turn.

    Raises: UsageError if the template refuses the messages, fails, or takes too much time, memory or text.
    """
    try:
        request = json.dumps(
            {"template": template, "messages": list(messages), "names": dict(names), "seconds": TIME_LIMIT_SECONDS}
        )
    except (TypeError, ValueError, RecursionError):
        raise UsageError(INVALID_MESSAGES) from None
    answer = _process.ask(request.encode() + b"\n") or _process.ask(request.encode() + b"\n")
    if not answer:
        raise UsageError(
            "the process that renders the model's chat template was killed (out of memory?); free memory and try again"
        )
    if "late" in answer:
        raise UsageError(
            f"the model's chat template needs more than {TIME_LIMIT_SECONDS:g} s or "
            f"{template_worker.MEMORY_LIMIT >> 30} GiB; {SKIP_TEMPLATE}"
        )
    if "refused" in answer:
        raise UsageError(f"the model's chat template refuses these messages: {answer['refused']}")
    if "text" not in answer:
        why = f"is broken: {answer['broken']}" if "broken" in answer else f"fails ({answer.get('failed')})"
        raise UsageError(f"the model's chat template {why}; {SKIP_TEMPLATE}")
    return answer["text"]


def appears_in_template(template: str, piece: str) -> bool:
    """Return True if a template contains a token that is more than spaces or a letter, some of which are tokens too."""
    return len(piece.strip()) > 2 and piece in template


class _TemplateProcess:
    """The process that runs `template_worker.py`.

    It is started on first use, and restarted after a template that killed it.
    """

    def __init__(self):
        self._lock, self._owner = threading.Lock(), 0
        self._child: subprocess.Popen | None = None

    def ask(self, request: bytes) -> dict[str, str]:
        """Return the answer to a request.

        The answer is "late" if the process took too long or was killed by the template, and {} if it was killed from
        outside.
        """
        with self._lock:
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            late = threading.Event()

            def end():
                late.set()
                child.kill()

            timer = threading.Timer(TIME_LIMIT_SECONDS, end)
            timer.start()
            try:
                child.stdin.write(request)
                child.stdin.flush()
                line = child.stdout.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            except OSError:
                answer = None
            except BaseException:  # interrupted: the next request must not read this answer
                self.stop()
                raise
            finally:
                timer.cancel()
            if answer is None:
                self.stop()
                killed = not late.is_set() and child.returncode in (-signal.SIGKILL, -signal.SIGTERM)
                return {} if killed else {"late": ""}
            return answer

    def _running(self) -> subprocess.Popen:
        ours = self._owner == os.getpid()  # False for the child of a process that this one was forked from
        if self._child is not None and ours and self._child.poll() is None:
            return self._child
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._child, self._owner = (
            subprocess.Popen(
                [sys.executable, "-S", "-P", str(Path(template_worker.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True,  # only this process handles Ctrl-C
            ),
            os.getpid(),
        )  # fmt: skip
        assert self._child.stdout is not None
        try:
            greeting = self._child.stdout.readline()
        except BaseException:  # interrupted: its late greeting would be taken for the next answer
            self.stop()
            raise
        if not greeting:
            self.stop()
            raise UsageError("the model's chat template needs the package jinja2; run pip install jinja2")
        return self._child

    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            with contextlib.suppress(OSError):
                child.communicate()


_process = _TemplateProcess()
atexit.register(_process.stop)


def split_control_tokens(messages: Messages, find: Callable[..., Spans]) -> tuple[list, str | None]:
    """Split control tokens that are written out in the messages.

    Args:
      find: (text, by_model) -> the spans of a text that the tokenizer would read as control tokens.

    Returns: the messages with a mark character in each such token, and that character; the unchanged messages and None
    if there are none. A template sees the complete text, so that it can trim it or compare its first word.
    """
    try:
        text = json.dumps(messages, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        raise UsageError(INVALID_MESSAGES) from None
    mark = next(chr(code) for code in range(0x10FFFF, 0, -1) if chr(code) not in text)
    finders = [functools.partial(find, by_model=message.get("role") == "assistant") for message in messages]
    for message, finder in zip(messages, finders, strict=True):
        _check_names(message, finder)
    marked = [_mark_tokens(message, mark, finder) for message, finder in zip(messages, finders, strict=True)]
    return marked, mark if mark in json.dumps(marked, ensure_ascii=False, default=str) else None


def _check_names(value: Any, find: Callable[[str], Spans]) -> None:
    """Check that roles, types and keys contain no control tokens. Templates compare these instead of writing them.

    Raises: UsageError if they do.
    """
    if isinstance(value, Mapping):
        names = [*value, *(value[key] for key in ("role", "type") if key in value)]
        if any(isinstance(name, str) and find(name) for name in names):
            raise UsageError(
                "a role, type or key of the messages contains a control token, which only the template may write"
            )
    for child in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_names(child, find)


def _mark_tokens(x: Any, mark: str, find: Callable[[str], Spans]) -> Any:
    return _map_texts(x, lambda text: mark.join(_split_at_tokens(text, find)))


def _map_texts(x: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text except roles and types."""
    if isinstance(x, str):
        return change(x)
    if isinstance(x, Mapping):
        return {key: value if key in ("role", "type") else _map_texts(value, change) for key, value in x.items()}
    return [_map_texts(value, change) for value in x] if isinstance(x, list | tuple) else x


def _split_at_tokens(text: str, find: Callable[[str], Spans]) -> list[str]:
    """Split a text into pieces without control tokens, after the first character of each one."""
    cuts = []
    for start, stop in find(text):
        at = start + len(text[start:stop]) - len(text[start:stop].lstrip()) + 1
        if at >= stop:
            raise UsageError(
                f'the prompt has the control token "{text[start:stop]}", which the template alone may write; remove it'
            )
        cuts.append(at)
    if not cuts:
        return [text]
    return [part for a, b in itertools.pairwise((0, *cuts, len(text))) for part in _split_at_tokens(text[a:b], find)]


class MessageRegion(NamedTuple):
    """A region of a rendered conversation with text of a message. An empty region is a border of a message."""

    start: int
    stop: int
    by_model: bool


def split_conversation(
    text: str, mark: str | None, messages: list, render_messages: Callable[[list], str], find: Callable[..., Spans]
) -> list[str]:
    """Split a conversation into parts so that every control token within a part comes from the template.

    It is not enough that no message contains a control token, because a template joins texts and removes words from
    them. So the conversation is rendered again with brackets around every text, characters that occur nowhere else.
    They show the author of each part.

    Args:
      text: the rendered conversation.
      mark: character at which it is already split.
      messages: the messages that were rendered.
      render_messages: renders messages.
      find: as for `split_control_tokens`.

    Raises: UsageError if the brackets change the text, and then also its control tokens.
    """
    enclosed, brackets = _add_brackets(messages)
    bracketed = render_messages(enclosed)
    without_brackets, regions = _find_regions(bracketed, brackets)
    if without_brackets == text:
        parts = _split_foreign_tokens(text, regions, find)
        return [part for piece in parts for part in piece.split(mark)] if mark else parts
    tokens_of = lambda text: [text[start:stop].strip() for start, stop in find(text, by_model=False)]
    if tokens_of(text) != tokens_of(bracketed):
        raise UsageError(
            "the model's chat template builds control tokens from the text of these messages, which only it may "
            f"write; change the messages, {SKIP_TEMPLATE}"
        )
    return text.split(mark) if mark else [text]


def _add_brackets(messages: list) -> tuple[list, dict[str, tuple[str, bool]]]:
    """Put brackets around the texts of messages, inside of outer spaces.

    Templates that trim a text or compare its first word then still work. Returns: the messages, and for each bracket
    its counterpart and whether the model wrote the text.
    """
    text_of_all = json.dumps(messages, ensure_ascii=False, default=str)
    free = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in text_of_all)
    brackets: dict[str, tuple[str, bool]] = {}

    def change(text: str, by_model: bool) -> str:
        inner = text.strip()
        left, right = (next(free, ""), next(free, "")) if inner else ("", "")
        if inner and not right:
            raise UsageError("the conversation has too many texts; leave some messages out")
        brackets.update({left: (right, by_model), right: (left, by_model)} if inner else {})
        leading, _, trailing = text.partition(inner) if inner else (text, "", "")
        return f"{leading}{left}{inner}{right}{trailing}"

    by_model = [message.get("role") == "assistant" for message in messages]
    enclosed = [_map_texts(m, functools.partial(change, by_model=by)) for m, by in zip(messages, by_model, strict=True)]
    return enclosed, brackets


def _find_regions(text: str, brackets: Mapping[str, tuple[str, bool]]) -> tuple[str, list[MessageRegion]]:
    """Return the text without brackets, and the regions between them. A bracket without its counterpart is a border."""
    pieces, at, regions = [], 0, []
    starts: dict[str, int] = {}
    for piece in re.split(f"([{''.join(brackets)}])", text) if brackets else [text]:
        if piece not in brackets:
            pieces.append(piece)
            at += len(piece)
            continue
        other, by_model = brackets[piece]
        regions.append(MessageRegion(starts.pop(other, at), at, by_model))
        starts[piece] = at
    return "".join(pieces), regions


def _split_foreign_tokens(text: str, regions: list[MessageRegion], find: Callable[..., Spans]) -> list[str]:
    """Split the text after the first character of each control token that is not entirely the template's."""
    cuts, pending = [0, len(text)], [(0, len(text))]
    while pending:
        begin, end = pending.pop()
        piece = text[begin:end]
        model_tokens = set(find(piece, by_model=True))
        new_cuts = []
        for start, stop in find(piece, by_model=False):
            token = piece[start:stop]
            first = begin + start + len(token) - len(token.lstrip())
            last = first + len(token.strip())
            touched = [region for region in regions if region.start < last and first < region.stop]
            if touched and ((start, stop) in model_tokens or not all(region.by_model for region in touched)):
                new_cuts.append(first + 1)
        if new_cuts:
            cuts += new_cuts
            pending += itertools.pairwise((begin, *new_cuts, end))
    return [text[a:b] for a, b in itertools.pairwise(sorted(cuts))]
