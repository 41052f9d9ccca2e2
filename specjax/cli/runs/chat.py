"""The run of `specjax chat`: a batch of one row, in which each answer replaces the one before."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from prompt_toolkit import PromptSession

import specjax
from specjax.cli.options.prompts import system_turn
from specjax.cli.output.text import TextStream
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.run import PromptRun, Report
from specjax.cli.runs.session import Session
from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.models import images, load_image_processor
from specjax.models.loading import resolve
from specjax.models.vision.processor import ImageProcessor, Tiles, open_picture, picture_turn
from specjax.persistence.program_cache import ProgramCache
from specjax.serving.requests import Request
from specjax.types import Drafter

COMMANDS = {
    "/stats": "show tokens per pass and per second",
    "/image FILE": "add an image to the next message; without FILE, remove those added",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/undo": "forget the last turn",
    "/clear": "forget all turns and images",
    "/help": "show this list",
    "/exit": "end the chat, like Ctrl-D",
}
COMMAND_LIST = ", ".join(COMMANDS)


class ChatTurn(NamedTuple):
    """A message of a chat, and the images of PIL before its text."""

    role: str
    text: str
    pictures: tuple[Any, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """Return the message for a chat template."""
        if self.pictures:
            return picture_turn(self.text, len(self.pictures))
        return {"role": self.role, "content": self.text}


class Chat(PromptRun):
    """The turns of a chat, and the totals over its answers."""

    def __init__(
        self, session: Session, decoding: Decoding, drafter: Drafter, method: str, *, context: int,
        system: str | None = None, programs: ProgramCache | None = None, source: str | None = None,
    ):  # fmt: skip
        """Create the chat.

        Args:
          context: maximum tokens of all turns.
          source: that of the target, whose folder has the image processor.
        """
        super().__init__(session, decoding, rows=())
        self.drafter, self.settings, self.method = drafter, session.settings(decoding, method), method
        self.context, self.system, self.programs = context, system, programs
        self.source = source
        self.turns: list[ChatTurn] = []
        self.pictures: list[Any] = []  # of the next message
        self.num_tokens = self.num_passes = self.num_requests = 0
        self.seconds = 0.0

    def run(self, report: Report) -> None:
        """Answer each line until the input ends."""
        self._report = report
        report.log.print(f"Commands: {COMMAND_LIST}.", style="dim")
        for form, requests in itertools.groupby(self.requests(), key=input_form):
            self.answer(requests, blank_inputs(form), report)

    def answer(self, requests: Iterable[Request], inputs: Any, report: Report) -> None:
        """Answer requests whose inputs have the shapes of `inputs`. Other shapes need other programs."""
        tokenizer, out = self.session.tokenizer, report.out
        text, start = TextStream(tokenizer, tokenizer.eos), 0.0
        for news in specjax.serve(
            self.session.target, self.drafter, requests, slots=1, longest_prompt=self.context, inputs=inputs,
            max_new_tokens=self.decoding.max_new_tokens, programs=self.programs, **vars(self.settings),
        ):  # fmt: skip
            if text.num_tokens == 0:
                start = time.perf_counter()
            if news.error is not None:
                self.withdraw(news.error)
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
                self.turns.append(ChatTurn("assistant", text.plain))
                text = TextStream(tokenizer, tokenizer.eos)

    def withdraw(self, error: str) -> None:
        """Print an error and remove the newest message. Its images wait for the next one."""
        self._print_error(error)
        returned = self.turns.pop().pictures
        self.pictures = [*returned, *self.pictures]
        if returned:
            self._note_pictures()
            self._note("/image without a file removes them")

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
            self.turns.append(ChatTurn("user", line, tuple(self.pictures)))
            self.pictures = []
            try:
                ids, tiles = self.prompt()
                inputs = self._inputs(ids, tiles)
            except UsageError as error:
                self.withdraw(str(error))
                continue
            key = jax.random.fold_in(jax.random.key(self.decoding.seed), self.num_requests)
            self.num_requests += 1
            yield Request(ids, key, inputs=inputs)

    def prompt(self) -> tuple[list[int], Tiles | None]:
        """Return the ids and tiles of the turns that fit; the oldest turns are forgotten."""
        while True:
            messages = [*system_turn(self.system), *(turn.message for turn in self.turns)]
            pictures = [picture for turn in self.turns for picture in turn.pictures]
            if pictures:
                ids, tiles = self.processor.chat(messages, pictures)
            else:
                ids, tiles = self.session.tokenizer.chat(messages), None
            if len(ids) <= self.context or len(self.turns) == 1:
                return ids, tiles
            del self.turns[:2]
            self._note("the oldest turn is forgotten: it no longer fits")

    def _inputs(self, ids: list[int], tiles: Tiles | None) -> Any:
        """Return the inputs of a request; None without images, or if the prompt does not fit and is refused."""
        if tiles is None or len(ids) > self.context:
            return None
        return jax.tree.map(lambda x: np.asarray(x)[0], images(self.session.target, [ids], [tiles]))

    @functools.cached_property
    def processor(self) -> ImageProcessor:
        """The image processor of the target. Raises: UsageError if there is none."""
        return load_image_processor(resolve(self.source), self.session.target, self.session.tokenizer)

    def add_picture(self, file: Path) -> None:
        """Add an image to the next message. Raises: UsageError for a bad file, or a model without images."""
        _ = self.processor
        self.pictures.append(open_picture(file))

    def run_command(self, line: str) -> bool:
        """Run a line that begins with /. Return False if it ends the chat."""
        word, _, argument = line.strip().partition(" ")
        log = self._report.log
        if word in ("/exit", "/quit"):
            return False
        if word == "/stats":
            log.print(self.stats())
        elif word == "/image":
            self._run_image(argument.strip().strip("\"'"))
        elif word == "/system":
            self.system = argument or None
            self._note("the system prompt is set" if argument else "no system prompt")
        elif word == "/undo":
            self._note("the last turn is forgotten" if self.turns else "no turn to forget")
            del self.turns[-2:]
        elif word == "/clear":
            self.turns.clear()
            self.pictures.clear()
            self._note("all turns are forgotten")
        elif word == "/help":
            for command, meaning in COMMANDS.items():
                log.print(f"{command:14}{meaning}")
        else:
            log.print(f"unknown command {word}; the commands are {COMMAND_LIST}")
        return True

    def _run_image(self, name: str) -> None:
        """Add an image to the next message, or remove all of it."""
        if not name:
            self._note("the next message has no images")
            self.pictures.clear()
            return
        try:
            self.add_picture(picture_path(name))
        except UsageError as error:
            self._print_error(str(error))
            return
        self._note_pictures()

    def _note_pictures(self) -> None:
        count = len(self.pictures)
        self._note(f"the next message has {count} {'image' if count == 1 else 'images'}")

    def _note(self, text: str) -> None:
        self._report.log.print(f"({text})", style="dim")

    def _print_error(self, error: str) -> None:
        self._report.log.print(error, style="red", soft_wrap=True)

    def stats(self) -> str:
        """Return the totals over all answers in words."""
        if not self.num_passes:
            return "no answers yet"
        return (
            f"{self.num_tokens} tokens, {self.num_tokens / self.num_passes:.2f} per target pass, "
            f"{self.num_tokens / max(self.seconds, 1e-9):.1f} per second"
        )


def picture_path(name: str) -> Path:
    """Return the path of a file whose name a person wrote, or dropped on a terminal, which can escape its spaces."""
    path = in_home(name)
    return path if path.exists() else Path(str(path).replace("\\ ", " "))


def input_form(request: Request) -> Hashable:
    """Return the structure, shapes and dtypes of the inputs of a request."""
    leaves, structure = jax.tree.flatten(request.inputs)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def blank_inputs(form: Any) -> Any:
    """Return zeros of this `input_form`."""
    structure, shapes = form
    return jax.tree.unflatten(structure, [np.zeros(*shape) for shape in shapes])


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
