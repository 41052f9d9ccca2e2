"""Conversations as text: templates rendered in a process with limits, and what users write kept from posing as more."""

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

SECONDS = 10.0
"""What a template may take for one conversation; an ordinary one takes milliseconds."""

WITHOUT = "use --raw, or encode the prompt without the template"

NOT_PLAIN = 'messages must be dicts of strings, numbers, lists and dicts, such as {"role": "user", "content": "hi"}'

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]


def render(template: str, messages: Messages, names: Mapping[str, str]) -> str:
    """The text of a conversation up to where the assistant speaks.

    Raises: UsageError if the template refuses the messages, fails, or takes too much time, memory or text.
    """
    try:
        request = json.dumps(
            {"template": template, "messages": list(messages), "names": dict(names), "seconds": SECONDS}
        )
    except (TypeError, ValueError, RecursionError):
        raise UsageError(NOT_PLAIN) from None
    answer = _process.ask(request.encode() + b"\n") or _process.ask(request.encode() + b"\n")
    if not answer:
        raise UsageError(
            "somebody ends the process that renders the model's chat template, or the machine lacks memory"
        )
    if "late" in answer:
        raise UsageError(
            f"the model's chat template takes more than {SECONDS:g} s or {template_worker.MEMORY >> 30} GiB; {WITHOUT}"
        )
    if "refused" in answer:
        raise UsageError(f"the model's chat template refuses these messages: {answer['refused']}")
    if "text" not in answer:
        why = f"is broken: {answer['broken']}" if "broken" in answer else f"fails ({answer.get('failed')})"
        raise UsageError(f"the model's chat template {why}; {WITHOUT}")
    return answer["text"]


def appears_in_template(template: str, piece: str) -> bool:
    """Whether a template writes a token: one that is more than spaces or a letter, of which some are tokens too."""
    return len(piece.strip()) > 2 and piece in template


