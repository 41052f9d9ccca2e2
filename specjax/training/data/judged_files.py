"""Files of judged responses: one JSON object per line, with the first error of each response.

    {"prompt": "2 + 2?", "response": "It is 5.", "wrong": 6}

`wrong` is the place of the first wrong character in the response, counted from 0; null or absent: all is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote, read_text
from specjax.training.data.conversation_files import MAX_FILE_BYTES
from specjax.training.data.packing import TrainingText
from specjax.training.data.target_responses import start_chat

FORM = 'write {"prompt": "...", "response": "...", "wrong": 6}'


class JudgedResponse(NamedTuple):
    """A response with the position of its first error."""

    text: TrainingText
    wrong: int | None = None  # index in the text of the first wrong token; None: the response is correct


def read_judged(path: str | Path) -> list[dict[str, Any]]:
    """Read the entries of a file. Raises: UsageError that names the line of an entry that cannot be used."""
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path, MAX_FILE_BYTES).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{where} is no JSON; {FORM}") from None
        texts = [entry.get(name) or "" for name in ("prompt", "response")] if isinstance(entry, dict) else ["", ""]
        if not all(isinstance(text, str) and text for text in texts):
            raise UsageError(f"{where} has no prompt and response; {FORM}")
        wrong = entry.get("wrong")
        if wrong is not None and not (type(wrong) is int and 0 <= wrong < len(texts[1])):
            raise UsageError(
                f"{where} has wrong {quote(wrong)}, which must be the place of a character of the response, from 0 to "
                f"{len(texts[1]) - 1}, or null"
            )
        entries.append({"prompt": texts[0], "response": texts[1], "wrong": wrong})
    return entries


def check_judged(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise a UsageError if all responses of all files are right."""
    if all(entry["wrong"] is None for entry in entries):
        raise UsageError(f"--texts has no response with an error, and a judge needs right and wrong ones; {FORM}")


def to_judged(entry: dict[str, Any], tokenizer: Any, system: str | None = None) -> JudgedResponse:
    """Return the tokens of an entry. The first wrong token is the one that has the first wrong character."""
    prompt = list(tokenizer.chat(start_chat(entry["prompt"], system)))
    response = list(tokenizer.encode(entry["response"], special=False))
    wrong = entry["wrong"]
    if wrong is not None:
        right = tokenizer.decode(response)[:wrong]
        # A part of a character decodes to other characters, perhaps to several, and is no beginning of the text.
        prefixes = [i for i in range(len(response)) if right.startswith(tokenizer.decode(response[:i]))]
        wrong = len(prompt) + max(prefixes)
    return JudgedResponse(TrainingText((*prompt, *response), len(prompt)), wrong)
