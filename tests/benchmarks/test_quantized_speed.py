"""The benchmark of quantised decoding: its sides, and the peers that are not installed."""

import pathlib
from types import SimpleNamespace

import pytest
from scripts import module_at
from toy import quantized, tiny_llama

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "quantized_speed.py"


@pytest.fixture(scope="module")
def bench():
    return module_at(FILE)


def test_peers_that_are_not_installed_are_named(bench, monkeypatch):
    monkeypatch.setattr(bench, "PEERS", dict.fromkeys(bench.PEERS, ("no_such_library",)))
    options = SimpleNamespace(peers=["transformers", "llama.cpp"], methods=["autoregressive"], tokens=4)
    runs, missing = bench.make_runs(options, FILE, {"int8": quantized(tiny_llama(), "int8")}, [5, 6])
    assert missing == ["transformers", "llama.cpp"] and list(runs) == ["int8, autoregressive"]
    assert len(runs["int8, autoregressive"]()) == 4


def test_instruction_sets(bench):
    assert set(bench.instructions()) <= set(bench.INSTRUCTIONS)
