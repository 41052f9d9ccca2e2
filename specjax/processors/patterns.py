"""Regular expressions of complete texts: anchors, and the patterns of strings in JSON.

Decoding matches a complete text, so `^` at its beginning and `$` at its end restrict nothing and are removed. The
`pattern` of a JSON schema may match anywhere in a string. It uses the syntax of ECMAScript, and the characters that it
matches are escaped in JSON.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from specjax.errors import UsageError

_TOKEN = re.compile(
    r"""(?P<group>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]+(?=\))))?)
      | (?P<close>\)) | (?P<either>\|)
      | (?P<start>\^|\\A) | (?P<end>\$|\\z)
      | (?P<times>[*+?]\??|\{\d+(?:,\d*)?\}\??)
      | (?P<atom>\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\] | \\[pPxuU]\{[^}]*\} | \\. | .)""",
    re.VERBOSE | re.DOTALL,
)


class AnchorError(ValueError):
    """An anchor that is not at the beginning or at the end of an expression."""


def without_anchors(pattern: str) -> str:
    """Remove anchors at the beginning and at the end of an expression that the complete text must match.

    Raises: AnchorError for an anchor inside.
    """
    tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(pattern)]
    parts: list[str] = []
    place = 0

    def alternatives(at_start: bool, at_end: bool) -> None:
        """Read the alternatives of a group up to its closing bracket."""
        nonlocal place
        while place < len(tokens) and tokens[place][0] != "close":
            if tokens[place][0] == "either":
                parts.append("|")
                place += 1
            sequence(at_start, at_end)

    def sequence(at_start: bool, at_end: bool) -> None:
        """Read one alternative. `at_start` and `at_end`: it begins or ends the whole text."""
        nonlocal place
        last = _last_item(tokens, place)
        while place < len(tokens) and tokens[place][0] not in ("close", "either"):
            kind, text = tokens[place]
            is_last = at_end and place >= last
            place += 1
            if kind in ("start", "end"):
                if not (at_start if kind == "start" else is_last):
                    raise AnchorError(
                        f"the anchor {text} inside; only anchors at the beginning and at the end are supported"
                    )
                continue
            parts.append(text)
            if kind == "group":
                is_repeated = _is_repeated(tokens, _closing(tokens, place))
                alternatives(at_start and not is_repeated, is_last and not is_repeated)
                if place < len(tokens):
                    parts.append(tokens[place][1])
                    place += 1
                if text.startswith("(?") and not text.endswith((":", ">")):
                    continue  # flags match no text
            at_start = False

    while place < len(tokens):
        alternatives(True, True)
        if place < len(tokens):  # a closing bracket too many: the compiler reports it
            parts.append(tokens[place][1])
            place += 1
    return "".join(parts)


def _closing(tokens: Sequence[tuple[str, str]], place: int) -> int:
    """Return the index of the bracket that closes a group whose content begins at `place`."""
    depth = 1
    while place < len(tokens):
        depth += {"group": 1, "close": -1}.get(tokens[place][0], 0)
        if not depth:
            return place
        place += 1
    return place


def _is_repeated(tokens: Sequence[tuple[str, str]], closing: int) -> bool:
    return closing + 1 < len(tokens) and tokens[closing + 1][0] == "times"


def _last_item(tokens: Sequence[tuple[str, str]], place: int) -> int:
    """Return the index of the last item of an alternative, not counting anchors at its end."""
    last = place
    while place < len(tokens) and tokens[place][0] not in ("close", "either"):
        kind = tokens[place][0]
        if kind not in ("times", "end"):
            last = place
        place = _closing(tokens, place + 1) + 1 if kind == "group" else place + 1
    return last


# --- the pattern of a string in JSON ---

Ranges = list[tuple[int, int]]  # of code points, ascending and apart

LAST = 0x10FFFE  # the last code point, U+10FFFF, marks the end of a text
SURROGATES = (0xD800, 0xDFFF)
ESCAPED = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
CONTROL = [(0x00, 0x1F), (0x7F, 0x9F)]  # written as an escape, or not at all
LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_DIGIT, _WORD = [(0x30, 0x39)], [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
          (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]  # fmt: skip
_FURTHER_SPACE = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]  # in one of the two only


@functools.cache
def _category(code: Any) -> Ranges:
    r"""Return the characters of `\d`, `\w`, `\s` or a complement, in ECMAScript and in Python's `re` alike.

    Validators use either. `re` counts the digits and letters of every alphabet, which ECMAScript does not.
    """
    if code in (codes.CATEGORY_DIGIT, codes.CATEGORY_WORD, codes.CATEGORY_SPACE):
        return {codes.CATEGORY_DIGIT: _DIGIT, codes.CATEGORY_WORD: _WORD}.get(code, _SPACE)
    if code is codes.CATEGORY_NOT_SPACE:
        return _complement(_SPACE + _FURTHER_SPACE)
    is_inside = str.isdecimal if code is codes.CATEGORY_NOT_DIGIT else str.isalnum
    inside = [(point, point) for point in range(LAST + 1) if is_inside(chr(point))]
    return _complement(inside + (_DIGIT if code is codes.CATEGORY_NOT_DIGIT else _WORD))


def in_json_string(pattern: Any) -> str:
    """Return an expression of the strings in which an ECMAScript pattern matches, as JSON writes them.

    Raises: UsageError for an invalid pattern, look-around, back-references, word boundaries and flags.
    """
    if not isinstance(pattern, str):
        raise UsageError("it must be a string")
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"it is invalid or not supported ({error})") from None
    if parsed.state.flags & ~re.UNICODE.value:
        raise UsageError("flags inside of a pattern are not supported")
    return _sequence(parsed, True, True)


_STARTS = ((codes.AT, codes.AT_BEGINNING), (codes.AT, codes.AT_BEGINNING_STRING))
_ENDS = ((codes.AT, codes.AT_END), (codes.AT, codes.AT_END_STRING))
_GROUPS = (codes.BRANCH, codes.SUBPATTERN)


def _sequence(items: Iterable, first: bool = False, last: bool = False) -> str:
    """Return the expression of a sequence. `first` and `last`: it begins or ends the pattern, where any text may be."""
    items, prefix, suffix = list(items), "", ""
    if first and items and items[0] in _STARTS:
        items, first = items[1:], False
    if last and items and items[-1] in _ENDS:
        items, last = items[:-1], False
    if first and not (items and items[0][0] in _GROUPS):
        prefix, first = _ANY_TEXT, False
    if last and not (items and items[-1][0] in _GROUPS):
        suffix, last = _ANY_TEXT, False
    end = len(items) - 1
    parts = [_item(code, argument, first and i == 0, last and i == end) for i, (code, argument) in enumerate(items)]
    return "".join([prefix, *parts, suffix])


def _item(code: Any, argument: Any, first: bool, last: bool) -> str:
    if code is codes.LITERAL:
        return _class([(argument, argument)])
    if code is codes.NOT_LITERAL:
        return _class(_complement([(argument, argument)]))
    if code is codes.ANY:
        return _class(_complement(LINE_ENDS))
    if code is codes.IN:
        return _class(_set(argument))
    if code is codes.BRANCH:
        return f"(?:{'|'.join(_sequence(option, first, last) for option in argument[1])})"
    if code is codes.SUBPATTERN:
        if argument[1] or argument[2]:
            raise UsageError("flags inside of a pattern are not supported")
        return f"(?:{_sequence(argument[3], first, last)})"
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, repeated = argument
        return f"(?:{_sequence(repeated)}){{{low},{'' if high == codes.MAXREPEAT else high}}}"
    names = {
        codes.AT: "an anchor or a word boundary inside", codes.ASSERT: "look-around",
        codes.ASSERT_NOT: "look-around", codes.GROUPREF: "a back-reference",
    }  # fmt: skip
    raise UsageError(f"{names.get(code, str(code).lower())} is not supported")


def _set(parts: Sequence) -> Ranges:
    """Return the ranges of a character class."""
    ranges: Ranges = []
    is_negated = False
    for code, argument in parts:
        if code is codes.NEGATE:
            is_negated = True
        elif code is codes.LITERAL:
            ranges.append((argument, argument))
        elif code is codes.RANGE:
            ranges.append(argument)
        else:
            ranges += _category(argument)
    return _complement(ranges) if is_negated else ranges


def _complement(ranges: Ranges) -> Ranges:
    """Return the code points outside of some ranges."""
    gaps, start = [], 0
    for low, high in sorted([*ranges, SURROGATES]):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return [*gaps, (start, LAST)] if start <= LAST else gaps


def _class(ranges: Ranges) -> str:
    """Return an expression of the characters of some ranges as JSON writes them, or of no text without any."""
    plain = _complement(_complement(ranges) + CONTROL + [(point, point) for point in (0x22, 0x5C)])
    parts = [f"[{''.join(_span(low, high) for low, high in plain)}]"] if plain else []
    contains = lambda point: any(low <= point <= high for low, high in ranges)
    parts += [rf"\\{re.escape(letter)}" for point, letter in ESCAPED.items() if contains(point)]
    if not parts:  # other control characters are only written where nothing else fits
        parts = [rf"\\u{point:04x}" for point in range(0x20) if contains(point)]
    if not parts:
        raise UsageError("it has a class without characters")
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _span(low: int, high: int) -> str:
    return rf"\x{{{low:x}}}" if low == high else rf"\x{{{low:x}}}-\x{{{high:x}}}"


_ANY_TEXT = f"{_class(_complement([]))}*"
