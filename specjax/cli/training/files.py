"""Files of prompts and texts of `specjax train`, and checks of its folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.cli.options.common import parse_flag
from specjax.cli.options.prompts import LISTED
from specjax.cli.output.console import Console
from specjax.errors import require
from specjax.files.homes import in_home
from specjax.training.data.conversation_files import TextFile, read_text_file
from specjax.training.data.conversations import TextSource, is_conversation, pictures_of


class SourceFile(NamedTuple):
    """A file of prompts or texts, which is read before the models are loaded."""

    path: Path
    content: TextFile


def read_files(paths: Sequence[Path], flag: str) -> list[SourceFile]:
    """Read files of prompts or texts. Raises: UsageError that names the flag."""
    return [SourceFile(path, parse_flag(flag, read_text_file, path)) for path in paths]


def has_conversation(files: Sequence[SourceFile]) -> bool:
    """Return True if one of the texts is a conversation."""
    return any(is_conversation(source) for _, content in files for source in content.sources)


def has_picture(files: Sequence[SourceFile]) -> bool:
    """Return True if one of the conversations has an image."""
    sources = [source for _, content in files for source in content.sources]
    messages: Any = [source for source in sources if is_conversation(source)]
    return any(map(pictures_of, messages))


def check_folder(folder: Path | None, flag: str) -> None:
    """Raise a UsageError for a folder that cannot be written, without creating it."""
    if folder is None:
        return
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    require(existing.is_dir(), f"{flag}: {folder} cannot be written ({existing} is no folder); give another folder")
    require(
        os.access(existing, os.W_OK | os.X_OK),
        f"{flag}: {folder} cannot be written (no permission in {existing}); give another folder",
    )


def check_sources(out: Path, sources: Mapping[str, str | None], parts: Sequence[str] = ()) -> None:
    """Raise a UsageError if a run would overwrite a model that it reads.

    Args: sources: the model of each flag. parts: names of folders in `out` that the run writes too.
    """
    written = [folder.resolve() for folder in (out, *(out / part for part in parts))]
    for flag, source in sources.items():
        is_same = source is not None and in_home(source).resolve() in written
        require(not is_same, f"--out {out} is the folder of {flag}, which must not change; give another folder")


def list_sources(files: Sequence[SourceFile], log: Console) -> list[TextSource]:
    """Return the prompts or texts of all files, and print the entries that cannot be used."""
    for path, content in files:
        if content.bad:
            shown = "; ".join(f"{path}, {entry.number}: {entry.error}" for entry in content.bad[:LISTED])
            more = f"; and {len(content.bad) - LISTED} more" if len(content.bad) > LISTED else ""
            log.print(f"left out: {shown}{more}", soft_wrap=True)
    return [source for _, content in files for source in content.sources]
