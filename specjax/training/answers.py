"""What the target itself answers: the texts that a drafter of it is trained on, kept in files that any run may use."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.requests import Request
from specjax.errors import UsageError
from specjax.facade import serve
from specjax.training.lessons import Text
from specjax.types import Drafter, Target

ABOUT, SHARD = "answers.json", 1024  # answers of a file


class Answer(NamedTuple):
    """One text, and how it came."""

    prompt: int  # which of the prompts
    text: Text
    finish_reason: str


def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    eos: Sequence[int],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    drafter: Drafter | None = None,
    slots: int = 16,
    seed: int = 0,
) -> Iterator[Answer]:
    """Answers as they are done, `slots` texts at a time. The i-th prompt's depends on `seed` and i alone."""
    longest = max(map(len, prompts), default=1)
    told: dict[int, list[int]] = {}
    requests = (Request(list(prompt), key=_seed(seed, i)) for i, prompt in enumerate(prompts))
    steps = serve(
        target, drafter, requests, slots=min(slots, max(len(prompts), 1)), longest_prompt=longest,
        max_new_tokens=max_new_tokens, temperature=temperature, eos=list(eos),
    )  # fmt: skip
    for step in steps:
        if step.error is not None:
            raise UsageError(f"prompt {step.request + 1} of {len(prompts)}: {step.error}")
        told.setdefault(step.request, []).extend(step.tokens)
        if step.finish_reason is not None:
            prompt, text = prompts[step.request], told.pop(step.request)
            yield Answer(step.request, Text((*map(int, prompt), *text), len(prompt)), step.finish_reason)


def _seed(seed: int, i: int) -> int:
    return int(np.random.default_rng([seed, i]).integers(2**31))


class Answers:
    """Answers in a folder: `answers.json` says whose they are, `answers-00000.jsonl` and so on hold 1,024 each.

    What is written is there at once, line by line, so that a run that was ended goes on where it was; a last line that
    was cut off is not read.
    """

    def __init__(self, folder: str | Path, about: dict[str, Any]):
        """about: whose answers they are, at which temperature and so on.

        Raises: UsageError for a folder that cannot be written, or that holds answers of another kind.
        """
        self.folder = Path(folder)
        self.known: dict[str, Text] = {}
        self._lines = 0
        self._cut = ""  # what ends a last line that was cut off
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = self.folder / ABOUT
            if known.exists():
                found = json.loads(known.read_text(encoding="utf-8"))
                others = [name for name, value in about.items() if found.get(name) != value]
                if others:
                    raise UsageError(
                        f"{folder} holds answers with {others[0]} {found.get(others[0])!r}, not {about[others[0]]!r}; "
                        "give another folder"
                    )
            else:
                known.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            self._read()
        except (OSError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{folder} cannot hold answers ({error}); give another folder") from error

    def _read(self) -> None:
        for path in sorted(self.folder.glob("answers-*.jsonl")):
            lines = path.read_text(encoding="utf-8").split("\n")
            self._cut = "\n" if lines[-1] else ""
            for line in lines:
                self._lines += bool(line)
                try:
                    entry = json.loads(line)
                    prompt, told = entry["prompt"], entry["answer"]
                except (ValueError, KeyError, TypeError):
                    continue
                self.known[name_of(prompt)] = Text((*prompt, *told), len(prompt))

    def of(self, prompt: Sequence[int]) -> Text | None:
        """The answer to a prompt, if it is there."""
        return self.known.get(name_of(prompt))

    def add(self, answer: Answer) -> None:
        """Write one more."""
        tokens, count = answer.text
        entry = {"prompt": tokens[:count], "answer": tokens[count:], "finish": answer.finish_reason}
        path = self.folder / f"answers-{self._lines // SHARD:05d}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self._cut + json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); make room, and run it again") from error
        self._lines += 1
        self._cut = ""
        self.known[name_of(tokens[:count])] = answer.text


def name_of(prompt: Sequence[int]) -> str:
    """Of a prompt by its tokens."""
    return hashlib.sha256(np.asarray(prompt, np.int64).tobytes()).hexdigest()[:24]


def opening(tokenizer: Any) -> list[int]:
    """What a chat has before the user's first words: continued by the target, it writes a user's turn itself.

    Raises: UsageError for a tokenizer without a chat template, or one in which a turn stands at no fixed place.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError("the target has no chat template, so it cannot write prompts of its own; give --prompts FILE")
    some = [tokenizer.chat(words) for words in ("A b", "Zebras, 1 2 3", "But why?")]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*some, strict=False))
    begin = [ids[0] for ids in same]
    if not begin:
        raise UsageError("the target's chats have no beginning in common; give --prompts FILE")
    return begin


def own_prompts(
    target: Target, tokenizer: Any, count: int, *, max_new_tokens: int = 96, slots: int = 16, seed: int = 0
) -> Iterator[str]:
    """User turns that the target writes itself, at temperature 1, when it continues an empty chat: they carry no
    licence but its own. Those without an end are left out, and so are the same ones again."""
    begin, seen = opening(tokenizer), set()
    prompts = [begin] * count
    for told in answer(
        target, prompts, eos=tokenizer.eos, max_new_tokens=max_new_tokens, temperature=1.0, slots=slots, seed=seed
    ):
        words = tokenizer.decode(told.text.tokens[len(begin) :]).strip()
        if told.finish_reason == "eos" and words and words not in seen:
            seen.add(words)
            yield words
