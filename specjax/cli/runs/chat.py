"""The run of `specjax chat`: a batch of one row, in which each answer replaces the one before."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from prompt_toolkit import PromptSession

import specjax
from specjax.cli.options.prompts import system_turn
from specjax.cli.output.text import TextStream
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.run import PromptRun, Report
from specjax.cli.runs.session import Session
from specjax.persistence.program_cache import ProgramCache
from specjax.serving.requests import Request
from specjax.types import Drafter

COMMANDS = {
    "/stats": "show tokens per pass and per second",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/undo": "forget the last turn",
    "/clear": "forget all turns",
    "/help": "show this list",
    "/exit": "end the chat, like Ctrl-D",
}
COMMAND_LIST = ", ".join(COMMANDS)


class Chat(PromptRun):
    """The turns of a chat, and the totals over its answers."""

    def __init__(
        self, session: Session, decoding: Decoding, drafter: Drafter, method: str, *, context: int,
        system: str | None = None, programs: ProgramCache | None = None,
    ):  # fmt: skip
        """Create the chat. context: maximum tokens of all turns."""
        super().__init__(session, decoding, rows=())
        self.drafter, self.settings, self.method = drafter, session.settings(decoding, method), method
        self.context, self.system, self.programs = context, system, programs
        self.turns: list[dict[str, str]] = []  # messages of the chat template
        self.num_tokens = self.num_passes = self.num_requests = 0
        self.seconds = 0.0

    def run(self, report: Report) -> None:
        """Answer each line until the input ends."""
        self._report = report
        tokenizer, out = self.session.tokenizer, report.out
        report.log.print(f"Commands: {COMMAND_LIST}.", style="dim")
        text, start = TextStream(tokenizer, tokenizer.eos), 0.0
        for news in specjax.serve(
            self.session.target, self.drafter, self.requests(), slots=1, longest_prompt=self.context,
            max_new_tokens=self.decoding.max_new_tokens, programs=self.programs, **vars(self.settings),
        ):  # fmt: skip
            if text.num_tokens == 0:
                start = time.perf_counter()
            if news.error is not None:
                report.log.print(news.error, style="red", soft_wrap=True)
                self.turns.pop()
                continue
            self.num_tokens, self.num_passes = self.num_tokens + len(news.tokens), self.num_passes + 1
            for index, token in enumerate(news.tokens):
                out.print(text.push(token, index < news.accepted), end="", soft_wrap=True)
            sys.stdout.flush()
            if news.finish_reason is not None:
                out.print(text.flush(), soft_wrap=True)
                self.seconds += time.perf_counter() - start
                if news.finish_reason == "length":
                    report.log.print("(cut at --max-new-tokens)", style="dim")
                self.turns.append({"role": "assistant", "content": text.plain})
                text = TextStream(tokenizer, tokenizer.eos)

    def report(self, report: Report) -> None:
        """Skip the report: the answers are on the screen, and /stats prints the totals."""

    def record(self) -> dict[str, Any]:
        """Return the totals over all answers."""
        return {
            "method": self.method, "tokens": self.num_tokens, "target_passes": self.num_passes, "seconds": self.seconds
        }  # fmt: skip

    def requests(self) -> Iterator[Request]:
        """Yield a request per line that is not a command."""
        for line in read_lines():
            if line.startswith("/"):
                if not self.run_command(line):
                    return
                continue
            if not line.strip():
                continue
            self.turns.append({"role": "user", "content": line})
            key = jax.random.fold_in(jax.random.key(self.decoding.seed), self.num_requests)
            self.num_requests += 1
            yield Request(self.prompt(), key)

    def prompt(self) -> list[int]:
        """Return the ids of the turns that fit; the oldest turns are forgotten."""
        while True:
            ids = self.session.tokenizer.chat([*system_turn(self.system), *self.turns])
            if len(ids) <= self.context or len(self.turns) == 1:
                return ids
            del self.turns[:2]
            self._note("the oldest turn is forgotten: it no longer fits")

    def run_command(self, line: str) -> bool:
        """Run a line that begins with /. Return False if it ends the chat."""
        word, _, argument = line.strip().partition(" ")
        log = self._report.log
        if word in ("/exit", "/quit"):
            return False
        if word == "/stats":
            log.print(self.stats())
        elif word == "/system":
            self.system = argument or None
            self._note("the system prompt is set" if argument else "no system prompt")
        elif word == "/undo":
            self._note("the last turn is forgotten" if self.turns else "no turn to forget")
            del self.turns[-2:]
        elif word == "/clear":
            self.turns.clear()
            self._note("all turns are forgotten")
        elif word == "/help":
            for command, meaning in COMMANDS.items():
                log.print(f"{command:14}{meaning}")
        else:
            log.print(f"unknown command {word}; the commands are {COMMAND_LIST}")
        return True

    def _note(self, text: str) -> None:
        self._report.log.print(f"({text})", style="dim")

    def stats(self) -> str:
        """Return the totals over all answers in words."""
        if not self.num_passes:
            return "no answers yet"
        return (
            f"{self.num_tokens} tokens, {self.num_tokens / self.num_passes:.2f} per target pass, "
            f"{self.num_tokens / max(self.seconds, 1e-9):.1f} per second"
        )


def read_lines() -> Iterator[str]:
    """Yield the lines of stdin; on a terminal, with the keys of a shell."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    prompt: PromptSession[str] = PromptSession()
    while True:
        try:
            yield prompt.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
