"""What the target itself answers: the texts that a drafter of it is trained on, kept in files that any run may use."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import decode, serve
from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.files.untrusted import first_line, quote
from specjax.parallel import gather
from specjax.serving.requests import Request
from specjax.training.data.packing import Text
from specjax.types import Drafter, Target

ABOUT, SHARD = "answers.json", 1024  # answers of a file
OWN_TOKENS = 96  # at most, of a prompt that the target writes itself


class Answer(NamedTuple):
    """One text, and how it came."""

    text: Text
    finish_reason: str
    number: int = 0  # of answers to the same prompt


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
    numbers: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Answers as they are done, `slots` texts at a time.

    A sampled one depends on `seed`, its prompt and its number alone, whatever else is asked for: one that is asked for
    later is the same.

    Args: numbers: of each prompt, where one is answered several times; None: 0 of all.
    """
    numbers = [0] * len(prompts) if numbers is None else numbers
    mesh = target.model.mesh
    # Rows over several devices, or several hosts' devices, are not filled one by one.
    if mesh is not None and (mesh.shape.get("data", 1) > 1 or jax.process_count() > 1):
        for start in range(0, len(prompts), slots):
            some = slice(start, start + slots)
            yield from _together(
                target, drafter, prompts[some], numbers[some], slots, seed, eos=list(eos),
                max_new_tokens=max_new_tokens, temperature=temperature,
            )  # fmt: skip
        return
    longest = max(map(len, prompts), default=1)
    told: dict[int, list[int]] = {}
    requests = (
        Request(list(prompt), key=_seed(seed, number, prompt)) for prompt, number in zip(prompts, numbers, strict=True)
    )
    steps = serve(
        target, drafter, requests, slots=min(slots, max(len(prompts), 1)), longest_prompt=longest,
        max_new_tokens=max_new_tokens, temperature=temperature, eos=list(eos),
    )  # fmt: skip
    for step in steps:
        if step.error is not None:
            raise UsageError(f"prompt {step.request + 1} of {len(prompts)}: {step.error}")
        told.setdefault(step.request, []).extend(step.tokens)
        if step.finish_reason is not None:
            prompt, tokens = prompts[step.request], told.pop(step.request)
            text = Text((*map(int, prompt), *tokens), len(prompt))
            yield Answer(text, step.finish_reason, numbers[step.request])


def _together(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], numbers: Sequence[int], rows: int,
    seed: int, **settings: Any,
) -> Iterator[Answer]:  # fmt: skip
    """Answers to at most `rows` prompts, in a batch of as many."""
    asked = list(zip(prompts, numbers, strict=True))
    filled = [*asked, *[asked[-1]] * (rows - len(asked))]
    keys = jnp.stack([jax.random.key(_seed(seed, number, prompt)) for prompt, number in filled])
    result = gather(decode(target, drafter, [list(prompt) for prompt, _ in filled], key=keys, **settings))
    for (prompt, number), tokens, finish in zip(asked, result.to_lists(), result.finish_reasons, strict=False):
        yield Answer(Text((*map(int, prompt), *tokens), len(prompt)), finish, number)


def _seed(seed: int, number: int, prompt: Sequence[int]) -> int:
    return int(np.random.default_rng([seed, number, *map(int, prompt)]).integers(2**31))


