"""Errors that a user can fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UsageError(ValueError):
    """Error for invalid input. Its message names the value and the fix.

    The command line prints the message and exits with code 2.
    """


class CheckpointWarning(UserWarning):
    """Warning about the files of a model: fields that are not read, and assumptions where the files state nothing.

    The command line prints it as a note.
    """


@contextlib.contextmanager
def optional_import(extra: str, purpose: str) -> Iterator[None]:
    """Guard the imports of an optional package.

    Raises: UsageError that names the extra to install, if the package is missing or its import fails.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{purpose} the package {str(error.name).partition('.')[0]}; run pip install 'specjax[{extra}]'"
        ) from None
    except ImportError as error:
        raise UsageError(
            f"{purpose} a package that is installed but cannot be imported ({error}); run pip install --upgrade "
            f"'specjax[{extra}]'"
        ) from None


def require(condition: bool, message: str) -> None:
    """Raise a UsageError with `message` unless `condition` is true."""
    if not condition:
        raise UsageError(message)