class _Process:
    """Runs `rendering.py`: started when it is first needed, and anew after a template that it did not survive."""

    def __init__(self):
        self._lock, self._owner = threading.Lock(), 0
        self._child: subprocess.Popen | None = None

    def ask(self, request: bytes) -> dict[str, str]:
        """The answer; "late": there was none in time, or the process died of the template; {}: somebody killed it."""
        with self._lock:
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            late = threading.Event()

            def end():
                late.set()
                child.kill()

            timer = threading.Timer(SECONDS, end)
            timer.start()
            try:
                child.stdin.write(request)
                child.stdin.flush()
                line = child.stdout.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            except OSError:
                answer = None
            except BaseException:  # an interrupt: the next request must not read this one's answer
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
        ours = self._owner == os.getpid()  # not that of a process which forked this one
        if self._child is not None and ours and self._child.poll() is None:
            return self._child
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._child, self._owner = (
            subprocess.Popen(
                [sys.executable, "-S", "-P", str(Path(template_worker.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True,  # Ctrl-C is for us
            ),
            os.getpid(),
        )  # fmt: skip
        assert self._child.stdout is not None
        try:
            greeting = self._child.stdout.readline()
        except BaseException:  # an interrupt: what it says later would be taken for the next answer
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


_process = _Process()
atexit.register(_process.stop)


def split_control_tokens(messages: Messages, find: Callable[..., Spans]) -> tuple[list, str | None]:
    """Control tokens that are written out in the messages, cut in two.

    Args:
      find: (text, by_model) -> the spans of a text that the tokenizer would read as control tokens.

    Returns: the messages with a character in each cut, and that character; the messages as they are and None where
      there is nothing to cut. A template sees all of the text, and can trim it or look at its first word.
    """
    try:
        text = json.dumps(messages, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        raise UsageError(NOT_PLAIN) from None
    mark = next(chr(code) for code in range(0x10FFFF, 0, -1) if chr(code) not in text)
    finders = [functools.partial(find, by_model=message.get("role") == "assistant") for message in messages]
    for message, finder in zip(messages, finders, strict=True):
        _check_names(message, finder)
    marked = [_marked(message, mark, finder) for message, finder in zip(messages, finders, strict=True)]
    return marked, mark if mark in json.dumps(marked, ensure_ascii=False, default=str) else None


def _check_names(x: Any, find: Callable[[str], Spans]) -> None:
    """Raises: UsageError for a control token in a role, a type or a key, which templates compare and do not read."""
    if isinstance(x, Mapping):
        names = [*x, *(x[key] for key in ("role", "type") if key in x)]
        if any(isinstance(name, str) and find(name) for name in names):
            raise UsageError(
                "a role, type or key of the messages holds a control token, which only a template may write"
            )
    for value in x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ():
        _check_names(value, find)


def _marked(x: Any, mark: str, find: Callable[[str], Spans]) -> Any:
    return _changed(x, lambda text: mark.join(_parts(text, find)))


def _changed(x: Any, change: Callable[[str], str]) -> Any:
    """With every text changed but for roles and types."""
    if isinstance(x, str):
        return change(x)
    if isinstance(x, Mapping):
        return {key: value if key in ("role", "type") else _changed(value, change) for key, value in x.items()}
    return [_changed(value, change) for value in x] if isinstance(x, list | tuple) else x


def _parts(text: str, find: Callable[[str], Spans]) -> list[str]:
    """The text in pieces that hold no control token each: cut behind the first character of every one."""
    cuts = []
    for start, stop in find(text):
        at = start + len(text[start:stop]) - len(text[start:stop].lstrip()) + 1
        if at >= stop:
            raise UsageError(f'the prompt has the control token "{text[start:stop]}", which is no text; take it out')
        cuts.append(at)
    if not cuts:
        return [text]
    return [part for a, b in itertools.pairwise((0, *cuts, len(text))) for part in _parts(text[a:b], find)]


class MessageRegion(NamedTuple):
    """Where a rendered conversation has what somebody wrote; of none of its characters: where it begins or ends."""

    start: int
    stop: int
    by_model: bool


def split_conversation(
    text: str, mark: str | None, messages: list, draw: Callable[[list], str], find: Callable[..., Spans]
) -> list[str]:
    """A conversation in parts within which all control tokens are the template's own.

    That no message holds one is not enough: a template joins texts, and takes words out of them. So it is rendered
    again with every text between brackets, characters that are nowhere else, which show what was written by whom.

    Args:
      text: as rendered. mark: where it is cut already. messages: as they were for `text`. draw: renders messages.
      find: as of `split_control_tokens`.

    Raises: UsageError if the brackets change the text, and there are other control tokens in it then.
    """
    enclosed, brackets = _enclosed(messages)
    again = draw(enclosed)
    plain, regions = _regions(again, brackets)
    if plain == text:
        parts = _apart(text, regions, find)
        return [part for piece in parts for part in piece.split(mark)] if mark else parts
    tokens = lambda text: [text[start:stop].strip() for start, stop in find(text, by_model=False)]
    if tokens(text) != tokens(again):
        raise UsageError(
            "the model's chat template makes control tokens out of what these messages say, which only a template may "
            f"write; change the messages, {WITHOUT}"
        )
    return text.split(mark) if mark else [text]


def _enclosed(messages: list) -> tuple[list, dict[str, tuple[str, bool]]]:
    """Messages with brackets around their texts, spaces left outside; by bracket its other one and if the model wrote.

    What trims a text, or looks at its first word, finds it as it was but for these.
    """
    said = json.dumps(messages, ensure_ascii=False, default=str)
    free = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in said)
    brackets: dict[str, tuple[str, bool]] = {}

    def change(text: str, by_model: bool) -> str:
        inner = text.strip()
        left, right = (next(free, ""), next(free, "")) if inner else ("", "")
        if inner and not right:
            raise UsageError("the messages have more texts than a conversation can; leave some out")
        brackets.update({left: (right, by_model), right: (left, by_model)} if inner else {})
        before, _, behind = text.partition(inner) if inner else (text, "", "")
        return f"{before}{left}{inner}{right}{behind}"

    by_model = [message.get("role") == "assistant" for message in messages]
    enclosed = [_changed(m, functools.partial(change, by_model=by)) for m, by in zip(messages, by_model, strict=True)]
    return enclosed, brackets


def _regions(text: str, brackets: Mapping[str, tuple[str, bool]]) -> tuple[str, list[MessageRegion]]:
    """The text without brackets, and what lay between them; a bracket whose other one is gone is a border."""
    pieces, at, regions = [], 0, []
    opened: dict[str, int] = {}
    for piece in re.split(f"([{''.join(brackets)}])", text) if brackets else [text]:
        if piece not in brackets:
            pieces.append(piece)
            at += len(piece)
            continue
        other, by_model = brackets[piece]
        regions.append(MessageRegion(opened.pop(other, at), at, by_model))
        opened[piece] = at
    return "".join(pieces), regions


def _apart(text: str, regions: list[MessageRegion], find: Callable[..., Spans]) -> list[str]:
    """The text cut behind the first character of each control token that is not the template's alone."""
    cuts, todo = [0, len(text)], [(0, len(text))]
    while todo:
        begin, end = todo.pop()
        piece = text[begin:end]
        strict = set(find(piece, by_model=True))
        found = []
        for start, stop in find(piece, by_model=False):
            token = piece[start:stop]
            first = begin + start + len(token) - len(token.lstrip())
            last = first + len(token.strip())
            touched = [region for region in regions if region.start < last and first < region.stop]
            if touched and ((start, stop) in strict or not all(region.by_model for region in touched)):
                found.append(first + 1)
        if found:
            cuts += found
            todo += itertools.pairwise((begin, *found, end))
    return [text[a:b] for a, b in itertools.pairwise(sorted(cuts))]
