"""Examples of the README run as they stand there."""

import io
import pathlib
import re
import sys

import jax
import pytest
from toy import tiny_llama

import specjax

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
SERVE = README[README.index("## Requests that come and go") :]


class Characters:
    """Id i is one character of 64; every eighth is the first byte of one that never ends."""

    eos = (63,)

    def chat(self, text):
        return [ord(c) % 60 for c in text.strip()]

    def decode(self, ids):
        return b"".join(b"\xc3" if i % 8 == 5 else bytes([48 + i]) for i in ids).decode(errors="replace")


@pytest.mark.parametrize("lines", [["one", "two and three", "4"]])
def test_serve(lines, monkeypatch, capsys):
    """Every line of stdin gets a text that ends, as that of its request alone; split characters are not shown."""
    source = re.search(r"^```python\n(.*?)^```$", SERVE, re.MULTILINE | re.DOTALL)[1]
    target, tokenizer = tiny_llama(), Characters()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    short = source.replace('"max_new_tokens": 256', '"max_new_tokens": 24').replace("512", "64")
    names = {"specjax": specjax, "jax": jax, "sys": sys, "target": target, "tokenizer": tokenizer}
    exec(compile(short, "README.md", "exec"), names)
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
