"""Paths that begin with a home folder."""

import os
from pathlib import Path


def in_home(path: str | Path) -> Path:
    """Return the path with `~` replaced by the home folder. Of an unknown user it stays, as in a shell.

    `Path.expanduser` raises a RuntimeError there.
    """
    return Path(os.path.expanduser(path))
