"""Datastores on disk: what is read, what is kept of an interrupted build, what is refused."""

import json
import os
import types

import numpy as np
import pytest

from specjax import UsageError
from specjax.retrieval.datastore import build, check_tokenizer, corpus, from_documents, open_datastore


class Bytes:
    """Byte b is id b; counts what it tokenizes."""

    def __init__(self, size=256):
        self.vocab, self.seen = tuple(map(str, range(size))), 0

    def encode(self, text, special=True):
        assert not special
        self.seen += len(text)
        return list(text.encode())


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("once upon a time\nonce more\n")
    lines = [{"text": "once upon"}, {"turns": ["a time", "and again"]}, {"prompt": "no more", "other": "x"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "blank.txt").write_text(" \n")
    return [tmp_path / name for name in ("a.txt", "b.jsonl", "blank.txt")]


TEXTS = ["once upon a time\nonce more\n", "once upon", "a time\nand again", "no more"]


@pytest.mark.parametrize("shard_tokens", [1000, 7])
def test_the_same_as_in_memory(files, tmp_path, shard_tokens):
    progress_calls = []
    progress = lambda done, total: progress_calls.append((done, total))
    store = build(files, tmp_path / "out", Bytes(), shard_tokens=shard_tokens, progress=progress)
    wanted = from_documents([text.encode() for text in TEXTS], 256, shard_tokens=shard_tokens)
    for ours, theirs in zip(store.shards, wanted.shards, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.suffixes, theirs.suffixes)
        assert isinstance(ours.tokens, np.memmap)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "blank.txt", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["meta.json", "suffixes.bin", "tokens.bin"]
    assert progress_calls[-1] == (store.info["bytes"],) * 2
    assert store.info["documents"] == 4
    check_tokenizer(store, Bytes(), "here")


def test_suffixes_are_sorted_and_long_blocks_are_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 4)
    (tmp_path / "a.txt").write_text("banana bandana\n" * 3)
    shard = build([tmp_path / "a.txt"], tmp_path / "out", Bytes()).shards[0]
    assert bytes(shard.tokens[:-1].astype(np.uint8)) == b"banana bandana\n" * 3
    suffixes = [shard.tokens[i:].tolist() for i in shard.suffixes]
    assert suffixes == sorted(suffixes)
    assert sorted(shard.suffixes) == list(range(46))


def test_large_vocabularies_take_four_bytes(files, tmp_path):
    assert build(files, tmp_path / "out", Bytes(1 << 16)).shards[0].tokens.dtype == np.uint32
    assert build(files, tmp_path / "two", Bytes((1 << 16) - 1)).shards[0].tokens.dtype == np.uint16


def test_named_fields(files, tmp_path):
    assert [block.text for block in corpus.read(files[1:2])] == TEXTS[1:]
    (tmp_path / "c.jsonl").write_text('{"question": "why?", "answer": "\\ud800"}\n')
    assert [b.text for b in corpus.read([tmp_path / "c.jsonl"], ["question", "answer"])] == ["why?\n?"]
    for text, fields, message in (
        ("{", (), "line 1: not valid JSON"),
        ("[]", (), "not a JSON object"),
        ('{"a": "b"}', (), "none of the fields text, turns, prompt"),
        ('{"a": 1}', ("a",), 'the field "a"'),
    ):
        (tmp_path / "c.jsonl").write_text(text)
        with pytest.raises(UsageError, match=message):
            list(corpus.read([tmp_path / "c.jsonl"], fields))
    (tmp_path / "d.txt").write_bytes(b"\xff")
    for name, message in (("d.txt", "not UTF-8"), ("none.txt", "cannot read")):
        with pytest.raises(UsageError, match=message):
            list(corpus.read([tmp_path / name]))


class Interrupted(Bytes):
    """Stops after some characters."""

    def __init__(self, limit):
        super().__init__()
        self.after = limit

    def encode(self, text, special=True):
        if self.seen + len(text) > self.after:
            raise KeyboardInterrupt
        return super().encode(text, special)


def interrupt(files, out):
    with pytest.raises(KeyboardInterrupt):
        build(files, out, Interrupted(len(TEXTS[0]) + 12), shard_tokens=7)
    assert not out.exists()
    return out.parent / f".{out.name}.part"


