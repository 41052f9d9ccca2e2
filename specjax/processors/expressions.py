"""Regular expressions: their parts, and anchors at the ends of expressions that a complete text must match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class PatternError(ValueError):
    """The reason why an expression is not supported, as the end of a sentence."""


def any_of(parts: Sequence[str]) -> str:
    """Return an expression of the texts that one of the parts matches."""
    distinct = list(dict.fromkeys(parts))
    return distinct[0] if len(distinct) == 1 else f"(?:{'|'.join(distinct)})"


def repeat(low: int, high: int | None) -> str:
    """Return the suffix that repeats an expression `low` to `high` times. None is no limit."""
    return f"{{{low},{'' if high is None else high}}}"


_TOKEN = re.compile(
    r"""(?P<flags>\(\?[a-zA-Z-]+\)) | (?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?) | (?P<close>\)) | (?P<either>\|)
      | (?P<start>\^|\\A) | (?P<end>\$|\\z) | (?P<times>[*+?]\??|\{\d+(?:,\d*)?\}\??)
      | (?P<atom>\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\] | \\[pPxuU]\{[^}]*\} | \\. | .)""",
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str  # a group of _TOKEN
    text: str
    opening: int  # index of the bracket that opens the group around the token, or its own group; -1 without one
    closing: int  # index of the bracket that closes this group; the number of tokens without one


def without_anchors(pattern: str) -> str:
    """Remove `^` at the beginning and `$` at the end, which restrict nothing if the complete text must match.

    The syntax is that of Rust's regex crate.

    Raises: PatternError for an anchor inside.
    """
    tokens = _tokenize(pattern)
    for index, token in enumerate(tokens):
        if token.kind in ("start", "end") and not _is_at_edge(tokens, index):
            raise PatternError(f"the anchor {token.text} inside; only anchors at the ends are supported")
    return "".join(token.text for token in tokens if token.kind not in ("start", "end"))


def _tokenize(pattern: str) -> list[_Token]:
    matches = [(str(match.lastgroup), match[0]) for match in _TOKEN.finditer(pattern)]
    openings, closings, stack = [], {-1: len(matches)}, [-1]
    for index, (kind, _) in enumerate(matches):
        if kind == "open":
            stack.append(index)
        openings.append(stack[-1])
        if kind == "close" and len(stack) > 1:  # the compiler reports a bracket without its partner
            closings[stack.pop()] = index
    return [
        _Token(kind, text, opening, closings.get(opening, len(matches)))
        for (kind, text), opening in zip(matches, openings, strict=True)
    ]


def _is_at_edge(tokens: Sequence[_Token], index: int) -> bool:
    """Return True if no part of the text can be before a `^`, or after a `$`.

    The search goes outwards. It passes the brackets of groups that are not repeated, and other alternatives.
    """
    kind = tokens[index].kind
    step, bracket = (-1, "open") if kind == "start" else (1, "close")
    index += step
    while 0 <= index < len(tokens):
        token = tokens[index]
        if token.kind == "either":
            index = token.opening if kind == "start" else token.closing
            continue
        is_repeated = token.closing + 1 < len(tokens) and tokens[token.closing + 1].kind == "times"
        passes = (kind, "flags") if kind == "start" else (kind,)
        if token.kind not in passes and (token.kind != bracket or is_repeated):
            return False
        index += step
    return True
