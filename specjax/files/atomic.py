"""The user's cache folder, and files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def cache_folder() -> Path:
    """Return the cache folder of this user on this machine. It may not exist yet."""
    home = Path.home()
    if os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):  # the specification ignores relative paths
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".cache"
    return base / "specjax"


def apply_umask(path: Path) -> None:
    """Set the permissions of a file that only this user can read to those of the umask. Raises: OSError."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_tensors(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file completely or not at all. `about` is the metadata of its header.

    Raises: OSError, SafetensorError.
    """
    from safetensors.flax import save_file

    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        save_file(dict(tensors), part, dict(about or {"format": "pt"}))
        apply_umask(part)
        part.replace(path)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once it is complete, even with concurrent writers. Raises: OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        apply_umask(Path(temporary))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, and create its folder. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path) as file:
        file.write(content)
