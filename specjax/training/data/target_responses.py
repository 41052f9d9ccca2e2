"""Responses of the target, on which its drafters are trained. They are stored in files that any run can reuse."""

from __future__ import annotations

import itertools
import json
import math
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
from specjax.files.homes import in_home
from specjax.files.untrusted import first_line, quote, read_json
from specjax.parallel import gather
from specjax.persistence.fingerprint import digest_arrays
from specjax.serving.requests import Request
from specjax.training.data.packing import TrainingText
from specjax.types import Drafter, PyTree, Target

ABOUT, SHARD_SIZE = "answers.json", 1024  # responses per file
PROMPT_TOKENS = 96  # limit of a prompt that the target writes


class TargetResponse(NamedTuple):
    """A prompt with a response of the target."""

    text: TrainingText
    finish_reason: str
    number: int = 0  # index among the responses to the same prompt
    images: str = ""  # digest of the images of the prompt, if it has any


def generate_responses(
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
    inputs: Sequence[PyTree] | None = None,
) -> Iterator[TargetResponse]:
    """Generate a response to each prompt, `slots` at a time, and yield each when it is complete.

    A sampled response depends only on `seed`, its prompt and its number, not on the order or the batch.

    Args:
      numbers: one number per prompt, for several responses to the same prompt; None: all are 0.
      inputs: arrays [1, ...] per prompt that the target reads in addition to tokens, such as images; None: it reads
        none.

    Raises: UsageError for inputs of a target whose batch is split over devices.
    """
    numbers = [0] * len(prompts) if numbers is None else numbers
    mesh = target.model.mesh
    rows = [None] * len(prompts) if inputs is None else [jax.tree.map(lambda x: x[0], row) for row in inputs]
    digests = ["" if row is None else digest_arrays(row) for row in rows]
    # `serve` cannot refill single rows that are split over devices or hosts.
    if mesh is not None and (mesh.shape.get("data", 1) > 1 or jax.process_count() > 1):
        if inputs is not None:
            raise UsageError(
                'prompts with images cannot be answered in a batch that is split over devices; leave the axis "data" '
                "out of the mesh"
            )
        for start in range(0, len(prompts), slots):
            part = slice(start, start + slots)
            yield from _decode_batch(
                target, drafter, prompts[part], numbers[part], slots, seed, eos=list(eos),
                max_new_tokens=max_new_tokens, temperature=temperature,
            )  # fmt: skip
        return
    longest = max(map(len, prompts), default=1)
    unfinished: dict[int, list[int]] = {}
    requests = (
        Request(list(prompt), key=_derive_seed(seed, number, prompt), inputs=row)
        for prompt, number, row in zip(prompts, numbers, rows, strict=True)
    )
    steps = serve(
        target, drafter, requests, slots=min(slots, max(len(prompts), 1)), longest_prompt=longest,
        max_new_tokens=max_new_tokens, temperature=temperature, eos=list(eos), max_slowdown=math.inf,
        inputs=None if inputs is None else next(iter(rows), None),
    )  # fmt: skip
    for step in steps:
        if step.error is not None:
            raise UsageError(f"prompt {step.request + 1} of {len(prompts)}: {step.error}")
        unfinished.setdefault(step.request, []).extend(step.tokens)
        if step.finish_reason is not None:
            prompt, tokens = prompts[step.request], unfinished.pop(step.request)
            text = TrainingText((*map(int, prompt), *tokens), len(prompt))
            yield TargetResponse(text, step.finish_reason, numbers[step.request], digests[step.request])


def _decode_batch(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], numbers: Sequence[int], rows: int,
    seed: int, **settings: Any,
) -> Iterator[TargetResponse]:  # fmt: skip
    """Decode at most `rows` prompts in one batch of `rows` rows."""
    pairs = list(zip(prompts, numbers, strict=True))
    filled = [*pairs, *[pairs[-1]] * (rows - len(pairs))]
    keys = jnp.stack([jax.random.key(_derive_seed(seed, number, prompt)) for prompt, number in filled])
    result = gather(decode(target, drafter, [list(prompt) for prompt, _ in filled], key=keys, **settings))
    for (prompt, number), tokens, reason in zip(pairs, result.to_lists(), result.finish_reasons, strict=False):
        yield TargetResponse(TrainingText((*map(int, prompt), *tokens), len(prompt)), reason, number)


def _derive_seed(seed: int, number: int, prompt: Sequence[int]) -> int:
    return int(np.random.default_rng([seed, number, *map(int, prompt)]).integers(2**31))


