"""Calls of tools: the forms in which models write them, and the constraint of a text that must call one.

Two forms are read. Qwen and Hermes write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Llama 3 writes the
JSON object alone, with `parameters` instead of `arguments`. A model is asked for the form of its chat template.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.processors import schemas
from specjax.processors.expressions import any_of
from specjax.server.structured.constraints import Constraint, escape

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TAGGED, BARE = "tagged", "bare"
"""The two forms: with tags, and without."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: str  # JSON

    def document(self) -> dict[str, Any]:
        """Return the call in the form of the API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def form_of(tokenizer: Any) -> str:
    """Return the form of calls in the chat templates of a tokenizer, TAGGED if it has no other."""
    templates = [getattr(tokenizer, "chat_template", None), *getattr(tokenizer, "named_templates", {}).values()]
    text = "".join(map(str, templates))
    return BARE if OPEN not in text and ("python_tag" in text or '"parameters"' in text) else TAGGED


def required_call(functions: Mapping[str, Any], *, several: bool) -> Constraint:
    """Return the constraint of a text that is a call of one of the functions, or several calls.

    Args:
      functions: the JSON schema of the parameters of each function.
    """
    return Constraint("tools", json.dumps([list(functions.items()), several]))


def pattern_of_calls(text: str, form: str) -> str:
    """Return the expression of `required_call` in a form. Raises: UsageError for parameters that are not supported."""
    functions, several = json.loads(text)
    calls = []
    for name, parameters in functions:
        try:
            arguments = schemas.to_regex(parameters)
        except UsageError as error:
            raise UsageError(f"the parameters of {name} cannot be enforced: {error}") from None
        key = "parameters" if form == BARE else "arguments"
        calls.append(rf'\{{"name": {escape(json.dumps(name, ensure_ascii=False))}, "{key}": {arguments}\}}')
    call = any_of(calls)
    if form == BARE:
        return call
    call = rf"{OPEN}\n?{call}\n?{CLOSE}"
    return rf"(?:{call}\n?)+" if several else call


class ToolParser:
    """A reader of the text of a model, piece by piece, that separates calls of tools from other text.

    Only calls of the given functions are calls. Everything else is text.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._text = ""  # what is not returned yet
        self._is_start, self._is_after_call = True, False

    def feed(self, new: str) -> tuple[str, list[ToolCall]]:
        """Add text. Return the text that belongs to no call, and the complete calls."""
        self._text += new
        content = ""
        calls: list[ToolCall] = []
        while True:
            if self._is_start and (self._is_bare or not self._text.strip()):
                return content, calls  # read at the end
            place = self._text.find(OPEN)
            if place < 0:
                size = max((n for n in range(1, len(OPEN)) if self._text.endswith(OPEN[:n])), default=0)
                return content + self._take(len(self._text) - size), calls
            end = self._text.find(CLOSE, place)
            if end < 0:
                return content + self._take(place), calls
            content += self._take(place)
            size = end + len(CLOSE) - place
            call = self._call(self._text[len(OPEN) : end - place])
            if call is None:
                content += self._take(size)
            else:
                calls.append(call)
                self._text = self._text[size:]
                self._is_start, self._is_after_call = False, True

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that are left at the end."""
        text, self._text = self._text, ""
        if self._is_start and text.lstrip().startswith(("{", PYTHON_TAG)):
            calls = self._bare_calls(text.strip().removeprefix(PYTHON_TAG))
            return ("", calls) if calls else (text, [])
        call = self._call(text.removeprefix(OPEN)) if text.startswith(OPEN) else None
        text = text.lstrip() if self._is_after_call else text
        return (text, []) if call is None else ("", [call])

    @property
    def _is_bare(self) -> bool:
        text = self._text.lstrip()
        return text.startswith("{") or text.startswith(PYTHON_TAG[: max(len(text), 1)])

    def _take(self, size: int) -> str:
        """Remove text from the beginning of what is left, and return it. Spaces after calls are dropped."""
        taken, self._text = self._text[:size], self._text[size:]
        if self._is_after_call:
            taken = taken.lstrip()
        if taken:
            self._is_start = self._is_after_call = False
        return taken

    def _call(self, text: str) -> ToolCall | None:
        try:
            return self._of_value(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def _bare_calls(self, text: str) -> list[ToolCall]:
        """Return the calls of JSON objects one after the other, or none if there is anything else."""
        decoder, calls = json.JSONDecoder(), []
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = self._of_value(value)
            if call is None:
                return []
            calls.append(call)
            text = text[end:].lstrip("; \n")
        return calls

    def _of_value(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", name, text)
