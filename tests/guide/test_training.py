"""The example of docs/training.md runs as it stands there."""

import pathlib
import re

import jax
import numpy as np
from toy import tiny_llama

import specjax

DOCS = pathlib.Path(__file__).parents[2] / "docs/training.md"


def test_the_example(capsys):
    source = re.search(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)[1]
    target = tiny_llama()
    prompts = np.random.default_rng(0).integers(1, 60, (4, 6)).tolist()
    answers = specjax.decode(target, None, prompts, key=0, max_new_tokens=12).to_lists()
    exec(
        compile(source, "training.md", "exec"),
        {"target": target, "jax": jax, "pairs": zip(prompts, answers, strict=True)},
    )
    *steps, per_pass = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2"], "one lesson, twice"
    assert 1 <= float(per_pass) <= 4
