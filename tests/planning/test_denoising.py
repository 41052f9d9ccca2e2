"""`specjax compile` of diffusion models: on fake devices of this machine, and with the real TPU compiler."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import pytest
import tpu
from rich.console import Console
from tiers import exhaustive

from specjax import compile_report
from specjax.cli import main
from specjax.models import LlamaConfig
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.planning import compiler, denoising
from specjax.planning.inputs import model_configs
from specjax.planning.programs import compiler_of
from specjax.planning.reports.tables import show_report
from specjax.planning.workload import make_workload

TINY = LlamaConfig(
    vocab_size=2048, width=256, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64, mlp_width=512,
    max_positions=4096, tied=False, dtype="bfloat16", stacked=True, name="tiny",
)  # fmt: skip
BLOCKS = DenoiserSettings(2047, "block_causal", 16, "same", "all_masked")
FULL = DenoiserSettings(2047, "full", None, "shifted", "all_masked")
SHORT = {"context": 256, "max_new_tokens": 64}


@pytest.fixture(autouse=True)
def kept_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def tiny_denoiser(monkeypatch):
    """Programs for devices of this process, which know no cycles: the schedule is that of the collectives alone."""
    monkeypatch.setattr(compiler, "describe_devices", lambda topology: jax.devices()[: topology.num_devices])
    modules = model_configs._modules() | {
        name: SimpleNamespace(get_config=lambda dtype="float32": TINY, get_denoiser_settings=lambda r=reading: r)
        for name, reading in (("tiny_blocks", BLOCKS), ("tiny_full", FULL))
    }
    monkeypatch.setattr(model_configs, "_modules", lambda: modules)


def test_a_command_says_what_a_pass_and_a_block_cost(tiny_denoiser, capsys):
    command = "compile --topology v5e:2x2 --context 256 --max-new-tokens 64 --no-cache --json --target tiny_blocks"
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--block", "8", "--dtype", "float32"])
    assert stop.value.code == 0
    report = json.loads(capsys.readouterr().out)
    programs = {program["name"]: program for program in report["programs"]}
    assert list(programs) == ["prefill", "pass", "fused pass", "loop"]
    assert report["inputs"]["method"] == "sdar" and report["inputs"]["reading"]["block"] == 8
    assert report["window"] == {"window": 8, "canvas": 320}
    assert 2048 // 4 in programs["pass"]["logits"]["shape"], "each device has its part of the vocabulary"
    assert programs["pass"]["flops"] < programs["fused pass"]["flops"]
    assert programs["pass"]["logits"]["rows"] == programs["fused pass"]["logits"]["rows"] == 8
    assert not any(finding["kind"] == "copy" for program in report["programs"] for finding in program["findings"])
    rows = {row["columns"]: (row["passes"], row["passes_apart"]) for row in report["blocks"]}
    assert rows == {1: (8, 9), 2: (4, 5), 4: (2, 3), 8: (1, 2)}


def test_a_control_that_asks_for_the_canvas_has_logits_of_all_of_it(tiny_denoiser):
    """The program's logits cover the canvas, whose size differs from that of the window."""
    report = compile_report("tiny_full", "v5e:1x1", method="prophet", dtype="float32", cache=False, **SHORT)
    assert report.program("pass").logits["rows"] == 320 and report.window == {"window": 32, "canvas": 320}


def test_what_a_clean_pass_costs_is_told_by_the_model():
    """Seeded ones decide a column with it, those that do not fuse only read."""
    one = SimpleNamespace(seconds={"roofline": 1.0, "schedule": 1.0})
    dear = SimpleNamespace(seconds={"roofline": 1.0, "schedule": 1.5})
    from specjax.planning.reports.denoising import _row

    fused = _row(2, 4, one, dear, causal=True, seeded=False)
    assert (fused.passes, fused.passes_apart) == (2, 3) and fused.gain == {"roofline": 1.5, "schedule": 3 / 2.5}
    assert _row(2, 4, one, None, causal=True, seeded=False).passes == 3
    assert _row(1, 4, one, None, causal=True, seeded=True).passes == 4
    assert _row(3, 4, one, None, causal=True, seeded=True).passes == 2
    full = _row(4, 32, one, dear, causal=False, seeded=False)
    assert (full.passes, full.passes_apart) == (8, None) and full.seconds_per_token["schedule"] == 8.5 / 32


@pytest.mark.tpu_compile
def test_a_fused_pass_costs_hardly_more_and_nothing_is_copied():
    tpu.devices()
    options = {"dtype": "bfloat16", "cache": False, **SHORT}
    report = compile_report(TINY, "v5e:2x2", reading=BLOCKS, **options)
    one, fused = report.program("pass"), report.program("fused pass")
    assert report.compiles and one.compile_seconds and not [f for p in report.programs for f in p.findings]
    assert one.logits["rows"] == fused.logits["rows"] == 16 and one.logits["shape"][-1] == 2048 // 4
    assert one.flops < fused.flops < 2 * one.flops, "twice the columns, but for the head"
    assert one.seconds["schedule"] <= fused.seconds["schedule"] < 1.5 * one.seconds["schedule"]
    assert one.memory.aliased >= 256 * TINY.num_layers * 2 * 128 * 2, "the cache is updated in place"
    assert [row.passes for row in report.blocks] == [16, 8, 4, 2, 1]
    assert all(row.gain["schedule"] > 1 for row in report.blocks)
    shown = Console(file=io.StringIO(), width=200)
    show_report(report, shown)
    assert "pass: the largest logits are f32[16,512] per device, of 16 columns; a window has 16, a canvas 320" in (
        shown.file.getvalue()
    )
    json.dumps(report.to_json(), allow_nan=False)


NARROW = dataclasses.replace(TINY, vocab_size=256, width=128, num_layers=2, num_heads=2, num_kv_heads=2, mlp_width=128)
"""What the compiler needs time for are passes' widths, and the loop, which has the same passes once more."""


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "config, size, loops",
    [(NARROW, 64, False), exhaustive(dataclasses.replace(TINY, width=512), 256, True)],
    ids=["passes", "passes and loops"],
)
def test_full_attention_makes_logits_of_the_window_alone(config, size, loops):
    tpu.devices()
    reading = FULL._replace(mask_token=config.vocab_size - 1)
    options = {"reading": reading, "model": 1, "context": size, "max_new_tokens": 64}
    programs = {}
    for name, method in (("whole", {}), ("kept", {"method": "fast_dllm", "options": {"memory": "dual"}})):
        work = make_workload(config, "v6e:1x1", **options, **method)
        names = tuple(one for one in denoising.names_of(work) if loops or one != "loop")
        for program in compiler.compile_programs(work, False, lambda name: None, only=names):
            programs[name, program.name] = program
    assert ("whole", "renewing pass") not in programs and not [f for p in programs.values() for f in p.findings]
    passes = [programs[key] for key in (("kept", "pass"), ("whole", "pass"), ("kept", "renewing pass"))]
    assert [program.logits["rows"] for program in passes] == [32, 32, 32], "of a canvas of 128, or of 320"
    assert passes[0].flops < passes[1].flops < passes[2].flops


def test_what_a_compiler_refuses_it_is_asked_once():
    """A pass and the one that renews what is kept are one program."""
    calls = []

    def refuse(*arguments):
        calls.append(arguments)
        raise RuntimeError("Used 20.00G of 15.75G hbm")

    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    compiled = compiler_of(SimpleNamespace(lower=refuse), ("state",), mesh)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Used"):
            compiled()
    assert calls == [("state",)]
