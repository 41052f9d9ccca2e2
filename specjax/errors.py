"""Errors that a user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UsageError(ValueError):
    """One sentence that names the flag or field at fault and the fix. The command line prints it and exits with 2."""


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Around the imports of an optional package. Raises: UsageError where it is missing, with the extra that has it, or
    where it is there and does not import."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} the package {str(error.name).partition('.')[0]}; run pip install 'specjax[{extra}]'"
        ) from None
    except ImportError as error:
        raise UsageError(
            f"{what} packages of which one is here and does not import ({error}); run pip install --upgrade "
            f"'specjax[{extra}]'"
        ) from None


def require(holds: bool, sentence: str) -> None:
    """Raises: UsageError with the sentence unless it holds."""
    if not holds:
        raise UsageError(sentence)
