"""Conversations as text, with protection against control tokens that messages contain."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.loading.tokenizers.templates.rendering import (
    INVALID_MESSAGES,
    SKIP_TEMPLATE,
    Conversation,
    Messages,
    render,
)

Spans = list[tuple[int, int]]

PROBE = "probe of a template"
"""A content of a message by which it is seen what a template reads."""


def appears_in_template(template: str, piece: str) -> bool:
    """Return True if a template contains a token that is more than spaces or a letter, some of which are tokens too."""
    return len(piece.strip()) > 2 and piece in template


def fit_contents(template: str, messages: Messages, names: Mapping[str, str]) -> Messages:
    """Return messages with texts in the form that a template reads: strings, or else lists of parts.

    Some templates of models that read images loop over parts, and would drop a string without an error.
    """
    if _reads_strings(template, tuple(sorted(names.items()))):
        return messages

    def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message

    return list(map(in_parts, messages))


@functools.lru_cache(maxsize=16)
def _reads_strings(template: str, names: tuple[tuple[str, str], ...]) -> bool:
    """Return False if a template drops a string and writes the same text in a part."""
    if "image" not in template:
        return True
    contents: list[Any] = [PROBE, [{"type": "text", "text": PROBE}]]
    write = lambda content: render(template, Conversation([{"role": "user", "content": content}]), dict(names))
    try:
        as_string, as_part = map(write, contents)
    except UsageError:
        return True
    return PROBE in as_string or PROBE not in as_part


class _Texts(NamedTuple):
    """The parts of a conversation whose texts are protected: the messages, and variables with texts inside, as tools.

    Variables that are texts themselves choose what a template does. They are from the programmer, and not protected.
    """

    values: list[Any]
    by_model: list[bool]  # the model wrote the part

    @classmethod
    def of(cls, conversation: Conversation) -> _Texts:
        messages = list(conversation.messages)
        nested = [conversation.variables[name] for name in _nested(conversation)]
        authors = [message.get("role") == "assistant" for message in messages]
        return cls([*messages, *nested], authors + [False] * len(nested))

    def put(self, conversation: Conversation, values: list[Any]) -> Conversation:
        """Return the conversation with other values in the places of these."""
        count = len(conversation.messages)
        nested = zip(_nested(conversation), values[count:], strict=True)
        return Conversation(values[:count], {**conversation.variables, **dict(nested)})

    def dump(self, values: list[Any]) -> str:
        """Return values as JSON, to look for characters in them. Raises: UsageError for values without an end."""
        try:
            return json.dumps(values, ensure_ascii=False, default=str)
        except (ValueError, RecursionError):
            raise UsageError(INVALID_MESSAGES) from None


def _nested(conversation: Conversation) -> list[str]:
    return [name for name, value in conversation.variables.items() if isinstance(value, Mapping | list | tuple)]


def split_control_tokens(conversation: Conversation, find: Callable[..., Spans]) -> tuple[Conversation, str | None]:
    """Split control tokens that are written out in a conversation.

    Args:
      find: (text, by_model) -> the spans of a text that the tokenizer would read as control tokens.

    Returns: the conversation with a mark character in each such token, and that character; the unchanged conversation
    and None if there are none. A template sees the complete text, so that it can trim it or compare its first word.
    """
    texts = _Texts.of(conversation)
    contents = texts.dump(texts.values)
    mark = next(chr(code) for code in range(0x10FFFF, 0, -1) if chr(code) not in contents)
    finders = [functools.partial(find, by_model=by_model) for by_model in texts.by_model]
    for value, finder in zip(texts.values, finders, strict=True):
        _check_names(value, finder)
    marked = [_mark_tokens(value, mark, finder) for value, finder in zip(texts.values, finders, strict=True)]
    return texts.put(conversation, marked), mark if mark in texts.dump(marked) else None


def _check_names(value: Any, find: Callable[[str], Spans]) -> None:
    """Check that roles, types and keys contain no control tokens. Templates compare these instead of writing them.

    Raises: UsageError if they do.
    """
    if isinstance(value, Mapping):
        names = [*value, *(name for key, child in value.items() if _is_name(key, child) for name in _listed(child))]
        if any(isinstance(name, str) and find(name) for name in names):
            raise UsageError(
                "a role, type or key of the messages or variables contains a control token, which only the template "
                "may write"
            )
    for child in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_names(child, find)


def _listed(value: str | list | tuple) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _is_name(key: Any, value: Any) -> bool:
    """Return True for a role or a type, which can be a list of types.

    A JSON schema can describe an argument called "role" or "type". Its value is an object, whose texts are protected.
    """
    is_list = isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
    return key in ("role", "type") and (isinstance(value, str) or is_list)


def _mark_tokens(x: Any, mark: str, find: Callable[[str], Spans]) -> Any:
    return _map_texts(x, lambda text: mark.join(_split_at_tokens(text, find)))


def _map_texts(x: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text except roles and types."""
    if isinstance(x, str):
        return change(x)
    if isinstance(x, Mapping):
        return {key: value if _is_name(key, value) else _map_texts(value, change) for key, value in x.items()}
    return [_map_texts(value, change) for value in x] if isinstance(x, list | tuple) else x


