"""Regular expressions of ranges of integers, without leading zeros."""

from __future__ import annotations

from specjax.processors.expressions import any_of

ANY_INTEGER = "-?(?:0|[1-9][0-9]*)"


def integer_range(low: int | None, high: int | None) -> str | None:
    """Return an expression of the integers from `low` to `high`, or None without any. A bound of None is no bound."""
    if low is None and high is None:
        return ANY_INTEGER
    if low is not None and high is not None and low > high:
        return None
    parts = []
    if low is None or low < 0:  # the absolute values of the negative integers
        smallest = 1 if high is None or high >= 0 else -high
        parts.append(f"-{_at_least(smallest) if low is None else _between(smallest, -low)}")
    if high is None or high >= 0:
        smallest = 0 if low is None or low < 0 else low
        parts.append(_at_least(smallest) if high is None else _between(smallest, high))
    return any_of(parts)


def _at_least(low: int) -> str:
    """Return an expression of the integers from `low` >= 0 on: those with as many digits, and those with more."""
    digits = len(str(low))
    longer = f"[1-9][0-9]{{{digits},}}"
    return any_of([_between(low, 10**digits - 1), longer])


def _between(low: int, high: int) -> str:
    """Return an expression of the integers from `low` to `high`, 0 <= low <= high."""
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        smallest, largest = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
        parts.append(_same_length(str(max(low, smallest)), str(min(high, largest))))
    return any_of(parts)


def _same_length(low: str, high: str) -> str:
    """Return an expression of the numbers between two with equally many digits."""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    if len(low) == 1:
        return f"[{low}-{high}]"
    parts, first, last = [], int(low[0]), int(high[0])
    further = len(low) - 1
    if int(low[1:]):
        parts.append(low[0] + _same_length(low[1:], "9" * further))
        first += 1
    if high[1:] != "9" * further:
        parts.append(high[0] + _same_length("0" * further, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"{first if first == last else f'[{first}-{last}]'}[0-9]{{{further}}}")
    return any_of(parts)
