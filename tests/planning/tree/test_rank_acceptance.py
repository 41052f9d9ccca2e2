"""Tests of the sources of the acceptance by rank."""

from __future__ import annotations

import json

import pytest

from specjax import UsageError
from specjax.planning.tree.rank_acceptance import read_acceptance


def test_acceptance_from_text_and_numbers():
    assert read_acceptance(".6,.2,.1") == ([0.6, 0.2, 0.1], "given")
    assert read_acceptance([0.5])[0] == [0.5]
    assert read_acceptance(",".join(["0.0010000"] * 900))[0] == [0.001] * 900, "too long a name for a file"
    for bad in ("a,b", "0.9,0.3", "-0.1", "", "nan"):
        with pytest.raises(UsageError, match="--acceptance"):
            read_acceptance(bad)


def test_acceptance_from_files(tmp_path):
    rules = [
        {"rule": "standard", "n": 1, "acceptance": 0.7},
        {"rule": "recursive_rejection", "n": 2, "acceptance": 0.8},
        {"rule": "recursive_rejection", "n": 4, "acceptance": 0.9},
        {"rule": "spectr", "n": 2, "acceptance": 0.81},
    ]
    file = tmp_path / "verifiers.json"
    file.write_text(json.dumps({"rules": rules}))
    curve, source = read_acceptance(file)
    assert curve == pytest.approx([0.7, 0.1, 0.05, 0.05]) and "recursive_rejection" in source
    file.write_text(json.dumps({"overall": {"two_model": {"acceptance_by_depth": [0.8, 0.6, None]}}}))
    curve, source = read_acceptance(str(file))
    assert curve == pytest.approx([0.7]) and "rank 1" in source
    for text in ("{}", "[]", "no json", json.dumps({"overall": {"x": {"acceptance_by_depth": [None]}}})):
        file.write_text(text)
        with pytest.raises(UsageError, match="--acceptance"):
            read_acceptance(file)
