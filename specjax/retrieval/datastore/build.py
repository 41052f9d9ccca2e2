"""Building a datastore: shard after shard in a folder beside the wanted one, which takes its name when it is whole."""

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
from specjax.files.untrusted import check_regular
from specjax.retrieval.datastore import corpus
from specjax.retrieval.datastore.files import (
    FORMAT,
    META,
    SUFFIXES,
    TOKENS,
    VERSION,
    checksum_of,
    fingerprint,
    open_datastore,
    read_meta,
    stored_as,
    write_meta,
)
from specjax.retrieval.datastore.store import SHARD_TOKENS, Datastore, cut, make_shard, token_dtype


def build(
    files: Sequence[str | Path],
    out: str | Path,
    tokenizer,
    *,
    fields: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], object] = lambda done, total: None,
    say: Callable[[str], object] = lambda sentence: None,
) -> Datastore:
    """Tokenize files, sort their suffixes and write the folder `out`.

    The text is read twice: first to know it. A build that was interrupted goes on after its last whole shard when it is
    started again with the same text, tokenizer and options; else it starts anew. What is kept is compared with its
    checksums: a damaged shard is built again, with those behind it. Memory: one shard, 20 to 50 bytes per token of it.

    Args:
      tokenizer: as `specjax.load` gives; control tokens around a text are left out.
      fields: see `corpus.read`. shard_tokens: places of a shard.
      progress: called with the bytes read so far and those of all files. say: called with what a user should know.

    Returns: the datastore, opened. Raises: UsageError for bad files or options, or if `out` exists.
    """
    paths, out = [Path(file) for file in files], Path(out)
    if out.exists():
        raise UsageError(f"{out} exists already; remove it or choose another folder")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {out.absolute().parent}; create it first")
    vocab_size = len(tokenizer.vocab)
    known = corpus.survey(corpus.read(paths, fields))
    if not known.documents:
        raise UsageError("the files hold no text; give at least one document that is not blank")
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": fingerprint(tokenizer.vocab),
        "vocab_size": vocab_size,
        "shard_tokens": shard_tokens,
        "fields": list(fields),
        "text": known.digest,
        "documents": known.documents,
        "bytes": known.size,
    }
    part = out.absolute().parent / f".{out.name}.part"
    meta = _resume(part, plan, say)
    used, place = meta["shards"][-1]["next"] if meta["shards"] else (0, 0)

    blocks = _counted(corpus.read(paths, fields), known.size, progress)
    end = token_dtype(vocab_size).type(vocab_size)

    def pieces():
        for block in itertools.islice(blocks, used, None):
            ids = np.array(tokenizer.encode(block.text, special=False), np.int64)
            yield np.append(ids, end) if block.ends else ids

    with open(part / TOKENS, "ab") as tokens_file, open(part / SUFFIXES, "ab") as suffixes_file:
        for tokens, more, place_after in cut(pieces(), vocab_size, shard_tokens, place):
            shard = make_shard(tokens)
            checksums = []
            for file, array in zip((tokens_file, suffixes_file), shard, strict=True):
                stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
                file.write(stored.data)
                file.flush()
                os.fsync(file.fileno())
                checksums.append(checksum_of(stored))
            entry = {"tokens": len(tokens), "checksums": checksums, "next": [used + more, place_after]}
            meta["shards"].append(entry)
            write_meta(part, meta)
    write_meta(part, meta | {"complete": True})
    os.replace(part, out)
    return open_datastore(out, verify=False)  # kept shards were compared with their checksums, the others just written


def _resume(part: Path, plan: dict[str, Any], say: Callable[[str], object]) -> dict[str, Any]:
    """What is built already of this plan: its files are cut to the whole shards that meta.json lists."""
    if part.is_symlink() or (part.exists() and not part.is_dir()) or _others_in(part):
        raise UsageError(f"{part} is not what an interrupted build leaves; move it away, or give another folder")
    if part.exists():
        meta = None
        with contextlib.suppress(UsageError):
            meta = read_meta(part)
        if meta is not None and {name: meta.get(name) for name in plan} == plan:
            kept = _cut_to_whole(part, meta)
            lost = len(meta["shards"]) - len(kept)
            if kept or not lost:
                again = f"; shard {len(kept)} is damaged, so it and those behind it are built again" if lost else ""
                say(f"going on after {len(kept)} finished shards of an interrupted build{again}")
                return meta | {"complete": False, "shards": kept}
        say("an interrupted build of this folder was of other text or options, or is damaged: starting anew")
        shutil.rmtree(part)
    part.mkdir()
    meta = plan | {"complete": False, "shards": []}
    write_meta(part, meta)
    return meta


def _others_in(part: Path) -> bool:
    """Whether there is anything that a build does not write, or a link to elsewhere."""
    own = {TOKENS, SUFFIXES, META, f"{META}.new"}
    return part.is_dir() and any(entry.is_symlink() or entry.name not in own for entry in part.iterdir())


def _cut_to_whole(part: Path, meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The shards listed, as far as they have their checksums; what is behind them is cut off the files."""
    files = {part / name: dtype for name, dtype in stored_as(meta["vocab_size"]).items()}
    kept: list[dict[str, Any]] = []
    places = 0
    for file in files:
        file.touch()
        check_regular(file)
    for entry in meta["shards"]:
        if (part / TOKENS).stat().st_size < (places + entry["tokens"]) * files[part / TOKENS].itemsize:
            break
        found = [
            np.fromfile(file, dtype, entry["tokens"], offset=places * dtype.itemsize) for file, dtype in files.items()
        ]
        if [checksum_of(array) for array in found] != entry["checksums"]:
            break
        kept.append(entry)
        places += entry["tokens"]
    for file, dtype in files.items():
        os.truncate(file, places * dtype.itemsize)
    return kept


def _counted(blocks, total: int, progress: Callable[[int, int], object]):
    done = 0
    for block in blocks:
        yield block
        done += block.size
        progress(done, total)
