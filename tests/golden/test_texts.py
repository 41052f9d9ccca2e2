"""The texts of before: equal keys give equal texts, method by method."""

import importlib.util
import json
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent
TEXTS = json.loads((FOLDER / "texts.json").read_text())


def _record():
    spec = importlib.util.spec_from_file_location("record", FOLDER / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["of_methods", "of_rules", "of_serve", "of_resume", "of_loops"])
def test_texts_are_those_of_before(part):
    seen = 0
    for name, texts, _ in getattr(_record(), part)():
        assert texts == TEXTS[name]["texts"], name
        seen += 1
    assert seen > 1
