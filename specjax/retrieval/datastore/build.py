"""Construction of a datastore, shard by shard in a temporary folder that is renamed when it is complete."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import check_regular
from specjax.retrieval.datastore import corpus
from specjax.retrieval.datastore.files import (
    FORMAT,
    META,
    SUFFIXES,
    TOKENS,
    VERSION,
    compute_checksum,
    file_dtypes,
    fingerprint,
    open_datastore,
    read_meta,
    write_meta,
)
from specjax.retrieval.datastore.store import SHARD_TOKENS, Datastore, make_shard, split_shards, token_dtype


def build(
    files: Sequence[str | Path],
    out: str | Path,
    tokenizer,
    *,
    fields: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], object] = lambda done, total: None,
    notify: Callable[[str], object] = lambda message: None,
) -> Datastore:
    """Tokenize files, sort their suffixes and write the folder `out`.

    The text is read twice, first to count and hash it. An interrupted build resumes after its last complete shard if it
    is started again with the same text, tokenizer and options. Otherwise it starts over. Existing shards are compared
    with their checksums: a damaged shard and all later ones are rebuilt. Memory: 20 to 50 bytes per token of one shard.

    Args:
      tokenizer: as returned by `specjax.load`; it encodes without control tokens around a text.
      fields: see `corpus.read`. shard_tokens: places per shard.
      progress: called with the bytes read so far and the bytes of all files. notify: called with messages for the user.

    Returns: the opened datastore.

    Raises: UsageError for bad files or options, or if `out` exists.
    """
    paths, out = [in_home(file) for file in files], in_home(out)
    if out.exists():
        raise UsageError(f"{out} already exists; remove it or choose another folder")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"the folder {out.absolute().parent} does not exist; create it first")
    vocab_size = len(tokenizer.vocab)
    summary = corpus.survey(corpus.read(paths, fields))
    if not summary.documents:
        raise UsageError("the files contain no text; give at least one document that is not blank")
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": fingerprint(tokenizer.vocab),
        "vocab_size": vocab_size,
        "shard_tokens": shard_tokens,
        "fields": list(fields),
        "text": summary.digest,
        "documents": summary.documents,
        "bytes": summary.size,
    }
    part = out.absolute().parent / f".{out.name}.part"
    meta = _resume(part, plan, notify)
    used, place = meta["shards"][-1]["next"] if meta["shards"] else (0, 0)

    blocks = _report_progress(corpus.read(paths, fields), summary.size, progress)
    end = token_dtype(vocab_size).type(vocab_size)

    def pieces():
        for block in itertools.islice(blocks, used, None):
            ids = np.array(tokenizer.encode(block.text, special=False), np.int64)
            yield np.append(ids, end) if block.ends else ids

    with open(part / TOKENS, "ab") as tokens_file, open(part / SUFFIXES, "ab") as suffixes_file:
        for tokens, pieces_used, place_after in split_shards(pieces(), vocab_size, shard_tokens, place):
            shard = make_shard(tokens)
            checksums = []
            for file, array in zip((tokens_file, suffixes_file), shard, strict=True):
                stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
                file.write(stored.data)
                file.flush()
                os.fsync(file.fileno())
                checksums.append(compute_checksum(stored))
            entry = {"tokens": len(tokens), "checksums": checksums, "next": [used + pieces_used, place_after]}
            meta["shards"].append(entry)
            write_meta(part, meta)
    write_meta(part, meta | {"complete": True})
    os.replace(part, out)
    return open_datastore(out, verify=False)  # old shards were verified on resuming, new ones were just written


def _resume(part: Path, plan: dict[str, Any], notify: Callable[[str], object]) -> dict[str, Any]:
    """Return the metadata of an interrupted build of this plan, with its files cut to the complete shards."""
    if part.is_symlink() or (part.exists() and not part.is_dir()) or _has_foreign_files(part):
        raise UsageError(f"{part} does not come from an interrupted build; move it away or choose another folder")
    if part.exists():
        meta = None
        with contextlib.suppress(UsageError):
            meta = read_meta(part)
        if meta is not None and {name: meta.get(name) for name in plan} == plan:
            shards = _truncate(part, meta)
            lost = len(meta["shards"]) - len(shards)
            if shards or not lost:
                again = f"; shard {len(shards)} is damaged, so it and all later ones are rebuilt" if lost else ""
                notify(f"resuming an interrupted build after {len(shards)} finished shards{again}")
                return meta | {"complete": False, "shards": shards}
        notify("an interrupted build of this folder is damaged or used other text or options; starting over")
        shutil.rmtree(part)
    part.mkdir()
    meta = plan | {"complete": False, "shards": []}
    write_meta(part, meta)
    return meta


def _has_foreign_files(part: Path) -> bool:
    """Return True if the folder contains a file that no build writes, or a symbolic link."""
    names = {TOKENS, SUFFIXES, META, f"{META}.new"}
    return part.is_dir() and any(entry.is_symlink() or entry.name not in names for entry in part.iterdir())


def _truncate(part: Path, meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the leading shards whose checksums match, and truncate the files after them."""
    files = {part / name: dtype for name, dtype in file_dtypes(meta["vocab_size"]).items()}
    shards: list[dict[str, Any]] = []
    places = 0
    for file in files:
        file.touch()
        check_regular(file)
    for entry in meta["shards"]:
        if (part / TOKENS).stat().st_size < (places + entry["tokens"]) * files[part / TOKENS].itemsize:
            break
        arrays = [
            np.fromfile(file, dtype, entry["tokens"], offset=places * dtype.itemsize) for file, dtype in files.items()
        ]
        if [compute_checksum(array) for array in arrays] != entry["checksums"]:
            break
        shards.append(entry)
        places += entry["tokens"]
    for file, dtype in files.items():
        os.truncate(file, places * dtype.itemsize)
    return shards


def _report_progress(blocks, total: int, progress: Callable[[int, int], object]):
    done = 0
    for block in blocks:
        yield block
        done += block.size
        progress(done, total)
