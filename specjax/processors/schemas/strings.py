"""The `pattern` of a JSON schema as an expression of strings in JSON.

A pattern may match anywhere in a string. It uses the syntax of ECMAScript, and the characters that it matches are
escaped in JSON.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from specjax.processors.expressions import PatternError, any_of, repeat

Ranges = list[tuple[int, int]]  # of code points, ascending and apart

LAST = 0x10FFFE  # the last code point, U+10FFFF, marks the end of a text
SURROGATES = (0xD800, 0xDFFF)
ESCAPED = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
CONTROL = [(0x00, 0x1F), (0x7F, 0x9F)]  # written as an escape, or not at all
LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
DIGIT, WORD = [(0x30, 0x39)], [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACE = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
         (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]  # fmt: skip
FURTHER_SPACE = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]  # in one of the two only


@functools.cache
def _category(code: Any) -> Ranges:
    r"""Return the characters of `\d`, `\w`, `\s` or a complement, in ECMAScript and in Python's `re` alike.

    Validators use either. `re` counts the digits and letters of every alphabet, which ECMAScript does not.
    """
    ranges = {codes.CATEGORY_DIGIT: DIGIT, codes.CATEGORY_WORD: WORD, codes.CATEGORY_SPACE: SPACE}
    if code in ranges:
        return ranges[code]
    if code is codes.CATEGORY_NOT_SPACE:
        return _complement(SPACE + FURTHER_SPACE)
    ascii_ranges, is_inside = (DIGIT, str.isdecimal) if code is codes.CATEGORY_NOT_DIGIT else (WORD, str.isalnum)
    return _complement(ascii_ranges + [(point, point) for point in range(LAST + 1) if is_inside(chr(point))])


def in_json_string(pattern: Any) -> str:
    """Return an expression of the strings in which an ECMAScript pattern matches, as JSON writes them.

    Raises: PatternError for an invalid pattern, look-around, back-references, word boundaries and flags.
    """
    if not isinstance(pattern, str):
        raise PatternError("it must be a string")
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is invalid or not supported ({error})") from None
    if parsed.state.flags & ~re.UNICODE.value:
        raise PatternError("flags inside of a pattern are not supported")
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
        return any_of([_sequence(option, first, last) for option in argument[1]])
    if code is codes.SUBPATTERN:
        if argument[1] or argument[2]:
            raise PatternError("flags inside of a pattern are not supported")
        return f"(?:{_sequence(argument[3], first, last)})"
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, repeated = argument
        return f"(?:{_sequence(repeated)}){repeat(low, None if high == codes.MAXREPEAT else high)}"
    names = {
        codes.AT: "an anchor or a word boundary inside", codes.ASSERT: "look-around",
        codes.ASSERT_NOT: "look-around", codes.GROUPREF: "a back-reference",
    }  # fmt: skip
    raise PatternError(f"{names.get(code, str(code).lower())} is not supported")


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
        raise PatternError("it has a class without characters")
    return any_of(parts)


def _span(low: int, high: int) -> str:
    return rf"\x{{{low:x}}}" if low == high else rf"\x{{{low:x}}}-\x{{{high:x}}}"


_ANY_TEXT = f"{_class(_complement([]))}*"
