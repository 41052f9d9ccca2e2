"""`specjax compile` and `specjax plan`: bad input, before the compiler is loaded."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import specjax
from specjax.cli import main
from specjax.errors import UsageError
from specjax.planning.workload import describe, make_workload

GOOD = {"--target": "smollm2_135m", "--topology": "v5e:2x2"}


@pytest.fixture
def refused(capsys):
    """The one line of an exit with code 2."""

    def run(*arguments) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert stop.value.code == 2, captured
        lines = [line for line in captured.err.splitlines() if line.startswith("specjax: ")]
        assert len(lines) == 1 and "Traceback" not in captured.err
        return lines[0]

    return run


def command(name, **changes):
    options = GOOD | {"--" + key.replace("_", "-"): value for key, value in changes.items()}
    return [name, *(str(part) for pair in options.items() for part in pair)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "v5e:3x3"}, ("--topology", "2x4")),
        ({"topology": "b300:8"}, ("--topology", "v5e", "v6e")),
        ({"target": "nothing"}, ("--target", "llama3_8b")),
        ({"method": "nothing"}, ("--method", "two_model")),
        ({"method": "two_model"}, ("--draft",)),
        ({"method": "prompt_lookup", "draft": "smollm2_135m"}, ("--draft",)),
        ({"draft": "llama3_1b"}, ("--draft", "vocabulary")),
        ({"draft": "smollm2_135m", "tree": "nonsense"}, ("--tree",)),
        ({"tree": "2x1"}, ("--tree", "two_model")),
        ({"method": "jacobi", "num_draft_tokens": 0}, ("--num-draft-tokens",)),
        ({"head": "nothing"}, ("--head", "eagle3")),
        ({"head": "eagle3", "draft": "smollm2_135m"}, ("--head", "--draft")),
        ({"head": "eagle3", "method": "medusa"}, ("--head eagle3", "--method eagle3")),
        ({"head": "eagle3", "method": "auto"}, ("--method auto", "leave --method out", "eagle3")),
        ({"method": "medusa"}, ("--head medusa",)),
        ({"head": "eagle3:layers=2"}, ("--head eagle3:layers=2", "draft_vocab_size=N")),
        ({"head": "eagle", "target": "gemma3_270m"}, ("--head", "Llama")),
        ({"batch_size": 0}, ("--batch-size",)),
        ({"batch_size": 3, "data": 2}, ("--batch-size", "--data")),
        ({"data": 3, "batch_size": 3, "model": 2}, ("--data", "4 devices")),
        ({"model": 8}, ("--model", "4 devices")),
        ({"context": 0}, ("--context",)),
        ({"context": 10**6}, ("--context", "8192")),
        ({"dtype": "int8"}, ("--dtype",)),
        ({"cache_dtype": "int4"}, ("--cache-dtype", "int8")),
        ({"temperature": -1}, ("--temperature",)),
        ({"temperature": 1, "top_k": 0}, ("--top-k", "at least 1")),
        ({"temperature": 1, "top_p": 1.5}, ("--top-p", "at most 1")),
        ({"temperature": 1, "min_p": -0.1}, ("--min-p", "from 0 to 1")),
        ({"repetition_penalty": 0}, ("--repetition-penalty", "above 0")),
        ({"target": "llada_8b", "presence_penalty": 0.5}, ("penalties", "diffusion")),
        ({"set": "group"}, ("--set", "NAME=VALUE")),
        ({"method": "lookahead", "set": "nothing=3"}, ("--set nothing=3", "window")),
        ({"method": "lookahead", "set": "window=x"}, ("--set window", "whole number")),
        ({"method": "nothing", "set": "x=1"}, ("--method", "two_model")),
        ({"draft": "smollm2_135m", "set": "tree=2x1"}, ("--set tree=2x1", "--tree")),
        ({"draft": "smollm2_135m", "set": "num_tokens=3", "num_draft_tokens": 2}, ("--set", "--num-draft-tokens")),
        ({"draft": "smollm2_135m", "set": "num_tokens=3", "tree": "2x1"}, ("--set num_tokens", "--tree")),
        ({"method": "sdar"}, ("--method sdar", "smollm2-135m is autoregressive", "llada_8b")),
        ({"method": "sdar", "set": "tau=0.5"}, ("--method sdar", "smollm2-135m is autoregressive")),
        ({"block": 4}, ("--block", "smollm2-135m is autoregressive", "leave it out")),
        ({"target": "llada_8b", "draft": "smollm2_135m"}, ("--draft", "llada-8b is a diffusion model")),
        ({"target": "llada_8b", "head": "eagle3"}, ("--head", "llada-8b is a diffusion model")),
        ({"target": "sdar_4b", "tree": "2x1"}, ("--tree", "sdar-4b is a diffusion model")),
        ({"target": "sdar_4b", "num_draft_tokens": 3}, ("--num-draft-tokens", "sdar-4b is a diffusion model")),
        (
            {"target": "dream_7b", "method": "prompt_lookup"},
            ("--method prompt_lookup", "dream-7b", "linear_spec, llada, llada21"),
        ),
        ({"target": "dream_7b", "method": "nothing"}, ("--method nothing is unknown", "linear_spec, llada, llada21")),
        ({"target": "dream_7b", "method": "constraint"}, ("--method constraint needs an automaton",)),
        ({"target": "llada_8b", "method": "sdar"}, ("sdar needs a block-causal model", "llada")),
        ({"target": "llada_8b", "method": "dream", "block": 8}, ("--block", "dream has no blocks")),
        ({"target": "llada_8b", "block": 8, "set": "block=16"}, ("--block", "--set block")),
        ({"target": "sdar_4b", "block": 0}, ("--block must be at least 1",)),
        ({"target": "sdar_4b", "set": "block=4"}, ("--set block=4", "sdar", "tau")),
    ],
)
def test_bad_options_of_compile(refused, changes, words):
    line = refused(*command("compile", **changes))
    assert all(word in line for word in words), line


def test_the_same_bits_are_of_rows_that_are_whole_and_of_bfloat16(refused):
    assert 'set its axis "sequence" to 1' in refused(*command("compile", sequence=2), "--same-bits")
    assert 'needs dtype "bfloat16", not "float32"' in refused(*command("compile", dtype="float32"), "--same-bits")
    assert 'with cache_dtype "int8"' in refused(*command("compile", cache_dtype="int8"), "--same-bits")
    work = make_workload("smollm2_135m", "v5e:2x2", draft="smollm2_135m", same_bits=True)
    assert work.target.same_bits and not work.draft.same_bits
    assert work.devices == make_workload("smollm2_135m", "v5e:2x2", draft="smollm2_135m").devices
    assert describe(work)["same_bits"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acceptance": "much"}, ("--acceptance",)),
        ({"acceptance": ".9,.9"}, ("--acceptance",)),
        ({"acceptance": ".5", "widths": "a"}, ("--widths",)),
        ({"acceptance": ".5", "widths": "1"}, ("--widths",)),
        ({"acceptance": ".5", "topology": "v5e"}, ("--topology",)),
        ({"acceptance": "missing.json"}, ("--acceptance", "missing.json")),
        ({"acceptance": ".5", "target": "sdar_4b"}, ("--target: sdar-4b is a diffusion model", "specjax compile")),
    ],
)
def test_bad_options_of_plan(refused, changes, words):
    line = refused(*command("plan", **changes))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", ["options", "tree", "num_draft_tokens"])
def test_a_plan_has_no_tree(name):
    with pytest.raises(UsageError, match=f"a plan chooses the tree, and has no {name}"):
        specjax.plan("smollm2_135m", "v5e:1x1", acceptance=".5", **{name: "1x1"})


def test_missing_compiler(refused, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *arguments: None if name == "libtpu" else real(name, *arguments)
    )
    for name, more in (("compile", {}), ("plan", {"acceptance": ".5"})):
        assert "pip install 'specjax[tpu-compile]'" in refused(*command(name, **more), "--no-cache")


def test_import_is_light():
    """The planner is loaded when it is first asked for."""
    import subprocess
    import sys

    code = "import specjax, sys; assert 'specjax.planning' not in sys.modules; specjax.plan; specjax.compile_report"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_are_kept_and_read_back(tmp_path, monkeypatch):
    from specjax.planning import report_cache
    from specjax.planning.inputs.model_configs import load_config
    from specjax.planning.inputs.topologies import parse_topology
    from specjax.planning.records import MemoryUse, ProgramReport
    from specjax.planning.workload import Workload

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = Workload(load_config("smollm2_135m", "bfloat16"), parse_topology("v5e:1x1"))
    report = ProgramReport(
        "step", True, memory=MemoryUse(1, 2, 3, 1, 9), seconds={"roofline": 1.0}, findings=({"kind": "copy"},)
    )
    report_cache.save(work, "step", None, report)
    assert report_cache.load(work, "step", None) == report
    assert report_cache.load(work, "loop", None) is None
    assert report_cache.load(dataclasses.replace(work, batch=2), "step", None) is None
    assert report_cache.load(work, "step", 8) is None
    with jax.default_matmul_precision("default"):  # float32 products have other FLOPs
        assert report_cache.load(work, "step", None) is None
    for file in tmp_path.rglob("*.json"):
        file.write_text("{damaged")
    assert report_cache.load(work, "step", None) is None
