"""The texts of a training run: responses of the target to prompts, split into training and held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.errors import UsageError
from specjax.parallel import check_same
from specjax.persistence.fingerprint import digest_weights
from specjax.training.data.packing import PAIR_TOKENS, TrainingText
from specjax.training.data.target_responses import (
    PROMPT_TOKENS,
    ResponseStore,
    TargetResponse,
    chat_prefix,
    decode_messages,
    generate_responses,
    start_chat,
)
from specjax.types import Target

TextSource = str | Sequence[int]
"""A text, or its token ids."""


class Corpus(NamedTuple):
    """The texts of a run."""

    texts: list[TrainingText]
    held_out: list[TrainingText]  # greedy responses of the target


class CorpusListener(Protocol):
    """The callbacks of `TrainingObserver` that `CorpusBuilder` uses."""

    def on_note(self, note: str) -> None: ...
    def on_responses(self, stage: str, done: int, total: int, tokens: int) -> None: ...


class CorpusSettings(NamedTuple):
    """The part of `TrainingSettings` that `CorpusBuilder` uses, and the limit of text lengths."""

    held_out: int
    max_new_tokens: int
    temperature: float
    generated_prompts: int
    batch_size: int
    length: int
    seed: int
    max_positions: int
    system: str | None = None  # system prompt before each user message


class _Request(NamedTuple):
    """Prompts, and the sampling settings of their responses."""

    prompts: list[list[int]]
    numbers: Sequence[int]
    max_new_tokens: int
    temperature: float
    identity: dict[str, Any]


@dataclass
class CorpusBuilder:
    """A builder of the texts of a run. Responses are read from a folder, and missing ones are generated into it."""

    target: Target
    tokenizer: Any
    settings: CorpusSettings
    responses: Path  # folder of the responses
    greedy_responses: Path  # folder of held-out responses, if the responses for training are sampled
    listener: CorpusListener
    writes: bool = True  # write new responses; True on one host only

    def build(self, prompts: Sequence[TextSource], texts: Sequence[TextSource]) -> Corpus:
        """Return responses to the prompts, or the texts with responses to the held-out prompts.

        Raises: UsageError for too few prompts, and for folders that hold other responses.
        """
        selected = self.select_prompts(prompts, has_texts=bool(texts))
        count, temperature = self.settings.held_out, self.settings.temperature
        if texts:
            pieces = self.cut_texts(texts)
            check_same(pieces, "texts")
            return Corpus(pieces, self.respond(selected[:count], self.responses, 0.0))
        responses = self.respond(selected, self.responses, temperature)
        held_out, training = responses[:count], responses[count:]
        if temperature > 0:  # held-out responses must be greedy, because the measured chain is
            held_out = self.respond(selected[:count], self.greedy_responses, 0.0)
        return Corpus(training, held_out)

    def select_prompts(self, prompts: Sequence[TextSource], has_texts: bool) -> list[list[int]]:
        """Return the token ids of the prompts that fit, without duplicates and in a random order."""
        settings = self.settings
        sources = [*prompts, *(self.generate_prompts() if settings.generated_prompts else ())]
        chat = lambda text: self.tokenizer.chat(start_chat(text, settings.system))
        encoded = [list(map(int, chat(x) if isinstance(x, str) else x)) for x in sources]
        fitting = [ids for ids in encoded if len(ids) + settings.max_new_tokens <= settings.max_positions]
        if len(fitting) < len(encoded):
            self.listener.on_note(
                f"left out: {len(encoded) - len(fitting)} prompts that leave no room for {settings.max_new_tokens} "
                "tokens (`max_new_tokens`)"
            )
        trainable = [ids for ids in fitting if len(ids) + PAIR_TOKENS <= settings.length]
        if len(trainable) < len(fitting):
            self.listener.on_note(
                f"left out: {len(fitting) - len(trainable)} prompts that fill rows of {settings.length} tokens "
                "(`length`)"
            )
        different = list({tuple(ids): ids for ids in trainable}.values())
        if len(different) < settings.held_out + (not has_texts):
            raise UsageError(
                f"there are {len(different)} prompts that fit rows of {settings.length} tokens, and "
                f"{settings.held_out} are held out; give more prompts, a larger `length` or a smaller `held_out`"
            )
        order = np.random.default_rng(settings.seed).permutation(len(different))
        return [different[i] for i in order]

    def cut_texts(self, texts: Sequence[TextSource]) -> list[TrainingText]:
        """Cut texts into pieces as long as a row."""
        length, pieces = self.settings.length, []
        for text in texts:
            ids = list(map(int, self.tokenizer.encode(text) if isinstance(text, str) else text))
            pieces += [ids[i : i + length] for i in range(0, len(ids), length)]
        return [TrainingText(tuple(ids), 0) for ids in pieces if len(ids) > PAIR_TOKENS]

    def generate_prompts(self) -> list[str]:
        """Return user messages that the target writes, without incomplete and repeated ones."""
        count, seed = self.settings.generated_prompts, self.settings.seed
        prefixes = [chat_prefix(self.tokenizer, self.settings.system)] * count
        identity = {"max_new_tokens": PROMPT_TOKENS, "seed": seed}
        request = _Request(prefixes, range(count), PROMPT_TOKENS, 1.0, identity)
        responses = self._load_or_generate(request, self.responses / "own_prompts", "writing prompts")
        return [text for text in decode_messages(responses, self.tokenizer) if _is_valid_unicode(text)]

    def respond(self, prompts: list[list[int]], folder: Path, temperature: float) -> list[TrainingText]:
        """Return the responses to prompts, in the order of the prompts."""
        limit = self.settings.max_new_tokens
        request = _Request(prompts, [0] * len(prompts), limit, temperature, {"max_new_tokens": limit})
        return [response.text for response in self._load_or_generate(request, folder, "answering")]

    def _load_or_generate(self, request: _Request, folder: Path, stage: str) -> list[TargetResponse]:
        """Return the responses of a folder, after generating the missing ones into it."""
        model, settings = self.target.model, self.settings
        identity = {
            "target": model.name, "weights": digest_weights(self.target.params), "vocabulary": model.vocab_size,
            "temperature": request.temperature, **request.identity, "system": settings.system,
            "template_args": dict(getattr(self.tokenizer, "template_args", {})) or None,
        }  # fmt: skip
        store = ResponseStore(folder, identity, writes=self.writes)
        pairs = list(zip(request.prompts, request.numbers, strict=True))
        check_same([(ids, number, store.get(ids, number)) for ids, number in pairs], "prompts and responses")
        missing = [(ids, number) for ids, number in pairs if store.get(ids, number) is None]
        missing.sort(key=lambda pair: len(pair[0]))  # prompts of equal length finish their prefill together
        tokens = 0
        if missing:
            responses = generate_responses(
                self.target, [ids for ids, _ in missing], eos=self.tokenizer.eos,
                max_new_tokens=request.max_new_tokens, temperature=request.temperature, slots=settings.batch_size,
                seed=settings.seed, numbers=[number for _, number in missing],
            )  # fmt: skip
            self.listener.on_responses(stage, 0, len(missing), 0)
            for done, response in enumerate(responses, 1):
                store.add(response)
                tokens += response.text.response_length
                self.listener.on_responses(stage, done, len(missing), tokens)
        return [stored for ids, number in pairs if (stored := store.get(ids, number)) is not None]


def _is_valid_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)