class ResponseStore:
    """Responses in a folder.

    `answers.json` identifies the target, and `answers-00000.jsonl` etc. hold 1,024 responses each. Each response is
    written as one line as soon as it is added. An interrupted run continues from there, and ignores an incomplete last
    line.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any], writes: bool = True):
        """Open the folder, and read its responses.

        Args:
          identity: target, temperature etc. of the responses; "vocabulary" is the number of token ids.
          writes: write added responses to the folder. Only one of several hosts may do so.

        Raises: UsageError if the folder cannot be written, holds responses with another identity, or broken files.
        """
        self.folder = in_home(folder)
        self.responses: dict[tuple[tuple[int, ...], int, str], TargetResponse] = {}
        self._vocab_size = identity.get("vocabulary", sys.maxsize)
        self._lines = 0
        self._line_end = ""  # "\n" if the last line is incomplete
        self._writes = writes
        path = self.folder / ABOUT
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if writes and not path.exists():
                write_atomic(path, (json.dumps(identity, indent=2) + "\n").encode())  # another host may read it
            stored = read_json(path) if path.exists() else identity
            shards = sorted(self.folder.glob("answers-*.jsonl"))
            texts = [shard.read_text(encoding="utf-8") for shard in shards]
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} cannot hold responses ({error}); give another folder") from error
        self._check_identity(stored, identity)
        for shard, text in zip(shards, texts, strict=True):
            self._read_shard(shard, text)

    def _check_identity(self, stored: Any, identity: dict[str, Any]) -> None:
        """Raise a UsageError if the folder holds responses with another identity."""
        folder = self.folder
        if not isinstance(stored, dict):
            raise UsageError(f"{folder / ABOUT} is not a JSON object that identifies the target; give another folder")
        different = [name for name, value in identity.items() if stored.get(name) != value]
        if "weights" in different[:1]:  # the message omits the digest, which would not help the user
            raise UsageError(
                f"{folder} holds responses of another model called {identity['target']}; give another folder"
            )
        if different:
            name = different[0]
            raise UsageError(
                f"{folder} holds responses with {name} {quote(stored.get(name))}, not {identity[name]!r}; "
                "give another folder"
            )

    def _read_shard(self, path: Path, text: str) -> None:
        lines = text.split("\n")
        self._line_end = "\n" if lines[-1] else ""
        for number, line in enumerate(lines, 1):
            self._lines += bool(line)
            try:
                self._remember(_parse_response(json.loads(line), self._vocab_size))
            except json.JSONDecodeError:  # an empty line, or an incomplete one
                continue
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                reason = f"without {error}" if isinstance(error, KeyError) else first_line(error)
                raise UsageError(f"{path}, line {number} is not a response ({reason}); delete the line") from error

    def _remember(self, response: TargetResponse) -> None:
        prompt = response.text.tokens[: response.text.prompt_length]
        self.responses[prompt, response.number, response.images] = response

    def get(self, prompt: Sequence[int], number: int = 0, images: str = "") -> TargetResponse | None:
        """Return the stored response to a prompt, or None. images: digest of its images; "": it has none."""
        return self.responses.get((tuple(prompt), number, images))

    def add(self, response: TargetResponse) -> None:
        """Add a response, and write it to the folder."""
        self._remember(response)
        if not self._writes:
            return
        tokens, count = response.text.tokens, response.text.prompt_length
        entry: dict[str, Any] = {"prompt": tokens[:count], "answer": tokens[count:], "finish": response.finish_reason}
        if response.number:
            entry["number"] = response.number
        if response.images:
            entry["images"] = response.images
        path = self.folder / f"answers-{self._lines // SHARD_SIZE:05d}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self._line_end + json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); make room, and run it again") from error
        self._lines += 1
        self._line_end = ""


def _parse_response(entry: Any, vocab_size: int) -> TargetResponse:
    """Parse a line of a file. Raises: ValueError, KeyError, TypeError or AttributeError for an invalid entry."""
    prompt, response, number = entry["prompt"], entry["answer"], entry.get("number", 0)
    for token in (*prompt, *response):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"{quote(token)} is not one of the {vocab_size} token ids")
    text, images = TrainingText((*prompt, *response), len(prompt)), str(entry.get("images", ""))
    return TargetResponse(text, str(entry["finish"]), int(number), images)


def start_chat(text: str, system: str | None) -> str | list[dict[str, str]]:
    """Return the messages of a chat that begins with a user message, after a system prompt if there is one."""
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def chat_prefix(tokenizer: Any, system: str | None = None) -> list[int]:
    """Return the tokens of a chat before its first user message. The target continues them with a user message.

    Raises: UsageError for a tokenizer without a chat template, or with one that has no fixed beginning.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError("the target has no chat template, so it cannot write prompts; give prompts")
    samples = [tokenizer.chat(start_chat(message, system)) for message in ("A b", "Zebras, 1 2 3", "But why?")]
    common = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*samples, strict=False))
    prefix = [ids[0] for ids in common]
    if not prefix:
        raise UsageError("the target's chats have no common beginning, so it cannot write prompts; give prompts")
    return prefix


def generate_prompts(
    target: Target, tokenizer: Any, count: int, *, max_new_tokens: int = PROMPT_TOKENS, slots: int = 16, seed: int = 0
) -> Iterator[str]:
    """Generate user messages with the target, which continues an empty chat at temperature 1.

    Only the licence of the model applies to such prompts. Incomplete messages and duplicates are left out.
    """
    prefix = chat_prefix(tokenizer)
    responses = generate_responses(
        target, [prefix] * count, eos=tokenizer.eos, max_new_tokens=max_new_tokens, temperature=1.0, slots=slots,
        seed=seed, numbers=range(count),
    )  # fmt: skip
    return decode_messages(responses, tokenizer)


def decode_messages(responses: Iterable[TargetResponse], tokenizer: Any) -> Iterator[str]:
    """Decode the complete messages among the responses, and skip duplicates."""
    messages = set()
    for text, finish_reason, *_ in responses:
        message = tokenizer.decode(text.tokens[text.prompt_length :]).strip()
        if finish_reason == "eos" and message and message not in messages:
            messages.add(message)
            yield message
