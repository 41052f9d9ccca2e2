"""Prompt files of any content: good prompts and one sentence about every bad line, before anything is decoded."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys

import pytest
from tiers import exhaustive

from specjax.cli.options import prompts
from specjax.cli.output import files
from specjax.cli.output.console import visible
from specjax.errors import UsageError

GOOD = '{"prompt": "abc", "question_id": 7}'
BAD = {
    '{"prompt": "abc", "question_id": NaN}': 'the field "question_id" must be a string or a finite number',
    '{"prompt": "abc", "question_id": -Infinity}': 'the field "question_id"',
    '{"prompt": "abc", "question_id": 1e999}': 'the field "question_id"',
    '{"prompt": "abc", "question_id": [1]}': 'the field "question_id"',
    f'{{"prompt": "abc", "question_id": {"9" * 5000}}}': 'the field "question_id"',
    '{"prompt": "abc", "question_id": "\\ud800"}': 'the field "question_id"',
    '{"prompt": "a\\ud800b"}': 'the field "prompt" has half of a surrogate pair',
    '{"turns": ["a\\udfffb"]}': 'the field "turns" has half of a surrogate pair',
    '{"prompt": "abc", "category": "\\ud800"}': 'the field "category"',
    '{"prompt": ' + "[" * 100_000: "nested too deeply",
    '{"prompt": "abc", "x": ' + '{"a":' * 100_000: "nested too deeply",
    '{"prompt": NaN}': "no text",
    '{"turns": []}': "no text",
    "7": "not a JSON object",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_lines_are_found_before_decoding(cli, tmp_path, number):
    """The others run, and nothing of them is lost."""
    line, words = list(BAD.items())[number]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    entries, [bad] = prompts.read(file, "--batch-file")
    assert [prompt.text for prompt in entries] == ["abc"] and bad.line == 2
    assert words in bad.error and len(bad.error) < 200
    if number in (0, 6):
        result = cli("generate", "--batch-file", file, "--max-new-tokens", 4, "--method", "autoregressive", "--json")
        assert result.code == 2
        assert f"specjax: {file}, line 2: " in result.err and words in result.err
        document = json.loads(result.out)
        assert [entry["question_id"] for entry in document["results"]] == [7] and document["left"] == 0


def test_many_bad_lines_are_counted(refused, tmp_path):
    """Before a model is loaded."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}\n" * 8)
    for arguments in (("generate", "--target", "none", "--batch-file", file), ("bench", file, "--target", "none")):
        sentence = refused(*arguments)
        assert sentence.count("no text: it needs the field") == 5 and "line 5: " in sentence, sentence
        assert "; and 3 more bad lines" in sentence


def test_what_never_ends_is_not_read_to_its_end(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(files.read_text, "__defaults__", (1 << 20,))
    assert "/dev/zero has more than 1,048,576 bytes" in refused("generate", "--batch-file", "/dev/zero")
    assert "/dev/zero has more than" in refused("bench", "/dev/zero")
    options = ("--method", "input_guided", "--source", "/dev/zero")
    assert "--source: /dev/zero has more than" in refused("generate", "abc", *options)
    pipe = tmp_path / "costs.json"
    os.mkfifo(pipe)
    endless = subprocess.Popen(["sh", "-c", f"exec cat /dev/zero > {pipe}"], stderr=subprocess.DEVNULL)
    assert f"--costs: {pipe} has more than 67,108,864 bytes" in refused("generate", "abc", "--costs", pipe)
    assert endless.wait(20) != 0


def test_what_nobody_reads_may_be_odd(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "abc", "reference": NaN, "size": {"9" * 5000}, "other": "\\ud800"}}\n')
    entries, bad = prompts.read(file, "--batch-file")
    assert not bad and entries[0].text == "abc"


def test_pairs_of_surrogates_are_characters(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert prompts.read(file, "--batch-file")[0][0].text == "😀"


def test_arguments_that_are_no_text(refused, monkeypatch):
    assert "the PROMPT is not UTF-8 text" in refused("generate", "a\udc80b")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff"), encoding="utf-8"))
    assert "the PROMPT on stdin is not UTF-8 text (byte 3)" in refused("generate", "-")


PIECES = [
    '{"prompt": "abc"}', '{"turns": ["a", "b"]}', '"question_id"', '"turns"', '"prompt"', '"category"', "NaN", "1e999",
    "9" * 700, '"\\ud800"', '"\\ud83d\\ude00"', "{", "}", "[", "]", ":", ",", '"', "\\", "\\u", "null", "true", "7",
    "\n", "\r", "\n\n", "\x00", "\x1b]0;a\x07", "\ufeff", " ", "é", "[" * 3000, '{"prompt": "x", "question_id": ', "-",
    "\u2028", "a",
]  # fmt: skip


@pytest.mark.parametrize("cases", [1000, exhaustive(100_000)])
def test_any_file(cases, tmp_path):
    """Prompts that can be encoded and written as JSON, or sentences."""
    rng = random.Random(7)
    file, good, refused = tmp_path / "prompts.jsonl", 0, 0
    for _ in range(cases):
        content = "".join(rng.choices(PIECES, k=rng.randrange(1, 12))).encode()
        if rng.random() < 0.05:
            content += bytes([rng.randrange(128, 256)])
        file.write_bytes(content)
        try:
            entries, bad = prompts.read(file, "--batch-file", jsonl=rng.random() < 0.8)
        except UsageError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        for prompt in entries:
            prompt.text.encode(), prompt.task.encode()
            json.dumps(prompt.question_id, allow_nan=False).encode()
        for entry in bad:
            sentence = prompts.describe([entry], file)
            assert visible(sentence) == sentence and "\n" not in sentence and len(sentence) < 500
        good += bool(entries)
    assert good > cases / 50 and refused > cases / 100
