"""`specjax datastore`, and `--datastore`, on a tiny model."""

from __future__ import annotations

import json

import pytest

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
    found = json.loads(cli("datastore", "find", store, "and once", "--length", 3, "--json").out)
    assert (found["span"], found["count"]) == (5, 2)  # " once", but not at the beginning
    assert [(entry["text"], entry["count"]) for entry in found["continuations"]] == [(" mo", 1), (" up", 1)]
    assert "not found" in cli("datastore", "find", store, "Z").out
    shown = cli("datastore", "find", store, "once up").out
    assert "occur 2 times" in shown and "'on a hill,'" in shown


def test_a_method_reads_it(cli, store):
    document = json.loads(
        cli("generate", "once upon a", "--method", "rest", "--datastore", store, "--compare", *SHORT).out
    )
    assert document["identical"] is True
    assert document["datastore"]["tokens"] == 46


def test_bad_input(refused, store, corpus, tmp_path):
    generate = ("generate", "abc", *SHORT)
    assert "needs a datastore" in refused(*generate, "--method", "rest")
    assert "leave it out" in refused(*generate, "--datastore", store)
    rest = (*generate, "--method", "rest", "--datastore")
    assert "--datastore: " in refused(*rest, tmp_path / "none")
    assert "another tokenizer" in refused(*rest, store, "--target", "odd")
    assert "another tokenizer" in refused("datastore", "find", store, "a", "--target", "odd")
    (store / "tokens.bin").write_bytes(b"")
    assert "tokens.bin has 0 bytes" in refused(*rest, store)
    build = ("datastore", "build", corpus, "--out")
    assert "exists already" in refused(*build, store)
    assert "--shard-tokens" in refused(*build, tmp_path / "new", "--shard-tokens", 1)
    assert "--target: " in refused(*build, tmp_path / "new", "--target", "none")
    assert "cannot read" in refused("datastore", "build", tmp_path / "none.txt", "--out", tmp_path / "new")
    assert "--limit" in refused("datastore", "find", store, "a", "--limit", 0)
    assert "leave it out" in refused("bench", corpus, "--datastore", store)


def test_methods_say_what_they_need(cli):
    needs = {row["name"]: row["needs_datastore"] for row in json.loads(cli("methods", "--json").out)}
    assert needs["rest"] and not needs["prompt_lookup"]
    assert "datastore" in cli("methods").out


def test_an_interrupted_build_can_be_continued(cli, corpus, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pydivsufsort.divsufsort", stop)
        result = cli("datastore", "build", corpus, "--out", tmp_path / "store")
    assert result.code == 130
    assert "run the same command again" in result.err
    assert cli("datastore", "build", corpus, "--out", tmp_path / "store").code == 0
