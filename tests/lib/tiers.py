"""Which parametrizations run in `make test`; the others are of the tier `exhaustive`."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any, **options: Any):
    """One parametrization for the tier `exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)


def those(quick: Iterable[Any], values: Iterable[Any]) -> list:
    """The values, those that are not `quick` in the tier `exhaustive`."""
    return [value if value in quick else exhaustive(value) for value in values]
