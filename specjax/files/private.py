"""Folders that only this user can write to, for files that are executed when they are read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MODE = 0o700
"""Permissions of new folders."""
WRITABLE = stat.S_IWGRP | stat.S_IWOTH
"""Permissions with which other users can change a file."""


def create_private(folder: Path) -> None:
    """Create a folder and its missing parents, readable for this user only. Raises: OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            with contextlib.suppress(FileExistsError):  # another process has created it
                path.mkdir(MODE)


def explain_risk(folder: Path) -> str | None:
    """Return the reason why other users could replace the files of a folder, which may not exist yet, or None.

    The folder must belong to this user, and nobody else may write to it. Its parents belong to this user or to root.
    Another user who can write to a parent could replace the folder, unless the sticky bit prevents it. The user's own
    group may write to parents, because many systems give each user a group. Systems without owners return None.

    Raises: OSError if a folder cannot be inspected.
    """
    if not hasattr(os, "geteuid"):
        return None
    user, group, folder = os.geteuid(), os.getegid(), folder.resolve()
    if folder.exists():
        about = folder.stat()
        if about.st_uid != user:
            return f"{folder} belongs to another user"
        if about.st_mode & WRITABLE:
            return f"other users can write to {folder}; run chmod 700 on it"
    for parent in filter(Path.exists, folder.parents):
        about = parent.stat()
        writable = about.st_mode & WRITABLE
        if about.st_gid == group:
            writable &= ~stat.S_IWGRP
        if about.st_uid not in (0, user) or (writable and not about.st_mode & stat.S_ISVTX):
            return f"other users can replace {folder}, because they can write to {parent}"
    return None


def read_private(file: Path) -> bytes:
    """Return the content of a regular file that belongs to this user and that nobody else can write to.

    The permissions are those of the opened file, so a file that is replaced meanwhile is not read. Raises: OSError.
    """
    with _opened(file) as descriptor:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise PermissionError(f"{file} is not a regular file")
        if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & WRITABLE):
            raise PermissionError(f"other users can change {file}")
        with open(descriptor, "rb", closefd=False) as content:
            return content.read()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    # O_NONBLOCK: opening a pipe would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(file, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
