"""The texts of a training run: responses of the target to prompts, split into training and held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.models.vision.grids import PromptPatches
from specjax.models.vision.memory import images
from specjax.parallel import check_same
from specjax.persistence.fingerprint import digest_arrays, digest_weights
from specjax.training.data.conversations import (
    ASSISTANT,
    Message,
    TextSource,
    Turn,
    given_turns,
    is_conversation,
    join_turns,
    pictures_of,
    question_turns,
    split_ids,
    with_system,
)
from specjax.training.data.packing import PAIR_TOKENS, TrainingText
from specjax.training.data.target_responses import (
    PROMPT_TOKENS,
    ResponseStore,
    TargetResponse,
    chat_prefix,
    decode_messages,
    generate_responses,
)
from specjax.types import PyTree, Target


class Corpus(NamedTuple):
    """The texts of a run."""

    texts: list[TrainingText]
    held_out: list[TrainingText]  # responses on which the best result is selected
    reported: list[TrainingText]  # responses to other prompts, on which it is measured


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
    inputs: Sequence[PyTree] | None = None  # arrays [1, ...] per prompt; None: the target reads tokens only


class _Dialogue:
    """The turns of a conversation that the target answers."""

    def __init__(self, source: TextSource, system: str | None):
        self.ids: list[int] | None = None  # the whole prompt, if it is given as token ids
        self.questions: list[list[Message]] = []  # messages before each answer
        self.history: list[Message] = []
        self.turns: list[Turn] = []
        self.pictures: list[str] = []  # paths of the images, all of the first question
        self.tiles: Any = None  # the images as the target reads them, after the first `next_prompt`
        if isinstance(source, str):
            self.questions = [list(with_system([{"role": "user", "content": source}], system))]
        elif is_conversation(source):
            self.questions = question_turns(with_system(source, system))  # type: ignore[arg-type]
            self.pictures = pictures_of([message for turn in self.questions[:1] for message in turn])
            if any(map(pictures_of, self.questions[1:])):
                raise UsageError("an image is in a later question, and only the first one may have images")
        else:
            self.ids = list(map(int, source))  # type: ignore[arg-type]

    @property
    def is_complete(self) -> bool:
        """Return True if the target has answered all turns."""
        return len(self.turns) >= (1 if self.ids is not None else len(self.questions))

    def next_prompt(self, tokenizer: Any, processor: Any = None) -> list[int]:
        """Return the token ids up to the next answer.

        processor: the image processor of the target. Raises: UsageError without one for a conversation with images.
        """
        if self.ids is not None:
            return self.ids
        messages = [*self.history, *self.questions[len(self.turns)]]
        if self.pictures:
            if processor is None:
                raise UsageError("the conversation has images, and the target reads none")
            ids, self.tiles = processor.chat(messages, self.pictures)
            return list(ids)
        is_single = len(messages) == 1
        return list(map(int, tokenizer.chat(messages[0]["content"] if is_single else messages)))

    def add_answer(self, prompt: Sequence[int], answer: Sequence[int], tokenizer: Any) -> None:
        """Add the answer to the next turn."""
        if len(self.turns) + 1 < len(self.questions):  # a further prompt contains the answer
            content = [token for token in answer if token not in tokenizer.eos]
            message = {"role": ASSISTANT, "content": tokenizer.decode(content)}
            self.history += [*self.questions[len(self.turns)], message]
        self.turns.append(Turn(tuple(prompt), tuple(answer)))


@dataclass
class CorpusBuilder:
    """A builder of the texts of a run. Responses are read from a folder, and missing ones are generated into it."""

    target: Target
    tokenizer: Any
    settings: CorpusSettings
    responses: Path  # folder of the responses
    listener: CorpusListener
    writes: bool = True  # write new responses; True on one host only
    processor: Any = None  # the image processor of the target (`models.load_image_processor`); None: it reads no images
    sizes: dict[str, int] | None = None  # of the inputs of all prompts, once those with images are known

    def build(self, prompts: Sequence[TextSource], texts: Sequence[TextSource]) -> Corpus:
        """Return responses to the prompts, or the texts with responses to the held-out prompts.

        Without prompts, conversations among the texts are held out, and the target answers their questions.

        Raises: UsageError for too few prompts, and for folders that hold other responses.
        """
        count = self.settings.held_out
        if texts and not prompts and not self.settings.generated_prompts:
            prompts, texts = self.hold_out(texts)
        selected = self.select_prompts(prompts, has_texts=bool(texts))
        pieces = self.read_texts(texts) if texts else []
        answered = self.respond(selected[:count] if texts else selected)
        middle = -(-count // 2)
        flat = lambda parts: [text for part in parts for text in part]
        return Corpus(
            pieces if texts else flat(answered[count:]), flat(answered[:middle]), flat(answered[middle:count])
        )

    def hold_out(self, texts: Sequence[TextSource]) -> tuple[list[TextSource], list[TextSource]]:
        """Return conversations that the target can answer, in a random order, and the texts to train on.

        A conversation that begins with the question of a held-out one is in neither list.

        Raises: UsageError if no text is a conversation.
        """
        held_out: list[TextSource] = []
        questions: list[list[Message]] = []
        remainder: list[TextSource] = []
        if not any(map(is_conversation, texts)):
            raise UsageError("the texts are no conversations, so the evaluation needs prompts; give some")
        for i in np.random.default_rng(self.settings.seed).permutation(len(texts)):
            try:
                dialogue = _Dialogue(texts[i], self.settings.system)
            except UsageError:  # `read_texts` reports it
                remainder.append(texts[i])
                continue
            if not is_conversation(texts[i]) or not dialogue.questions:
                remainder.append(texts[i])
            elif dialogue.questions[0] in questions:
                continue
            elif len(held_out) == self.settings.held_out or self._next_prompt(dialogue) is None:
                remainder.append(texts[i])
            else:
                held_out.append(texts[i])
                questions.append(dialogue.questions[0])
        return held_out, remainder

    def select_prompts(self, prompts: Sequence[TextSource], has_texts: bool) -> list[_Dialogue]:
        """Return the conversations whose first prompt fits, without duplicates and in a random order."""
        settings = self.settings
        sources = [*prompts, *(self.generate_prompts() if settings.generated_prompts else ())]
        dialogues, refused = [], []
        for source in sources:
            try:
                dialogue = _Dialogue(source, settings.system)
                is_empty = not (dialogue.ids or dialogue.questions)
                ids = [] if is_empty else dialogue.next_prompt(self.tokenizer, self.processor)
            except UsageError as error:
                refused.append(str(error))
                continue
            if ids:
                dialogues.append((dialogue, ids))
            else:
                refused.append("the prompt has no tokens")
        if refused:
            self.listener.on_note(f"left out: {len(refused)} prompts ({refused[0]})")
        fitting = [entry for entry in dialogues if self._has_room(entry[1])]
        if len(fitting) < len(dialogues):
            self.listener.on_note(
                f"left out: {len(dialogues) - len(fitting)} prompts that leave no room for {settings.max_new_tokens} "
                "tokens (`max_new_tokens`)"
            )
        trainable = [entry for entry in fitting if len(entry[1]) + PAIR_TOKENS <= settings.length]
        if len(trainable) < len(fitting):
            self.listener.on_note(
                f"left out: {len(fitting) - len(trainable)} prompts that fill rows of {settings.length} tokens "
                "(`length`)"
            )
        name = lambda entry: (tuple(entry[1]), tuple(entry[0].pictures))
        different = [dialogue for dialogue, _ in {name(entry): entry for entry in trainable}.values()]
        self.sizes = _sizes_of([dialogue.tiles for dialogue in different if dialogue.tiles is not None])
        if not different and not settings.held_out and not has_texts:
            raise UsageError(
                f"no prompt fits a row of {settings.length} tokens; give more prompts, or a larger `length`"
            )
        if len(different) < settings.held_out + (not has_texts):
            raise UsageError(
                f"there are {len(different)} prompts that fit rows of {settings.length} tokens, and "
                f"{settings.held_out} are held out; give more prompts, a larger `length` or a smaller `held_out`"
            )
        order = np.random.default_rng(settings.seed).permutation(len(different))
        return [different[i] for i in order]

    def _has_room(self, ids: Sequence[int]) -> bool:
        return len(ids) + self.settings.max_new_tokens <= self.settings.max_positions

    def read_texts(self, texts: Sequence[TextSource]) -> list[TrainingText]:
        """Return the conversations with their answers masked, and other texts cut into pieces as long as a row."""
        length, pieces, refused = self.settings.length, [], []
        for text in texts:
            try:
                if is_conversation(text) and pictures_of(text):  # type: ignore[arg-type]
                    raise UsageError("images are read in prompts only, which the target answers")
                if is_conversation(text):
                    pieces += join_turns(given_turns(with_system(text, self.settings.system), self.tokenizer))  # type: ignore[arg-type]
                else:
                    ids = self.tokenizer.encode(text) if isinstance(text, str) else text
                    pieces += split_ids(list(map(int, ids)), length)
            except UsageError as error:
                refused.append(str(error))
        if refused:
            self.listener.on_note(f"left out: {len(refused)} texts ({refused[0]})")
        pieces = [text for text in pieces if len(text.tokens) > PAIR_TOKENS]
        trainable = [text for text in pieces if text.cut(length).response_length]
        if len(trainable) < len(pieces):
            self.listener.on_note(
                f"left out: {len(pieces) - len(trainable)} texts whose prompts fill rows of {length} tokens (`length`)"
            )
        pieces = trainable
        check_same(pieces, "texts")
        return pieces

    def generate_prompts(self) -> list[str]:
        """Return user messages that the target writes, without incomplete and repeated ones."""
        count, seed = self.settings.generated_prompts, self.settings.seed
        prefixes = [chat_prefix(self.tokenizer, self.settings.system)] * count
        identity = {"max_new_tokens": PROMPT_TOKENS, "seed": seed}
        request = _Request(prefixes, range(count), PROMPT_TOKENS, 1.0, identity)
        responses = self._load_or_generate(request, self.responses / "own_prompts", "writing prompts")
        return [text for text in decode_messages(responses, self.tokenizer) if _is_valid_unicode(text)]

    def respond(self, dialogues: Sequence[_Dialogue]) -> list[list[TrainingText]]:
        """Return the texts of each conversation, after the target has answered all of its turns.

        A conversation ends early where its next prompt leaves no room for an answer.
        """
        limit, ended = self.settings.max_new_tokens, 0
        active = [dialogue for dialogue in dialogues if not dialogue.is_complete]
        while active:
            prompts = [self._next_prompt(dialogue) for dialogue in active]
            fitting = [(dialogue, ids) for dialogue, ids in zip(active, prompts, strict=True) if ids is not None]
            ended += len(active) - len(fitting)
            batch = [ids for _, ids in fitting]
            request = _Request(
                batch, [0] * len(batch), limit, self.settings.temperature, {"max_new_tokens": limit},
                self._inputs_of(batch, [dialogue for dialogue, _ in fitting]),
            )  # fmt: skip
            responses = self._load_or_generate(request, self.responses, "answering")
            for (dialogue, prompt), response in zip(fitting, responses, strict=True):
                dialogue.add_answer(prompt, response.text.response_tokens, self.tokenizer)
            active = [dialogue for dialogue, _ in fitting if not dialogue.is_complete]
        if ended:
            self.listener.on_note(
                f"left out: later turns of {ended} conversations, which leave no room or do not fit the template"
            )
        return [self._join(dialogue) for dialogue in dialogues]

    def _join(self, dialogue: _Dialogue) -> list[TrainingText]:
        """Return the texts of a conversation, with its images."""
        texts = join_turns(dialogue.turns)
        inputs = self._inputs_of([text.tokens[: text.prompt_length] for text in texts], [dialogue] * len(texts))
        if inputs is None:
            return texts
        return [text._replace(inputs=row) for text, row in zip(texts, inputs, strict=True)]

    def _inputs_of(self, prompts: Sequence[Sequence[int]], dialogues: Sequence[_Dialogue]) -> list[PyTree] | None:
        """Return the images of each prompt, all in one shape; None if no prompt of the run has any.

        They are in the memory of the host, because those of all prompts need not fit a device.
        """
        if self.sizes is None:
            return None
        pairs = zip(prompts, dialogues, strict=True)
        of_prompt = lambda ids, tiles: images(self.target, [ids], [tiles], **self.sizes or {})
        return [jax.tree.map(np.asarray, of_prompt(ids, dialogue.tiles)) for ids, dialogue in pairs]

    def _next_prompt(self, dialogue: _Dialogue) -> list[int] | None:
        """Return the next prompt of a conversation; None if the template refuses it, or if it leaves no room."""
        try:
            ids = dialogue.next_prompt(self.tokenizer, self.processor)
        except UsageError:
            return None
        return ids if self._has_room(ids) and len(ids) + PAIR_TOKENS <= self.settings.length else None

    def _load_or_generate(self, request: _Request, folder: Path, stage: str) -> list[TargetResponse]:
        """Return the responses of a folder, after generating the missing ones into it."""
        model, settings = self.target.model, self.settings
        identity = {
            "target": model.name, "weights": digest_weights(self.target.params), "vocabulary": model.vocab_size,
            "temperature": request.temperature, **request.identity, "system": settings.system,
            "template_args": dict(getattr(self.tokenizer, "template_args", {})) or None,
        }  # fmt: skip
        store = ResponseStore(folder, identity, writes=self.writes)
        inputs = request.inputs
        digests = [""] * len(request.prompts) if inputs is None else list(map(digest_arrays, inputs))
        names = list(zip(request.prompts, request.numbers, digests, strict=True))
        check_same([(*name, store.get(*name)) for name in names], "prompts and responses")
        missing = [place for place, name in enumerate(names) if store.get(*name) is None]
        missing.sort(key=lambda place: len(request.prompts[place]))  # equal lengths finish their prefill together
        tokens = 0
        if missing:
            responses = generate_responses(
                self.target, [request.prompts[place] for place in missing], eos=self.tokenizer.eos,
                max_new_tokens=request.max_new_tokens, temperature=request.temperature, slots=settings.batch_size,
                seed=settings.seed, numbers=[request.numbers[place] for place in missing],
                inputs=None if inputs is None else [inputs[place] for place in missing],
            )  # fmt: skip
            self.listener.on_responses(stage, 0, len(missing), 0)
            for done, response in enumerate(responses, 1):
                store.add(response)
                tokens += response.text.response_length
                self.listener.on_responses(stage, done, len(missing), tokens)
        return [stored for name in names if (stored := store.get(*name)) is not None]


def _sizes_of(tiles: Sequence[Any]) -> dict[str, int] | None:
    """Return the arguments of `models.images` that give all of these images one shape; None without images."""
    if not tiles:
        return None
    if isinstance(tiles[0], PromptPatches):
        largest = max(int(np.asarray(entry.grids).prod(1).max()) for entry in tiles)
        return {"num_tiles": max(len(entry.grids) for entry in tiles), "num_patches": largest}
    return {"num_tiles": max(len(entry.pixels) for entry in tiles)}


def _is_valid_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)
