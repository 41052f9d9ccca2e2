"""`specjax datastore`, and `--datastore`, on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from processes import Hosts

from specjax import drafters

SHORT = ("--max-new-tokens", 6, "--json")


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time, once upon a hill, once more")
    return tmp_path / "text.txt"


@pytest.fixture
def store(cli, corpus, tmp_path):
    result = cli("datastore", "build", corpus, "--out", tmp_path / "store")
    assert result.code == 0, result.err
    assert "documents" in result.out
    return tmp_path / "store"


def test_build_info_find(cli, store):
    document = json.loads(cli("datastore", "info", store, "--json").out)
    assert (document["documents"], document["tokens"], document["vocab_size"]) == (1, 46, 259)
    match = json.loads(cli("datastore", "find", store, "and once", "--length", 3, "--json").out)
    assert (match["span"], match["count"]) == (5, 2)  # " once", but not at the beginning
    assert [(entry["text"], entry["count"]) for entry in match["continuations"]] == [(" mo", 1), (" up", 1)]
    assert "not found" in cli("datastore", "find", store, "Z").out
    shown = cli("datastore", "find", store, "once up").out
    assert "occur 2 times" in shown and "'on a hill,'" in shown


def test_a_method_reads_it(cli, store):
    document = json.loads(
        cli("generate", "once upon a", "--method", "rest", "--datastore", store, "--compare", *SHORT).out
    )
    assert document["identical"] is True
    assert document["datastore"]["tokens"] == 46


def test_suffix_matching_copies_from_it_too(cli, store):
    run = ("generate", "once upon a", "--raw", "--method", "suffix", "--compare", *SHORT)
    text_alone, both = (json.loads(cli(*run, *more).out) for more in ((), ("--datastore", store)))
    assert text_alone["identical"] is True and both["identical"] is True
    assert text_alone["datastore"] is None and both["datastore"]["tokens"] == 46
    assert both["drafted"] > text_alone["drafted"]


def test_it_is_spread_over_the_mesh(cli, corpus, tmp_path, monkeypatch):
    assert cli("datastore", "build", corpus, "--out", tmp_path / "store", "--shard-tokens", 10).code == 0
    indexes = []
    module, real = importlib.import_module("specjax.drafters.lookup.rest"), drafters.rest
    monkeypatch.setattr(module, "rest", lambda index, **options: indexes.append(index) or real(index, **options))
    run = ("generate", "once upon a", "--raw", "--method", "rest", "--datastore", tmp_path / "store", *SHORT)
    alone, ours = (json.loads(cli(*run, *more).out) for more in ((), ("--data", 4, "--model", 2, "--compare")))
    assert ours["identical"] is True and ours["results"][0]["text"] == alone["results"][0]["text"]
    assert ours["drafted"] == alone["drafted"] > 0
    full_shapes, spread = ([part.data.shape for part in index.tokens.addressable_shards] for index in indexes)
    assert full_shapes == [(6, 10)] and spread == [(3, 10)] * 8


@pytest.mark.exhaustive
def test_two_hosts_read_one(cli, corpus, tmp_path):
    assert cli("datastore", "build", corpus, "--out", tmp_path / "store", "--shard-tokens", 10).code == 0
    run = ("generate", "once upon a", "--raw", "--method", "rest", "--datastore", tmp_path / "store", *SHORT)
    alone = json.loads(cli(*run).out)
    joined = ("--distributed", "--coordinator", "ADDRESS", "--num-processes", "COUNT", "--process-id", "HOST")
    with Hosts(2, "cli", *run, *joined) as running:
        ended = running.wait(timeout=120)
    assert [process.code for process in ended] == [0, 0], ended
    ours = json.loads(ended[0].out)
    assert ours["results"][0]["text"] == alone["results"][0]["text"] and ours["drafted"] == alone["drafted"] > 0


def test_bad_input(refused, store, corpus, tmp_path):
    generate = ("generate", "abc", *SHORT)
    assert "needs a datastore" in refused(*generate, "--method", "rest")
    assert "remove it" in refused(*generate, "--datastore", store)
    command = (*generate, "--method", "rest", "--datastore")
    assert "--datastore: " in refused(*command, tmp_path / "none")
    assert "another tokenizer" in refused(*command, store, "--target", "odd")
    assert "another tokenizer" in refused("datastore", "find", store, "a", "--target", "odd")
    (store / "tokens.bin").write_bytes(b"")
    assert "tokens.bin has 0 bytes" in refused(*command, store)
    build = ("datastore", "build", corpus, "--out")
    assert "already exists" in refused(*build, store)
    assert "--shard-tokens" in refused(*build, tmp_path / "new", "--shard-tokens", 1)
    assert "--target: " in refused(*build, tmp_path / "new", "--target", "none")
    assert "cannot read" in refused("datastore", "build", tmp_path / "none.txt", "--out", tmp_path / "new")
    assert "--limit" in refused("datastore", "find", store, "a", "--limit", 0)
    assert "remove it" in refused("bench", corpus, "--datastore", store)


def test_methods_say_what_they_need(cli):
    needs = {row["name"]: row["needs"] for row in json.loads(cli("methods", "--json").out)}
    assert needs["rest"] == ["datastore"] and needs["prompt_lookup"] == []
    assert "datastore" in cli("methods").out


def test_an_interrupted_build_can_be_continued(cli, corpus, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pydivsufsort.divsufsort", stop)
        result = cli("datastore", "build", corpus, "--out", tmp_path / "store")
    assert result.code == 130
    assert "run the same command to continue" in result.err
    assert cli("datastore", "build", corpus, "--out", tmp_path / "store").code == 0


SLOW_BUILD = """
import sys, time
from host_worker import load_conftest
from specjax.cli import main
from specjax.models import loading

class Slow(load_conftest().ByteTokenizer):
    def encode(self, text, special=True):
        time.sleep(0.05)
        return super().encode(text, special)

loading.load_tokenizer = lambda source=None: Slow()
main(sys.argv[1:])
"""


def test_a_killed_build_can_be_continued(cli, tmp_path):
    lines = [{"text": f"document {i} of many, not all of one length{'!' * (i % 7)}"} for i in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out, part = tmp_path / "store", tmp_path / ".store.part"
    command = [str(a) for a in ("datastore", "build", tmp_path / "text.jsonl", "--shard-tokens", 200, "--out")]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "lib")}
    building = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, *command, str(out)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (part / "meta.json").exists() or len(json.loads((part / "meta.json").read_text())["shards"]) < 3:
            assert building.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        building.kill()
    assert building.wait() == -signal.SIGKILL and not out.exists()
    result = cli(*command, out)
    assert result.code == 0 and "resuming an interrupted build" in result.err, result.err
    assert "damaged" not in result.err and not part.exists()
    assert cli(*command, tmp_path / "undisturbed").code == 0
    for name in ("tokens.bin", "suffixes.bin", "meta.json"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
