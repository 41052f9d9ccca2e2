"""Files of a datastore folder: meta.json, tokens.bin and suffixes.bin, little-endian, one shard after another."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote, read_json
from specjax.retrieval.datastore.store import Datastore, Shard, token_dtype

FORMAT, VERSION = "specjax-datastore", 1
TOKENS, SUFFIXES, META = "tokens.bin", "suffixes.bin", "meta.json"
MAX_COUNT = (1 << 31) - 2  # maximum number of ids, and of places of a shard


def fingerprint(vocab: Sequence[str]) -> str:
    """Return a hash of a vocabulary's pieces in order. It identifies the tokenizer of stored ids."""
    return hashlib.blake2b("\0".join(vocab).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def check_tokenizer(store: Datastore, tokenizer, where: str) -> None:
    """Raise a UsageError that names `where` if the datastore was built with another vocabulary."""
    if store.info.get("tokenizer") != fingerprint(tokenizer.vocab):
        raise UsageError(
            f"{where} was built with another tokenizer ({store.vocab_size} tokens; the target's has "
            f"{len(tokenizer.vocab)}); build one with the target's tokenizer: specjax datastore build ... --target"
        )


def open_datastore(folder: str | Path, tokenizer=None, *, verify: bool = True) -> Datastore:
    """Open a datastore whose shards are memory-mapped.

    Args:
      tokenizer: the target's, as returned by `specjax.load`. It must match the datastore's ids. None: no check.
      verify: compare the files with their checksums, which takes as long as reading them once.

    Raises: UsageError, in one sentence, if the folder is not a datastore, files are truncated or changed, or the
    tokenizer is another one.
    """
    folder = in_home(folder)
    meta = read_meta(folder)
    if not meta["complete"]:
        raise UsageError(f"{folder} is incomplete; run the same `specjax datastore build` again")
    with guarded_read(folder):
        store = Datastore(_map_shards(folder, meta), meta["vocab_size"], meta)
    if tokenizer is not None:
        check_tokenizer(store, tokenizer, str(folder))
    if verify:
        for number, (shard, entry) in enumerate(zip(store.shards, meta["shards"], strict=True)):
            where = f"(in shard {number}); copy it again or rebuild the datastore"
            for name, array, checksum in zip((TOKENS, SUFFIXES), shard, entry["checksums"], strict=True):
                if compute_checksum(array) != checksum:
                    raise UsageError(f"{folder / name} has changed since it was built {where}")
            # A checksum can be forged too. Without these checks, invalid ids would be drafted and invalid places read.
            if shard.tokens[-1] != store.vocab_size or shard.tokens.max() > store.vocab_size:
                raise UsageError(f"{folder / TOKENS} has ids outside of its vocabulary {where}")
            if shard.suffixes.min() < 0 or shard.suffixes.max() >= len(shard.tokens):
                raise UsageError(f"{folder / SUFFIXES} has places outside of its text {where}")
    return store


def read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json of a folder. Raises: UsageError if it is missing, damaged, or of another version."""
    try:
        meta = read_json(folder / META, "rebuild the datastore")
    except (FileNotFoundError, NotADirectoryError):
        why = f"it has no {META}" if folder.exists() else "the folder does not exist"
        raise UsageError(f"{folder} is not a datastore: {why}; build one with `specjax datastore build`") from None
    except OSError as error:
        raise UsageError(f"cannot read {folder / META} ({error.strerror or error}); check the path") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UsageError(f"{folder / META} does not belong to a datastore; build one with `specjax datastore build`")
    if meta.get("version") != VERSION:
        raise UsageError(
            f"{folder / META} has format version {quote(meta.get('version'))}, but this specjax reads version "
            f"{VERSION}; rebuild the datastore"
        )
    if not _is_sound(meta):
        raise UsageError(f"{folder / META} is damaged; rebuild the datastore")
    return meta


def _is_sound(meta: dict[str, Any]) -> bool:
    """Return True if all required fields exist and have valid types and ranges."""
    is_count = lambda x, lowest=0, highest=MAX_COUNT: type(x) is int and lowest <= x <= highest
    are_texts = lambda *names: all(isinstance(meta.get(name), str) for name in names)
    is_pair = lambda x, is_good: isinstance(x, list) and len(x) == 2 and all(map(is_good, x))
    shards = meta.get("shards")
    return (
        is_count(meta.get("vocab_size"), 1)
        and is_count(meta.get("documents"), highest=1 << 62)
        and are_texts("tokenizer", "text")
        and isinstance(meta.get("complete"), bool)
        and isinstance(shards, list)
        and all(
            isinstance(entry, dict)
            and is_count(entry.get("tokens"), 1)
            and is_pair(entry.get("checksums"), lambda x: isinstance(x, str))
            and is_pair(entry.get("next"), lambda x: is_count(x, highest=1 << 62))
            for entry in shards
        )
    )


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json atomically."""
    temporary = folder / f"{META}.new"
    temporary.write_text(json.dumps(meta, indent=1), encoding="utf-8")
    os.replace(temporary, folder / META)


def compute_checksum(array: np.ndarray) -> str:
    """Return a checksum of the array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def file_dtypes(vocab_size: int) -> dict[str, np.dtype]:
    """Return the dtype of each array file."""
    return {TOKENS: token_dtype(vocab_size).newbyteorder("<"), SUFFIXES: np.dtype("<i4")}


def _map_shards(folder: Path, meta: dict[str, Any]) -> tuple[Shard, ...]:
    ends = np.cumsum([0, *(entry["tokens"] for entry in meta["shards"])])
    arrays = []
    for name, dtype in file_dtypes(meta["vocab_size"]).items():
        expected = int(ends[-1]) * dtype.itemsize
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size != expected or not expected:
            raise UsageError(
                f"{folder / name} has {size} bytes instead of {expected}: it is truncated or changed; copy it again or "
                "rebuild the datastore"
            )
        arrays.append(np.memmap(folder / name, dtype, mode="r"))
    tokens, suffixes = arrays
    return tuple(Shard(tokens[a:b], suffixes[a:b]) for a, b in itertools.pairwise(ends))