class Answers:
    """Answers in a folder: `answers.json` says whose they are, `answers-00000.jsonl` and so on hold 1,024 each.

    What is written is there at once, line by line, so that a run that was ended goes on where it was; a last line that
    was cut off is not read.
    """

    def __init__(self, folder: str | Path, about: dict[str, Any], writes: bool = True):
        """about: whose answers they are, at which temperature and so on; "vocabulary": how many ids there are. writes:
        whether what is added goes to the folder, which one of several hosts does.

        Raises: UsageError for a folder that cannot be written, that holds answers of another kind, or none.
        """
        self.folder = Path(folder)
        self.known: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._ids = about.get("vocabulary", sys.maxsize)
        self._lines = 0
        self._cut = ""  # what ends a last line that was cut off
        self._writes = writes
        known = self.folder / ABOUT
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if writes and not known.exists():
                write_atomic(known, (json.dumps(about, indent=2) + "\n").encode())  # another host may read it
            found = json.loads(known.read_text(encoding="utf-8")) if known.exists() else about
            shards = sorted(self.folder.glob("answers-*.jsonl"))
            texts = [path.read_text(encoding="utf-8") for path in shards]
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} cannot hold answers ({error}); give another folder") from error
        if not isinstance(found, dict):
            raise UsageError(f"{known} is not a JSON object, so whose the answers are is unknown; give another folder")
        others = [name for name, value in about.items() if found.get(name) != value]
        if "weights" in others[:1]:  # a digest, which says nothing to people
            raise UsageError(f"{folder} holds answers of another model called {about['target']}; give another folder")
        if others:
            raise UsageError(
                f"{folder} holds answers with {others[0]} {quote(found.get(others[0]))}, not {about[others[0]]!r}; "
                "give another folder"
            )
        for path, text in zip(shards, texts, strict=True):
            self._read(path, text)

    def _read(self, path: Path, text: str) -> None:
        lines = text.split("\n")
        self._cut = "\n" if lines[-1] else ""
        for number, line in enumerate(lines, 1):
            self._lines += bool(line)
            try:
                self._know(_entry(json.loads(line), self._ids))
            except json.JSONDecodeError:  # empty, or cut off
                continue
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"without {error}" if isinstance(error, KeyError) else first_line(error)
                raise UsageError(f"{path}, line {number} is no answer ({what}); delete the line") from error

    def _know(self, answer: Answer) -> None:
        prompt = answer.text.tokens[: answer.text.answer]
        self.known[prompt, answer.number] = answer

    def of(self, prompt: Sequence[int], number: int = 0) -> Answer | None:
        """The answer to a prompt, if it is there."""
        return self.known.get((tuple(prompt), number))

    def add(self, answer: Answer) -> None:
        """Write one more."""
        self._know(answer)
        if not self._writes:
            return
        tokens, count = answer.text
        entry: dict[str, Any] = {"prompt": tokens[:count], "answer": tokens[count:], "finish": answer.finish_reason}
        if answer.number:
            entry["number"] = answer.number
        path = self.folder / f"answers-{self._lines // SHARD:05d}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self._cut + json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); make room, and run it again") from error
        self._lines += 1
        self._cut = ""


def _entry(found: Any, ids: int) -> Answer:
    """Raises: ValueError, KeyError, TypeError or AttributeError for what is no answer in so many ids."""
    prompt, told, number = found["prompt"], found["answer"], found.get("number", 0)
    for token in (*prompt, *told):
        if type(token) is not int or not 0 <= token < ids:
            raise ValueError(f"{quote(token)} is no token of {ids}")
    return Answer(Text((*prompt, *told), len(prompt)), str(found["finish"]), int(number))


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
    target: Target, tokenizer: Any, count: int, *, max_new_tokens: int = OWN_TOKENS, slots: int = 16, seed: int = 0
) -> Iterator[str]:
    """User turns that the target writes itself, at temperature 1, when it continues an empty chat: they carry no
    licence but its own. Those without an end are left out, and so are the same ones again."""
    begin = opening(tokenizer)
    told = answer(
        target, [begin] * count, eos=tokenizer.eos, max_new_tokens=max_new_tokens, temperature=1.0, slots=slots,
        seed=seed, numbers=range(count),
    )  # fmt: skip
    return turns(told, tokenizer)


def turns(told: Iterable[Answer], tokenizer: Any) -> Iterator[str]:
    """What was written of user turns that came to an end, each once."""
    seen = set()
    for text, finish_reason, _ in told:
        words = tokenizer.decode(text.tokens[text.answer :]).strip()
        if finish_reason == "eos" and words and words not in seen:
            seen.add(words)
            yield words
