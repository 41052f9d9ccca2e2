"""Chat templates: a conversation becomes text in a process with limits on time and memory."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.tokenizers.templates import worker

TIME_LIMIT_SECONDS = 10.0
"""Time limit for rendering one conversation. An ordinary template takes milliseconds."""

SKIP_TEMPLATE = "use --raw, or encode the prompt without the template"

INVALID_MESSAGES = (
    'messages must be dicts of strings, numbers, lists and dicts, such as {"role": "user", "content": "hi"}'
)
INVALID_VARIABLES = "variables of a chat template must be strings, numbers, true, false, None, lists or dicts of these"

Messages = Sequence[Mapping[str, Any]]


class Conversation(NamedTuple):
    """The input of a chat template."""

    messages: Messages
    variables: Mapping[str, Any] = {}


def render(template: str, conversation: Conversation, names: Mapping[str, str]) -> str:
    """Render a conversation, by default up to the start of the assistant's turn.

    Args:
      names: special tokens by name. A variable of the conversation takes precedence.

    Raises: UsageError if the template refuses the messages, fails, takes too much time, memory or text, or does not
      read one of the variables.
    """
    messages, variables = conversation
    request = {"template": template, "messages": messages, "names": dict(names), "variables": dict(variables)}
    try:
        line = json.dumps(request | {"seconds": TIME_LIMIT_SECONDS}).encode() + b"\n"
    except (TypeError, ValueError, RecursionError):
        raise UsageError(_invalid_part(messages)) from None
    answer = _process.ask(line) or _process.ask(line)
    if not answer:
        raise UsageError(
            "the process that renders the model's chat template was killed (out of memory?); free memory and try again"
        )
    if "late" in answer:
        raise UsageError(
            f"the model's chat template needs more than {TIME_LIMIT_SECONDS:g} s or "
            f"{worker.MEMORY_LIMIT >> 30} GiB; {SKIP_TEMPLATE}"
        )
    if "refused" in answer:
        raise UsageError(f"the model's chat template refuses these messages: {answer['refused']}")
    if "unread" in answer:
        raise UsageError(
            f"the model's chat template reads no variable {quote(answer['unread'])}, only "
            f"{answer['reads'] or 'the messages'}; leave it out"
        )
    if "text" not in answer:
        why = f"is broken: {answer['broken']}" if "broken" in answer else f"fails ({answer.get('failed')})"
        raise UsageError(f"the model's chat template {why}; {SKIP_TEMPLATE}")
    return answer["text"]


def _invalid_part(messages: Messages) -> str:
    """Return the sentence about the part of a conversation that JSON cannot represent."""
    try:
        json.dumps(messages)
    except (TypeError, ValueError, RecursionError):
        return INVALID_MESSAGES
    return INVALID_VARIABLES


class _TemplateProcess:
    """The process that runs `worker.py`.

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
                [sys.executable, "-S", "-P", str(Path(worker.__file__))],
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
