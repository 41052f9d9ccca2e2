"""Files of prompts, texts and conversations, in the formats of ShareGPT, OpenAI and others.

A file has one text per line, one JSON object per line, or one JSON list of objects. An object has one of

    "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]  (OpenAI)
    "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]  (ShareGPT)
    "turns": ["first question", "second question", ...]
    "prompt": "...", optionally with "completion", "response" or "answer"
    "instruction": "...", optionally with "input" or "context", and "output" or "response"
    "text": "..."

For targets that read images, the content of the first message may be a list with parts {"type": "image", "path": ...},
or "images" may stand beside the text with a list of paths, or "image" with one. They are relative to the file. A text
may have <image> where each of them belongs; otherwise they come before it.

A "system" text may stand beside them. Entries that cannot be used are reported by number, and the others are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import is_text, quote, read_text
from specjax.training.data.conversations import ASSISTANT, Message, TextSource, is_conversation

MAX_FILE_BYTES = 1 << 31
MARK = "<image>"
"""The place of an image in the text of files such as those of LLaVA."""
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bard": ASSISTANT, "bing": ASSISTANT,
    "bot": ASSISTANT, "model": ASSISTANT, "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""The role of a message by its name in files."""

LISTS = ("messages", "conversations", "conversation")
UNREAD = ("tools", "functions", "history")
"""Fields that change what the answers mean. Entries with one of them are not used."""
ANSWERS = ("completion", "response", "answer", "output", "chosen")


class BadEntry(NamedTuple):
    """An entry that cannot be used."""

    number: int  # line, or place in the list, from 1
    error: str


class TextFile(NamedTuple):
    """The entries of a file."""

    sources: list[TextSource]
    bad: list[BadEntry]


def read_text_file(path: str | Path) -> TextFile:
    """Read a file of prompts, texts or conversations.

    Raises: UsageError for a file that cannot be read, or that has no entry that can be used.
    """
    sources, bad = [], []
    for number, entry in _split(read_text(path, MAX_FILE_BYTES), Path(path)):
        try:
            source = _parse_line(entry) if isinstance(entry, _Line) else parse_entry(entry)
            sources.append(with_folder(source, Path(path).parent))
        except UsageError as error:
            bad.append(BadEntry(number, str(error)))
    if not sources:
        reason = f" ({bad[0].number}: {bad[0].error})" if bad else ""
        raise UsageError(
            f"{path} has no text that can be used{reason}; write one per line, or one JSON object per line"
        )
    return TextFile(sources, bad)


class _Line(str):
    """A line with a JSON value."""


