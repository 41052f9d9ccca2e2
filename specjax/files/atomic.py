"""Where specjax keeps what it need not compute twice."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def cache_folder() -> Path:
    """The folder of this user on this machine; it need not exist."""
    home = Path.home()
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".cache"
    return base / "specjax"


def share(path: Path) -> None:
    """Let others read a file that was made for this user alone, as far as this process lets them. Raises: OSError."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_tensors(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str] | None = None) -> None:
    """A safetensors file of arrays, whole or not at all. about: words of its header.

    Raises: OSError, SafetensorError.
    """
    from safetensors.flax import save_file

    part = path.with_name(f"{path.name}.part")
    try:
        save_file(dict(tensors), part, dict(about or {"format": "pt"}))
        share(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all of it is there, whoever else writes it. Raises: OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        share(Path(temporary))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_whole(path: Path, content: bytes) -> None:
    """The file, whole or not at all; its folder is made. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write(content)
