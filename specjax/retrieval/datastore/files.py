"""The folder of a datastore: meta.json, tokens.bin and suffixes.bin, little-endian, the shards one after another."""

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
from specjax.files.untrusted import guarded_read, quote, read_json
from specjax.retrieval.datastore.store import Datastore, Shard, token_dtype

FORMAT, VERSION = "specjax-datastore", 1
TOKENS, SUFFIXES, META = "tokens.bin", "suffixes.bin", "meta.json"
MOST = (1 << 31) - 2  # ids, and places of a shard


def fingerprint(vocab: Sequence[str]) -> str:
    """Which vocabulary the ids belong to: a hash of its pieces in order."""
    return hashlib.blake2b("\0".join(vocab).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def check_tokenizer(store: Datastore, tokenizer, where: str) -> None:
    """Raises: UsageError, naming `where`, unless the datastore's ids are those of the tokenizer."""
    if store.info.get("tokenizer") != fingerprint(tokenizer.vocab):
        raise UsageError(
            f"{where} was built with another tokenizer (of {store.vocab_size} tokens; the target's has "
            f"{len(tokenizer.vocab)}); build one with the target's own: specjax datastore build ... --target"
        )


def open_datastore(folder: str | Path, tokenizer=None, *, verify: bool = True) -> Datastore:
    """A datastore whose shards are memory-mapped.

    Args:
      tokenizer: the target's, as `specjax.load` gives: the datastore's ids must be its own. None: not compared.
      verify: compare the files with their checksums, at the speed of reading them once.

    Raises: UsageError, in one sentence, for a folder that is no datastore, files that are cut short or changed, or
    another tokenizer.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if not meta["complete"]:
        raise UsageError(f"{folder} is not built to its end; run the same `specjax datastore build` again")
    with guarded_read(folder):
        store = Datastore(_shards(folder, meta), meta["vocab_size"], meta)
    if tokenizer is not None:
        check_tokenizer(store, tokenizer, str(folder))
    if verify:
        for number, (shard, entry) in enumerate(zip(store.shards, meta["shards"], strict=True)):
            where = f"(in shard {number}); copy it again or build the datastore anew"
            for name, array, checksum in zip((TOKENS, SUFFIXES), shard, entry["checksums"], strict=True):
                if checksum_of(array) != checksum:
                    raise UsageError(f"{folder / name} has changed since it was built {where}")
            # Whoever writes a file may write its checksum too. Other ids would be drafted, other places read.
            if shard.tokens[-1] != store.vocab_size or shard.tokens.max() > store.vocab_size:
                raise UsageError(f"{folder / TOKENS} holds ids that its vocabulary does not have {where}")
            if shard.suffixes.min() < 0 or shard.suffixes.max() >= len(shard.tokens):
                raise UsageError(f"{folder / SUFFIXES} holds places outside of its text {where}")
    return store


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a folder. Raises: UsageError if it is not there, damaged, or of another version."""
    try:
        meta = read_json(folder / META, "build the datastore anew")
    except (FileNotFoundError, NotADirectoryError):
        why = f"it has no {META}" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder} is not a datastore: {why}; build one with `specjax datastore build`") from None
    except OSError as error:
        raise UsageError(f"cannot read {folder / META} ({error.strerror or error}); check the path") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UsageError(f"{folder / META} is not that of a datastore; build one with `specjax datastore build`")
    if meta.get("version") != VERSION:
        raise UsageError(
            f"{folder / META} is of format version {quote(meta.get('version'))}, but this specjax reads version "
            f"{VERSION}; build the datastore anew"
        )
    if not _is_sound(meta):
        raise UsageError(f"{folder / META} is damaged; build the datastore anew")
    return meta


def _is_sound(meta: dict[str, Any]) -> bool:
    """Whether all fields are there that are read, and can be."""
    count = lambda x, least=0, most=MOST: type(x) is int and least <= x <= most
    texts = lambda *names: all(isinstance(meta.get(name), str) for name in names)
    pair = lambda x, good: isinstance(x, list) and len(x) == 2 and all(map(good, x))
    shards = meta.get("shards")
    return (
        count(meta.get("vocab_size"), 1)
        and count(meta.get("documents"), most=1 << 62)
        and texts("tokenizer", "text")
        and isinstance(meta.get("complete"), bool)
        and isinstance(shards, list)
        and all(
            isinstance(entry, dict)
            and count(entry.get("tokens"), 1)
            and pair(entry.get("checksums"), lambda x: isinstance(x, str))
            and pair(entry.get("next"), lambda x: count(x, most=1 << 62))
            for entry in shards
        )
    )


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Whole or not at all."""
    whole = folder / f"{META}.new"
    whole.write_text(json.dumps(meta, indent=1), encoding="utf-8")
    os.replace(whole, folder / META)


def checksum_of(array: np.ndarray) -> str:
    """Of its bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def stored_as(vocab_size: int) -> dict[str, np.dtype]:
    """Of each file of arrays the type."""
    return {TOKENS: token_dtype(vocab_size).newbyteorder("<"), SUFFIXES: np.dtype("<i4")}


def _shards(folder: Path, meta: dict[str, Any]) -> tuple[Shard, ...]:
    ends = np.cumsum([0, *(entry["tokens"] for entry in meta["shards"])])
    arrays = []
    for name, dtype in stored_as(meta["vocab_size"]).items():
        wanted = int(ends[-1]) * dtype.itemsize
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size != wanted or not wanted:
            raise UsageError(
                f"{folder / name} has {size} bytes instead of {wanted}: it is cut short or changed; copy it again or "
                "build the datastore anew"
            )
        arrays.append(np.memmap(folder / name, dtype, mode="r"))
    tokens, suffixes = arrays
    return tuple(Shard(tokens[a:b], suffixes[a:b]) for a, b in itertools.pairwise(ends))