def _split_at_tokens(text: str, find: Callable[[str], Spans]) -> list[str]:
    """Split a text into pieces without control tokens, after the first character of each one."""
    cuts = []
    for start, stop in find(text):
        at = start + len(text[start:stop]) - len(text[start:stop].lstrip()) + 1
        if at >= stop:
            raise UsageError(
                f'the prompt has the control token "{text[start:stop]}", which the template alone may write; remove it'
            )
        cuts.append(at)
    if not cuts:
        return [text]
    return [part for a, b in itertools.pairwise((0, *cuts, len(text))) for part in _split_at_tokens(text[a:b], find)]


class MessageRegion(NamedTuple):
    """A region of a rendered conversation with text of a message. An empty region is a border of a message."""

    start: int
    stop: int
    by_model: bool


def split_conversation(
    text: str,
    mark: str | None,
    conversation: Conversation,
    render_conversation: Callable[[Conversation], str],
    find: Callable[..., Spans],
) -> list[str]:
    """Split a conversation into parts so that every control token within a part comes from the template.

    It is not enough that no message contains a control token, because a template joins texts and removes words from
    them. So the conversation is rendered again with brackets around every text, characters that occur nowhere else.
    They show the author of each part.

    Args:
      text: the rendered conversation.
      mark: character at which it is already split.
      conversation: the conversation that was rendered.
      render_conversation: renders a conversation.
      find: as for `split_control_tokens`.

    Raises: UsageError if the brackets change the text, and then also its control tokens.
    """
    enclosed, brackets = _add_brackets(conversation)
    bracketed = render_conversation(enclosed)
    without_brackets, regions = _find_regions(bracketed, brackets)
    if without_brackets == text:
        parts = _split_foreign_tokens(text, regions, find)
        return [part for piece in parts for part in piece.split(mark)] if mark else parts
    tokens_of = lambda text: [text[start:stop].strip() for start, stop in find(text, by_model=False)]
    if tokens_of(text) != tokens_of(bracketed):
        raise UsageError(
            "the model's chat template builds control tokens from the text of these messages, which only it may "
            f"write; change the messages, {SKIP_TEMPLATE}"
        )
    return text.split(mark) if mark else [text]


def _add_brackets(conversation: Conversation) -> tuple[Conversation, dict[str, tuple[str, bool]]]:
    """Put brackets around the texts of a conversation, inside of outer spaces.

    Templates that trim a text or compare its first word then still work. Returns: the conversation, and for each
    bracket its counterpart and whether the model wrote the text.
    """
    texts = _Texts.of(conversation)
    contents = texts.dump(texts.values)
    free = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in contents)
    brackets: dict[str, tuple[str, bool]] = {}

    def change(text: str, by_model: bool) -> str:
        inner = text.strip()
        left, right = (next(free, ""), next(free, "")) if inner else ("", "")
        if inner and not right:
            raise UsageError("the conversation has too many texts; leave some messages out")
        brackets.update({left: (right, by_model), right: (left, by_model)} if inner else {})
        leading, _, trailing = text.partition(inner) if inner else (text, "", "")
        return f"{leading}{left}{inner}{right}{trailing}"

    pairs = zip(texts.values, texts.by_model, strict=True)
    enclosed = [_map_texts(value, functools.partial(change, by_model=by_model)) for value, by_model in pairs]
    return texts.put(conversation, enclosed), brackets


def _find_regions(text: str, brackets: Mapping[str, tuple[str, bool]]) -> tuple[str, list[MessageRegion]]:
    """Return the text without brackets, and the regions between them. A bracket without its counterpart is a border."""
    pieces, at, regions = [], 0, []
    starts: dict[str, int] = {}
    for piece in re.split(f"([{''.join(brackets)}])", text) if brackets else [text]:
        if piece not in brackets:
            pieces.append(piece)
            at += len(piece)
            continue
        other, by_model = brackets[piece]
        regions.append(MessageRegion(starts.pop(other, at), at, by_model))
        starts[piece] = at
    return "".join(pieces), regions


def _split_foreign_tokens(text: str, regions: list[MessageRegion], find: Callable[..., Spans]) -> list[str]:
    """Split the text after the first character of each control token that is not entirely the template's."""
    cuts, pending = [0, len(text)], [(0, len(text))]
    while pending:
        begin, end = pending.pop()
        piece = text[begin:end]
        model_tokens = set(find(piece, by_model=True))
        new_cuts = []
        for start, stop in find(piece, by_model=False):
            token = piece[start:stop]
            first = begin + start + len(token) - len(token.lstrip())
            last = first + len(token.strip())
            touched = [region for region in regions if region.start < last and first < region.stop]
            if touched and ((start, stop) in model_tokens or not all(region.by_model for region in touched)):
                new_cuts.append(first + 1)
        if new_cuts:
            cuts += new_cuts
            pending += itertools.pairwise((begin, *new_cuts, end))
    return [text[a:b] for a, b in itertools.pairwise(sorted(cuts))]
