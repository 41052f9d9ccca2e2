"""The examples of README and docs: every name they use is there, and those that tell how to begin run as they stand."""

import io
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from toy import tiny_llama

import specjax

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = "import jax\nimport specjax\ntarget = tokenizer = prompts = key = None\n"  # as docs/index.md says


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_no_example_uses_a_name_that_is_not_there(tmp_path):
    pages = [page for page in PAGES if blocks(page)]
    assert len(pages) > 8
    for page in pages:
        # What a line shows by itself, such as `result.to_lists()`, is fine; a name from nowhere is not.
        (tmp_path / f"{page.stem}.py").write_text(GIVEN + "\n".join(blocks(page)), encoding="utf-8")
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    command = [ruff, "check", "--isolated", "--select", "F821,F823", "--output-format", "concise", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Characters:
    """Id i is one character of 64; every eighth is the first byte of one that never ends."""

    eos = (63,)

    def chat(self, text):
        return [ord(c) % 60 for c in text.strip()]

    def decode(self, ids):
        return b"".join(b"\xc3" if i % 8 == 5 else bytes([48 + i]) for i in ids).decode(errors="replace")


@pytest.fixture
def small(monkeypatch):
    """`specjax.load` of a tiny model. (target, tokenizer)."""
    loaded = tiny_llama(), Characters()
    monkeypatch.setattr(specjax, "load", lambda *args, **options: loaded)
    return loaded


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_runs_as_it_stands(page, small, capsys):
    first = blocks(ROOT / page)[0]
    exec(compile(first.replace("max_new_tokens=128", "max_new_tokens=24"), page, "exec"), {})
    target, tokenizer = small
    prompts = [tokenizer.chat("Name ten rivers.")]
    ids = specjax.decode(target, "autoregressive", prompts, key=0, max_new_tokens=24, eos=tokenizer.eos).to_lists()[0]
    assert tokenizer.decode(ids) in capsys.readouterr().out


def test_the_example_of_training(capsys):
    prompts = np.random.default_rng(0).integers(1, 60, (4, 6)).tolist()
    namespace = {"target": tiny_llama(), "jax": jax, "specjax": specjax, "prompts": prompts}
    short = blocks(ROOT / "docs/training.md")[0].replace("max_new_tokens=48", "max_new_tokens=12")
    exec(compile(short, "training.md", "exec"), namespace)
    *steps, per_pass = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2"], "one lesson, twice"
    assert 1 <= float(per_pass) <= 4


def test_the_examples_of_own_models(capsys):
    """Both targets keep their promises; the texts, here plain and drafted, are the same."""
    namespace = {"__name__": "own_models"}
    short = {"max_new_tokens=24": "max_new_tokens=8", "target, None": 'target, "autoregressive"'}
    short["quick, None"] = 'quick, "prompt_lookup"'
    for block in blocks(ROOT / "docs/own_models.md"):
        for long, brief in short.items():
            block = block.replace(long, brief)
        exec(compile(block, "own_models.md", "exec"), namespace)
    first, texts, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Mine keeps all 13 promises") and second.startswith("Mine keeps all 12 promises")
    assert str(namespace["again"].to_lists()) in texts


@pytest.mark.parametrize("lines", [["one", "two and three", "4"]])
def test_serve(lines, small, monkeypatch, capsys):
    """Every line of stdin gets a text that ends, as that of its request alone; split characters are not shown."""
    target, tokenizer = small
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    short = blocks(ROOT / "docs/serving.md")[0].replace("max_new_tokens=256", "max_new_tokens=24")
    exec(compile(short.replace("512", "64"), "serving.md", "exec"), {})
    texts, ended = {}, {}
    for line in capsys.readouterr().out.splitlines():
        number, text, *reason = re.fullmatch(r"(\d+) ('.*'|\".*\") (\w*)", line).groups()
        texts[int(number)] = texts.get(int(number), "") + eval(text)
        ended |= {int(number): reason[0]} if reason[0] else {}
    assert sorted(texts) == sorted(ended) == list(range(len(lines)))
    for number, line in enumerate(lines):
        options = {"temperature": 0.7, "eos": tokenizer.eos, "max_new_tokens": 24}
        key = jax.random.key(number)[None]
        ids = specjax.decode(target, None, [tokenizer.chat(line)], key=key, **options).to_lists()[0]
        assert texts[number] == tokenizer.decode([i for i in ids if i not in tokenizer.eos])
        assert ended[number] == ("eos" if ids[-1] in tokenizer.eos else "length")
