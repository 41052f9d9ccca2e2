"""The texts of before: equal keys give equal texts, method by method."""

import json
import pathlib

import pytest
from scripts import module_at

FOLDER = pathlib.Path(__file__).parent
TEXTS = json.loads((FOLDER / "texts.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["of_methods", "of_rules", "of_serve", "of_resume", "of_loops"])
def test_texts_are_those_of_before(part):
    num_texts = 0
    for name, texts, _ in getattr(module_at(FOLDER / "record.py"), part)():
        assert texts == TEXTS[name]["texts"], name
        num_texts += 1
    assert num_texts > 1