def test_an_interrupted_build_goes_on(files, tmp_path):
    out = tmp_path / "out"
    part = interrupt(files, out)
    num_shards = len(json.loads((part / "meta.json").read_text())["shards"])
    assert num_shards >= 4
    with open(part / "tokens.bin", "ab") as file:  # of a shard that was not finished
        file.write(b"xyz")
    notices, tokenizer = [], Bytes()
    store = build(files, out, tokenizer, shard_tokens=7, notify=notices.append)
    assert notices == [f"resuming an interrupted build after {num_shards} finished shards"]
    assert tokenizer.seen < sum(map(len, TEXTS))  # finished documents are not tokenized again
    wanted = from_documents([text.encode() for text in TEXTS], 256, shard_tokens=7)
    for ours, theirs in zip(store.shards, wanted.shards, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    open_datastore(out)


@pytest.mark.parametrize("name", ["tokens.bin", "suffixes.bin"])
@pytest.mark.parametrize("damaged", [0, 2])
def test_damaged_shards_of_an_interrupted_build_are_built_again(files, tmp_path, name, damaged):
    """A shard of which one bit has changed, and not the size, is built again."""
    out = tmp_path / "out"
    part = interrupt(files, out)
    data = bytearray((part / name).read_bytes())
    data[damaged * 7 * (2 if name == "tokens.bin" else 4)] ^= 1  # the shards before it are full
    (part / name).write_bytes(bytes(data))
    notices, tokenizer = [], Bytes()
    store = build(files, out, tokenizer, shard_tokens=7, notify=notices.append)
    if damaged:
        shard = "shard 2 is damaged, so it and all later ones are rebuilt"
        assert notices == [f"resuming an interrupted build after 2 finished shards; {shard}"]
    else:
        assert len(notices) == 1 and "starting over" in notices[0]
    assert store.info == build(files, tmp_path / "fresh", Bytes(), shard_tokens=7).info
    open_datastore(out)


def test_a_build_that_was_stopped_twice_or_at_its_very_end_goes_on(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    part = interrupt(files, out)
    (part / "tokens.bin").write_bytes((part / "tokens.bin").read_bytes()[:31])  # cuts the third shard

    def replace(source, wanted, real=os.replace):
        if wanted == out:
            raise KeyboardInterrupt
        real(source, wanted)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", replace)
        build(files, out, Bytes(), shard_tokens=7)
    notices, tokenizer = [], Bytes()
    store = build(files, out, tokenizer, shard_tokens=7, notify=notices.append)
    assert tokenizer.seen == 0 and notices == [
        f"resuming an interrupted build after {len(store.shards)} finished shards"
    ]
    assert store.info == build(files, tmp_path / "fresh", Bytes(), shard_tokens=7).info
    open_datastore(out)


@pytest.mark.parametrize("change", ["text", "options", "cut", "meta"])
def test_a_changed_build_starts_anew_and_says_so(files, tmp_path, change):
    out = tmp_path / "out"
    part = interrupt(files, out)
    if change == "text":
        files[0].write_text("other")
    if change == "cut":
        (part / "suffixes.bin").write_bytes(b"")
    if change == "meta":
        (part / "meta.json").write_text("{")
    notices, shard_tokens = [], 8 if change == "options" else 7
    store = build(files, out, Bytes(), shard_tokens=shard_tokens, notify=notices.append)
    assert len(notices) == 1 and "starting over" in notices[0]
    fresh = build(files, tmp_path / "fresh", Bytes(), shard_tokens=shard_tokens)
    assert fresh.info == store.info


def corrupt(name, change):
    def apply(folder):
        data = bytearray((folder / name).read_bytes())
        (folder / name).write_bytes(bytes(change(data)))

    return apply


def with_meta(**changes):
    return corrupt("meta.json", lambda data: json.dumps(json.loads(data) | changes).encode())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (corrupt("tokens.bin", lambda data: data[:-2]), r"tokens.bin has \d+ bytes instead of \d+: it is truncated"),
        (lambda folder: (folder / "suffixes.bin").unlink(), "suffixes.bin has 0 bytes"),
        (corrupt("suffixes.bin", lambda data: data[:9] + b"\x01" + data[10:]), "suffixes.bin has changed since"),
        (corrupt("meta.json", lambda data: data[:20]), "meta.json is not valid JSON .*; rebuild the datastore"),
        (lambda folder: (folder / "meta.json").unlink(), "is not a datastore"),
        (with_meta(format="zip"), "does not belong to a datastore"),
        (with_meta(version=2), "format version 2, but this specjax reads version 1"),
        (with_meta(complete=False), "is incomplete"),
        (with_meta(shards=[{}]), "damaged"),
        (with_meta(shards=[]), "bytes instead of 0"),
        (with_meta(vocab_size="x"), "damaged"),
    ],
)
def test_what_is_refused(files, tmp_path, harm, message):
    build(files, tmp_path / "out", Bytes(), shard_tokens=20)
    harm(tmp_path / "out")
    with pytest.raises(UsageError, match=message) as refused:
        open_datastore(tmp_path / "out")
    assert "; " in str(refused.value)  # and what to do
    assert "\n" not in str(refused.value)


def test_other_tokenizers_and_bad_arguments(files, tmp_path):
    store = build(files, tmp_path / "out", Bytes())
    other = types.SimpleNamespace(vocab=(*Bytes().vocab[1:], "x"))
    with pytest.raises(UsageError, match="here was built with another tokenizer"):
        check_tokenizer(store, other, "here")
    with pytest.raises(UsageError, match=r"out was built with another tokenizer \(256 tokens; the target's has 256\)"):
        open_datastore(tmp_path / "out", other)
    assert open_datastore(tmp_path / "out", Bytes()).num_tokens == store.num_tokens
    with pytest.raises(UsageError, match="already exists"):
        build(files, tmp_path / "out", Bytes())
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        build(files, tmp_path / "no" / "out", Bytes())
    with pytest.raises(UsageError, match="no text"):
        build(files[2:], tmp_path / "empty", Bytes())
    with pytest.raises(UsageError, match="ids from"):
        build(files, tmp_path / "small", Bytes(64))
    assert not list(tmp_path.glob(".empty*"))
