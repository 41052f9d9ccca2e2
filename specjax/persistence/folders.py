"""Folders of checkpoints, local or in a bucket: their paths, their files, and errors in one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import re

from specjax.errors import UsageError
from specjax.files.untrusted import check_regular


def absolute(folder: str | os.PathLike) -> str:
    """Return the path of a folder, or the address of a bucket. `~` is the user's home."""
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def path_of(folder: str | os.PathLike):
    """Return the path of a folder or a bucket, with the methods of `pathlib.Path`."""
    from etils import epath  # installed with Orbax

    return epath.Path(absolute(folder))


@contextlib.contextmanager
def guarded_write(folder):
    """Convert errors of the file system to UsageErrors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{folder} cannot be written ({reason}); give a writable folder") from error
    except ValueError as error:  # TensorStore reports a full disk in this form
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        reason = os.strerror(int(code[1]))
        raise UsageError(f"{folder} cannot be written ({reason}); free some space, or give another folder") from error


def make_folder(folder) -> None:
    """Create the folder. If Orbax cannot create it, its threads wait for minutes."""
    with guarded_write(folder):
        path = path_of(folder)
        path.mkdir(parents=True, exist_ok=True)
        if "://" not in absolute(folder) and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_files(folder) -> None:
    """Check that all entries are regular files, since reading a pipe may never end. Raises: UsageError."""
    for parent, _, names in os.walk(absolute(folder)):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another host may delete files
                check_regular(os.path.join(parent, name))