def _split(text: str, path: Path) -> list[tuple[int, Any]]:
    """Return the numbered entries: texts, JSON values, or lines with a JSON value."""
    begin = text.lstrip()[:1]
    if begin == "[" or (begin == "{" and path.suffix == ".json"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None  # lines of JSON, or a plain text that begins with a bracket
        if value is not None:
            return list(enumerate(value if isinstance(value, list) else [value], 1))
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_json = path.suffix in (".jsonl", ".json", ".ndjson") or begin == "{"
    return [(number, _Line(line)) for number, line in lines] if is_json else list(lines)


def _parse_line(line: str) -> TextSource:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise UsageError("not valid JSON (too long a number, or nested too deeply)") from None
    return parse_entry(entry)


def parse_entry(entry: Any) -> TextSource:
    """Return the text or the conversation of an entry.

    Raises: UsageError for an entry without text, or with parts that a text model cannot read.
    """
    if isinstance(entry, list):
        entry = {"messages": entry}
    if not isinstance(entry, Mapping):
        return _text(entry, "the entry")
    system = [{"role": "system", "content": _text(entry["system"], '"system"')}] if entry.get("system") else []
    messages = _with_images([*system, *_parse_messages(entry)], entry.get("images") or entry.get("image"))
    if len(messages) == 1 and isinstance(messages[0]["content"], str) and messages[0]["role"] == "user":
        return messages[0]["content"]
    if not any(message["role"] == "user" for message in messages):
        raise UsageError("the conversation has no message of the user")
    first = next(message["role"] for message in messages if message["role"] != "system")
    if first == ASSISTANT:
        raise UsageError("the conversation begins with an answer")
    return messages


def _parse_messages(entry: Mapping[str, Any]) -> list[Message]:
    """Return the messages of an object."""
    unread = next((name for name in UNREAD if entry.get(name)), None)
    if unread is not None:
        raise UsageError(f'the conversation has "{unread}", which are not read')
    name = next((name for name in (*LISTS, "turns", "prompt", "instruction", "text") if entry.get(name)), None)
    if name is None:
        raise UsageError('no text: it needs "messages", "conversations", "turns", "prompt", "instruction" or "text"')
    value = entry[name]
    if name in LISTS or (name == "prompt" and isinstance(value, list)):
        messages = [_parse_message(message) for message in _items(value, name)]
    elif name == "turns":
        messages = [_user(_text(turn, '"turns"')) for turn in (value if isinstance(value, list) else [value])]
    else:
        key = next((key for key in ("input", "context") if entry.get(key)), None) if name == "instruction" else None
        parts = [_text(value, f'"{name}"'), *([_text(entry[key], f'"{key}"')] if key else [])]
        messages = [_user("\n\n".join(parts))]
    answer = next((entry[key] for key in ANSWERS if entry.get(key)), None)
    if answer is None or name in LISTS or name == "turns":
        return messages
    if isinstance(answer, list):
        answers = [_parse_message(message) for message in answer]
        # Pairs of preferences repeat the prompt before each answer.
        return answers if any(message["role"] == "user" for message in answers) else [*messages, *answers]
    return [*messages, {"role": ASSISTANT, "content": _text(answer, "the answer")}]


def _items(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f'the field "{name}" is no list of messages')
    return value


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _parse_message(message: Any) -> Message:
    """Return a message with a standard role and content. Other fields stay."""
    if not isinstance(message, Mapping):
        raise UsageError(f"{quote(message)} is no message")
    name = message.get("role", message.get("from"))
    if not isinstance(name, str) or name.lower() not in ROLES:
        raise UsageError(f"the role {quote(name)} is not one of {', '.join(ROLES)}")
    role, content = ROLES[name.lower()], message.get("content", message.get("value"))
    if isinstance(content, list):
        content = _parts(content)
    if content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str | list):
        raise UsageError("a message has no text; it needs the field content or value, a string")
    extra = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    return {"role": role, "content": _check_text(content) if isinstance(content, str) else content, **extra}


def _parts(content: list[Any]) -> str | list[dict[str, str]]:
    """Return the parts of a message, or its text if it has no image."""
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any) -> dict[str, str]:
    """Return a part of a message: a text, or an image with its path."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": _check_text(part["text"])}
    if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("path"), str):
        return {"type": "image", "path": part["path"]}
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise UsageError(f"a message has a part of type {quote(kind)}, and only text and images with a path can be read")


def _with_images(messages: list[Message], images: Any) -> list[Message]:
    """Return the messages with images before the text of the first one of the user."""
    if not images:
        return messages
    paths = images if isinstance(images, list) else [images]
    if not all(isinstance(path, str) and path for path in paths):
        raise UsageError('"images" is no list of paths')
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None or not isinstance(messages[first]["content"], str):
        raise UsageError('"images" needs a message of the user with a text')
    start, *pieces = messages[first]["content"].split(MARK)
    if pieces and len(pieces) != len(paths):
        raise UsageError(f"the text has {len(pieces)} times {MARK} for {len(paths)} images")
    text = lambda piece: [{"type": "text", "text": piece}] if piece else []
    shown = [{"type": "image", "path": path} for path in paths]
    if pieces:
        parts = text(start) + [
            part for image, piece in zip(shown, pieces, strict=True) for part in (image, *text(piece))
        ]
    else:
        parts = shown + text(start)
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def with_folder(source: TextSource, folder: Path) -> TextSource:
    """Return a text or conversation whose paths of images are relative to a folder."""
    if not is_conversation(source):
        return source

    def move(part: Mapping[str, str]) -> Mapping[str, str]:
        return {**part, "path": str(folder / part["path"])} if part["type"] == "image" else part

    def move_all(message: Message) -> Message:
        content = message["content"]
        return message if isinstance(content, str) else {**message, "content": list(map(move, content))}

    messages: Any = source
    return list(map(move_all, messages))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is no text, but {quote(value)}")
    if not value.strip():
        raise UsageError(f"{name} is empty")
    return _check_text(value)


def _check_text(text: str) -> str:
    """Raise a UsageError for half of a surrogate pair, which escapes of JSON can contain."""
    if not is_text(text):
        raise UsageError("the text has half of a surrogate pair, which is no character")
    return text
