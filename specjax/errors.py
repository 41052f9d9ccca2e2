"""Errors that a user can fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UsageError(ValueError):
    """Invalid input. The message names the value and the fix. The command line prints it and exits with code 2."""


@contextlib.contextmanager
def optional_import(extra: str, purpose: str) -> Iterator[None]:
    """Guard the imports of an optional package.

    Raises: UsageError if the package is missing, with the extra that installs it, or if its import fails.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{purpose} the package {str(error.name).partition('.')[0]}; run pip install 'specjax[{extra}]'"
        ) from None
    except ImportError as error:
        raise UsageError(
            f"{purpose} packages of which one is here and does not import ({error}); run pip install --upgrade "
            f"'specjax[{extra}]'"
        ) from None


def require(condition: bool, message: str) -> None:
    """Raise a UsageError with `message` unless `condition` is true."""
    if not condition:
        raise UsageError(message)
