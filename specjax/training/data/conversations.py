"""Conversations as training texts: the turns that the target answers, and turns with answers that are given.

A turn is a prompt, everything up to the start of an answer as the chat template writes it, and the answer. Turns of one
conversation become one text if each prompt continues the text before it. A template may also rewrite earlier turns, for
example leave their reasoning out. The turn then begins a text of its own, so every token is trained after exactly the
tokens that precede it in decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.training.data.packing import TrainingText

Message = Mapping[str, Any]
"""A dict with "role" and "content", as chat templates read it. An answer with "weight" 0 is not trained."""

TextSource = str | Sequence[int] | Sequence[Message]
"""A text, its token ids, or a conversation."""

ASSISTANT = "assistant"


class Turn(NamedTuple):
    """A prompt and its answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def is_conversation(source: TextSource) -> bool:
    """Return True for a list of messages. Raises: UsageError for messages without a role."""
    if isinstance(source, str) or not len(source) or not isinstance(source[0], Mapping):
        return False
    for message in source:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError('a conversation is a list of messages such as {"role": "user", "content": "hi"}')
    return True


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """Return the messages after a system prompt, unless they begin with one of their own."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def pictures_of(messages: Sequence[Message]) -> list[str]:
    """Return the paths of the images in messages. Raises: UsageError for an image without one."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]
    if any("path" not in image for image in images):
        raise UsageError('an image of a message has no path; give {"type": "image", "path": ...}')
    return [image["path"] for image in images]


def question_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages before each answer. Answers that are given are left out, because the target answers itself.

    Messages after a call of a tool are left out too, because they depend on the answer that made the call.
    """
    turns: list[list[Message]] = [[]]
    is_question = lambda turn: any(message["role"] != "system" for message in turn)
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] != ASSISTANT:
            turns[-1].append(message)
        elif is_question(turns[-1]):  # a system prompt before a greeting belongs to the first question
            turns.append([])
    return [turn for turn in turns if is_question(turn)]


def given_turns(messages: Sequence[Message], tokenizer: Any) -> list[Turn]:
    """Return the turns whose answers are given.

    Raises: UsageError if there is no answer to train on, or if the chat template refuses the messages.
    """
    turns = [
        Turn(tuple(map(int, tokenizer.chat(list(messages[:i])))), tuple(_answer(messages[: i + 1], tokenizer)))
        for i, message in enumerate(messages)
        if message["role"] == ASSISTANT and i and message.get("weight", 1) != 0
    ]
    turns = [turn for turn in turns if turn.answer]
    if not turns:
        raise UsageError("the conversation has no answer to train on; give one with messages of the assistant")
    return turns


def _answer(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Return the token ids of the last message, an answer, with the token that ends it.

    The template writes the answer before a further question. Where it then drops a part of the answer, or changes the
    prompt, the answer is encoded alone.
    """
    prompt = list(tokenizer.chat(list(messages[:-1])))
    written = list(tokenizer.chat([*messages, {"role": "user", "content": "?"}]))
    begin = next((i for i, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    end = next((i for i in range(begin, len(written)) if written[i] in tokenizer.eos), None)
    text = str(messages[-1].get("content") or "")
    if begin == len(prompt) and end is not None:
        answer = written[begin:end]
        if tokenizer.decode(answer).strip() == text.strip() or messages[-1].get("tool_calls"):
            return [*answer, written[end]]
    return [*tokenizer.encode(text, special=False), *([] if end is None else [written[end]])]


def join_turns(turns: Sequence[Turn]) -> list[TrainingText]:
    """Return the turns of a conversation as few texts. A turn joins the text that its prompt continues."""
    texts: list[TrainingText] = []
    for prompt, answer in turns:
        tokens = texts[-1].tokens if texts else ()
        if texts and prompt[: len(tokens)] == tokens:
            asides = (*texts[-1].asides, (len(tokens), len(prompt)))
            texts[-1] = TrainingText((*prompt, *answer), texts[-1].prompt_length, asides)
        else:
            texts.append(TrainingText((*prompt, *answer), len(prompt)))
    return texts


def split_ids(ids: Sequence[int], length: int) -> Iterator[TrainingText]:
    """Cut a text without prompts into pieces of at most `length` tokens."""
    for i in range(0, len(ids), length):
        yield TrainingText(tuple(ids[i : i + length]), 0)
