"""`specjax compare-verifiers` on tiny models."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specjax import analysis
from specjax.analysis.rules import records

PAIR = ("--target", "target", "--draft", "draft")
SHORT = ("--max-new-tokens", 5, "--drafts", "2,3")
PROMPTS = [{"category": "qa", "turns": ["abcabcabc"]}, {"category": "qa", "turns": ["what is it?"]}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    return path


@pytest.fixture
def distributions(tmp_path):
    """A small record made by hand."""
    p, q = np.random.default_rng(0).dirichlet(np.full(6, 0.5), (2, 4)).astype(np.float32)
    about = {"target": "t", "draft": "d", "vocab_size": 6, "keep": 6, "temperature": 1.0, "top_k": None, "top_p": None}
    tokens = np.tile(np.arange(6, dtype=np.int32), (4, 1))
    zeros = np.zeros(4, np.int32)
    record = analysis.Record(tokens, p, q, np.zeros((4, 2), np.float32), zeros, np.arange(4, dtype=np.int32), about)
    path = tmp_path / "distributions.npz"
    analysis.save_record(path, record)
    return path


def left_over(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_table_json_plot_and_record(cli, prompts, tmp_path):
    out, saved = tmp_path / "out.json", tmp_path / "distributions.npz"
    result = cli("compare-verifiers", prompts, *PAIR, *SHORT, "--out", out, "--save-record", saved)
    assert result.code == 0, result.err
    assert all(word in result.out for word in ("spectr", "coupled", "distribution", "distinct", "gap"))
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not left_over(tmp_path)
    document = json.loads(out.read_text())
    assert document["positions"] == 10 and document["prompts"] == 2 and document["temperature"] == 1.0
    assert {entry["rule"] for entry in document["rules"]} == set(analysis.FORMULAS)
    for entry in document["rules"]:
        assert entry["gap"] == pytest.approx(entry["bound"] - entry["acceptance"])
        assert entry["gap"] > (-0.05 if entry["rule"] == "coupled" else -1e-3)  # coupled is simulated

    again = cli("compare-verifiers", "--record", saved, "--drafts", "2,3", "--out", out, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["rules"] == document["rules"]


@pytest.mark.parametrize("named", [True, False])
def test_what_was_recorded_before_an_interrupt_is_kept(cli, prompts, tmp_path, monkeypatch, named):
    out = tmp_path / "out.json"
    saved = tmp_path / ("saved.npz" if named else "out.npz")
    honest, count = records.decode, iter(range(2))

    def stopped(*arguments, **options):
        if next(count) == 1:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(records, "decode", stopped)
    options = ("--save-record", saved) if named else ()
    result = cli("compare-verifiers", prompts, *PAIR, *SHORT, "--out", out, *options)
    assert result.code == 130 and f"{saved} has the 1 of 2 prompts that are finished" in " ".join(result.err.split())
    partial = analysis.load_record(saved)
    assert partial.prompt.tolist() == [0] * 5 and partial.about["temperature"] == 1.0
    assert not left_over(tmp_path) and not out.exists()


def test_an_interrupt_before_the_first_prompt_leaves_nothing(cli, prompts, tmp_path, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "decode", stopped)
    assert cli("compare-verifiers", prompts, *PAIR, *SHORT, "--out", tmp_path / "out.json").code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_bad_lines_are_named_and_the_good_ones_run(cli, prompts, tmp_path):
    prompts.write_text(prompts.read_text() + "{\n")
    out = tmp_path / "out.json"
    result = cli("compare-verifiers", prompts, *PAIR, *SHORT, "--limit", 1, "--out", out)
    assert result.code == 2
    assert "line 3" in result.err
    assert json.loads(out.read_text())["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "PROMPTS"),
        (("PROMPTS",), "--draft is missing"),
        (("PROMPTS", *PAIR, "--temperature", 0), "--temperature must be above 0"),
        (("PROMPTS", *PAIR, "--temperature", "nan"), "--temperature"),
        (("PROMPTS", *PAIR, "--drafts", "2,x"), "--drafts"),
        (("PROMPTS", *PAIR, "--drafts", "0"), "--drafts"),
        (("PROMPTS", *PAIR, "--limit", 0), "--limit"),
        (("PROMPTS", *PAIR, "--out", "no/such/folder.json"), "--out"),
        (("PROMPTS", *PAIR, "--save-record", "no/such/folder.npz"), "--save-record"),
        (("PROMPTS", "--target", "target", "--draft", "odd"), "vocabulary differs"),
        (("PROMPTS", "--target", "nowhere", "--draft", "draft"), "--target"),
        (("missing.jsonl", *PAIR), "missing.jsonl"),
        (("--record", "missing.npz"), "does not exist"),
        (("--record", "FOREIGN"), "not a record"),
        (("--record", "ARRAYS"), "not a record"),
        (("--record", "CUT"), "truncated"),
        (("--record", "FUTURE"), "version 99"),
        (("--record", "DAMAGED"), "damaged"),
        (("--record", "LAWS", "--out", "LAWS"), "name one file"),
        (("--record", "LAWS", "--draft", "draft"), "remove --draft"),
    ],
)
def test_bad_input(refused, prompts, distributions, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with np.load(distributions) as file:
        arrays = dict(file)
    (tmp_path / "FOREIGN").write_text("not an archive")
    (tmp_path / "CUT").write_bytes(distributions.read_bytes()[:-300])
    changed = {"FUTURE": {"version": 99}, "DAMAGED": {"p": arrays["p"] * np.nan}}
    for name, change in changed.items():
        np.savez(tmp_path / f"{name}.npz", **{**arrays, **change})
    np.savez(tmp_path / "ARRAYS.npz", x=np.zeros(3))
    places = {"PROMPTS": prompts, "LAWS": distributions} | {
        name: f"{name}.npz" for name in ("FUTURE", "DAMAGED", "ARRAYS")
    }
    files = {path.name for path in tmp_path.iterdir()}
    sentence = refused("compare-verifiers", *(places.get(argument, argument) for argument in arguments))
    assert words in sentence, sentence
    assert {path.name for path in tmp_path.iterdir()} == files
