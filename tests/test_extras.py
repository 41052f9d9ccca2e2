"""Tests of what is not in the library's own dependencies: a sentence names the extra that has it."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

import specjax
from specjax import analysis
from specjax.cli import NEEDED, main
from specjax.errors import optional_import
from specjax.models.loading.formats import gguf
from specjax.models.loading.tensors import tensors
from specjax.processors import automaton
from specjax.retrieval.datastore import store
from specjax.training.measure.plot import plot

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("matplotlib", "plots", lambda folder: analysis.plot(None)),
        ("matplotlib", "plots", lambda folder: plot([])),
        ("gguf", "gguf", lambda folder: gguf._kind(2)),
        ("gguf", "gguf", lambda folder: tensors.block_size.__wrapped__("Q4_K")),
        ("pydivsufsort", "datastore", lambda folder: store.make_shard(None)),
        ("outlines_core", "constraints", lambda folder: automaton.regex("a+", None, eos=(0,))),
    ],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, package, extra, call):
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(specjax.UsageError, match=rf"package {package}; run pip install 'specjax\[{extra}\]'"):
        call(tmp_path)
    assert extra in PROJECT["optional-dependencies"]


def test_what_is_broken_is_not_called_missing():
    with (
        pytest.raises(specjax.UsageError, match=r"cannot be imported \(libx.so: cannot open\); run pip install"),
        optional_import("gguf", "a GGUF file needs"),
    ):
        raise ImportError("libx.so: cannot open")  # without a name, as extensions do


def test_the_command_line_without_its_packages(monkeypatch, capfd):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit) as stop:
        main(["methods"])
    assert stop.value.code == 2
    assert capfd.readouterr().err == "specjax: the command line needs typer; run pip install 'specjax[cli]'\n"


def test_the_library_is_light():
    names = lambda lines: {line.split(">")[0].split("[")[0] for line in lines}
    assert not names(PROJECT["dependencies"]) & {*NEEDED, "transformers", "matplotlib", "gguf"}
    assert set(NEEDED) <= names(PROJECT["optional-dependencies"]["cli"])
