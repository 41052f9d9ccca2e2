"""Datastores made to break what reads them: each opens and can be searched, or is refused in one short sentence."""

import json
import os
import shutil

import numpy as np
import pytest
from hostile import as_json, attacks, changed_bytes, changed_json, survives

from specjax.retrieval.datastore import build, from_documents, open_datastore
from specjax.retrieval.datastore.files import META, SUFFIXES, TOKENS, compute_checksum

TEXT = "once upon a time\nonce more, and once upon another time\n"


class Bytes:
    vocab = tuple(map(str, range(256)))

    def encode(self, text, special=True):
        return list(text.encode())


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    (folder / "a.txt").write_text(TEXT)
    build([folder / "a.txt"], folder / "store", Bytes(), shard_tokens=20)
    return folder / "store"


@pytest.fixture
def store(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "store")


def use(folder) -> None:
    datastore = open_datastore(folder)
    datastore.to_device()
    match = datastore.search(list(b"once upon"))
    assert datastore.continuations(match, 4, 5).max() < 256
    assert all(isinstance(value, int | str) for value in datastore.summary.values())


def rewrite(folder, name, shard, change) -> None:
    """Change the array of a shard, and its checksum too."""
    meta = json.loads((folder / META).read_text())
    array = np.fromfile(folder / name, "<u2" if name == TOKENS else "<i4")
    start = sum(entry["tokens"] for entry in meta["shards"][:shard])
    part = array[start : start + meta["shards"][shard]["tokens"]]
    change(part)
    meta["shards"][shard]["checksums"][name == SUFFIXES] = compute_checksum(part)
    array.tofile(folder / name)
    (folder / META).write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        (TOKENS, 3, 257, "ids outside of its vocabulary"),
        (TOKENS, -1, 7, "ids outside of its vocabulary"),
        (SUFFIXES, 0, -1, "places outside of its text"),
        (SUFFIXES, 5, 10_000, "places outside of its text"),
    ],
)
def test_contents_with_checksums_of_their_own(name, place, value, words, store):
    rewrite(store, name, 1, lambda part: part.__setitem__(place, value))
    assert f"{words} (in shard 1)" in survives(lambda: use(store))


@pytest.mark.parametrize("name", [META, TOKENS, SUFFIXES])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_what_never_ends_is_not_opened(name, make, store):
    (store / name).unlink()
    make(store / name)
    assert survives(lambda: use(store)) is not None


def test_a_corpus_that_never_ends(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    assert "is not a regular file" in survives(lambda: build([tmp_path / "a.txt"], tmp_path / "out", Bytes()))


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}", '{"text": NaN}', '{"text": {}}'])
def test_a_corpus_of_strange_lines(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    assert "line 1: " in survives(lambda: build([tmp_path / "a.jsonl"], tmp_path / "out", Bytes()))


@pytest.mark.parametrize(("rng", "count"), attacks(300))
def test_any_change(rng, count, store, intact):
    meta = json.loads((intact / META).read_text())
    for case in range(count):
        name = rng.choice([META, META, META, TOKENS, SUFFIXES])
        if name == META:
            (store / META).write_bytes(as_json(rng, changed_json(rng, meta)))
        else:
            (store / name).write_bytes(changed_bytes(rng, (intact / name).read_bytes()))
        survives(lambda: use(store), case)
        shutil.copy(intact / name, store)


@pytest.mark.parametrize(("rng", "count"), attacks(60, 3000))
def test_an_interrupted_build_that_was_changed(rng, count, intact, tmp_path):
    """It goes on or starts anew; what comes out is what the text gives."""
    (tmp_path / "a.txt").write_text(TEXT)
    part, out = tmp_path / ".out.part", tmp_path / "out"
    wanted = from_documents([TEXT.encode()], 256, shard_tokens=20)
    meta = json.loads((intact / META).read_text()) | {"complete": False}
    for case in range(count):
        shutil.copytree(intact, part)
        document = meta if case % 3 == 0 else changed_json(rng, meta)
        (part / META).write_bytes(as_json(rng, document))
        if case % 3 == 0:
            name = rng.choice([TOKENS, SUFFIXES])
            (part / name).write_bytes(changed_bytes(rng, (part / name).read_bytes()))
        if survives(lambda: build([tmp_path / "a.txt"], out, Bytes(), shard_tokens=20), (case, document)) is None:
            for ours, theirs in zip(open_datastore(out).shards, wanted.shards, strict=True):
                np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        for folder in (part, out):
            shutil.rmtree(folder, ignore_errors=True)
