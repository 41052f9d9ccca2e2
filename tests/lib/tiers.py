"""The tier `exhaustive`, whose tests `make test` leaves out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def exhaustive(*values: Any, **options: Any):
    """Return one parametrization for the tier `exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)


def those(quick: Iterable[Any], values: Iterable[Any]) -> list:
    """The values, those that are not `quick` in the tier `exhaustive`. Every process needs the same order."""
    assert not isinstance(values, set | frozenset), "sort the values, because workers must collect equal tests"
    return [value if value in quick else exhaustive(value) for value in values]


REPEATED = frozenset(Path(__file__).with_name("repeated.txt").read_text(encoding="utf-8").split("\n"))
"""Tests that take longest. Other tests carry their proof for another setting, for a method of the same family or by a
cheaper check of the same rule. Of each proof the cheapest form stays, with its mutant. On two cores, `make
test` took 35 minutes of 2,998 tests, then 20 to 23 minutes of 4,957, each time more than half of it in these."""


def is_repeated(nodeid: str) -> bool:
    """Return whether REPEATED names the test."""
    return nodeid.removeprefix("tests/") in REPEATED
