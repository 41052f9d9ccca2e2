"""Files of serialized programs in a folder of this user.

The files are pickles, so reading one runs code. They are read only from a folder that belongs to this user and that
nobody else can write to. Only own files, which have a suffix of their own, are ever deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import stat
import warnings
from pathlib import Path
from typing import NamedTuple

from specjax.files.atomic import write_atomic
from specjax.files.homes import in_home
from specjax.files.private import create_private, explain_risk, read_private
from specjax.files.sizes import GIB

DIGEST = hashlib.sha256().digest_size
PROGRAMS, LAST = ".specjax-programs", ".specjax-last"
"""Suffixes of programs, and of the names of the programs that a label used last."""
OWN_FILE = re.compile(rf"[0-9a-f]{{64}}({PROGRAMS}|{LAST})")


class StoredPrograms(NamedTuple):
    """Content of a file: serialized programs."""

    programs: list[tuple]
    plain: tuple | None = None  # plain step, which runs until the last program is loaded


class ProgramFolder:
    """A folder of programs by name, with a size limit. It is created, with mode 0700, when something is written."""

    def __init__(self, folder: str | Path, gib: float):
        """Use a folder. Args: gib: size limit in GiB. The least recently used files are deleted first."""
        self.path, self.gib = in_home(folder), gib
        self._has_warned = False

    def read(self, name: str) -> StoredPrograms | None:
        """Read the programs of a name. Return None if they are missing, damaged or in a folder of others."""
        with contextlib.suppress(Exception):
            if self._is_safe():
                path = self.path / f"{name}{PROGRAMS}"
                content = read_private(path)
                if _digest(name, content[DIGEST:]) == content[:DIGEST]:
                    stored: StoredPrograms = pickle.loads(content[DIGEST:])
                    os.utime(path)
                    return stored
        return None

    def write(self, name: str, stored: StoredPrograms) -> None:
        """Write programs, and delete the least recently used ones above the size limit. Raises: OSError."""
        content = pickle.dumps(stored)
        if self._is_safe(creates=True):
            write_atomic(self.path / f"{name}{PROGRAMS}", _digest(name, content) + content)
            self._limit_size()

    def read_last(self, label: str) -> str | None:
        """Return the name of the programs that were last used with a label, or None."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self._is_safe():
                return read_private(self.path / f"{label}{LAST}").decode("ascii")
        return None

    def write_last(self, label: str, name: str) -> None:
        """Store the name of the programs of a label, if possible."""
        with contextlib.suppress(OSError):
            if self._is_safe(creates=True):
                write_atomic(self.path / f"{label}{LAST}", name.encode())

    def _is_safe(self, creates: bool = False) -> bool:
        """Return True if nobody else can change the folder. Warn once if somebody can.

        Args: creates: create a missing folder.

        Raises: OSError if the folder cannot be created.
        """
        risk = explain_risk(self.path)
        if creates and risk is None:
            create_private(self.path)
        if risk is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"compiled programs are not stored: {risk}", stacklevel=2)
        return risk is None

    def _limit_size(self) -> None:
        """Delete the least recently used files of this class above the size limit."""
        files = []
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):  # another process may delete files
                about = path.lstat()
                if OWN_FILE.fullmatch(path.name) and stat.S_ISREG(about.st_mode):
                    files.append((about.st_mtime, about.st_size, path))
        room = self.gib * GIB
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)


def _digest(name: str, content: bytes) -> bytes:
    """Return the digest of a file, which includes its name, so that no file serves under the name of another."""
    return hashlib.sha256(name.encode() + content).digest()
