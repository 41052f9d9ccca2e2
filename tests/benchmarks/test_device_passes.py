"""The script that measures a device unattended: what it prints where a row fails, or the time is over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import device_passes
import pytest
from quick_compile import flags

SCRIPT = Path(device_passes.__file__)


def test_a_row_that_fails_does_not_end_the_others(tmp_path, capsys):
    report = device_passes.Report(tmp_path / "device.json", ["bad", "good"])
    report.measure("bad", lambda: [][0])
    report.measure("good", lambda: [device_passes.Row("a step", "1.00 ms")])
    printed = capsys.readouterr().out
    assert "| bad | failed | list index out of range |" in printed and "| a step | 1.00 ms |  |" in printed
    written = json.loads((tmp_path / "device.json").read_text())
    assert [row["value"] for row in written["rows"]] == ["failed", "1.00 ms"] and written["missing"] == []
    assert report.failed == ["bad"] and {"device", "jax", "python", "date"} <= written.keys()


@pytest.mark.parametrize("name", ["smollm2_135m", "nothing"])
def test_the_large_model_is_another_one(name, monkeypatch, capsys):
    """Equal rows would replace each other."""
    monkeypatch.setattr("sys.argv", ["device_passes", "--config", name, "--tiny"])
    with pytest.raises(SystemExit):
        device_passes.main()
    assert f"not {name}" in capsys.readouterr().err


def test_after_the_time_the_missing_rows_are_named(tmp_path, capsys, monkeypatch):
    report = device_passes.Report(tmp_path / "device.json", ["done", "slow", "slower"])
    report.measure("done", lambda: [device_passes.Row("done", "1")])
    codes = []
    monkeypatch.setattr(device_passes.os, "_exit", codes.append)
    report.give_up()
    assert codes == [3] and json.loads((tmp_path / "device.json").read_text())["missing"] == ["slow", "slower"]
    assert "| slower | not run | the time was over |" in capsys.readouterr().out


def test_cases_cover_layouts_batches_and_contexts():
    groups = device_passes.cases_for("llama3_8b", "smollm2_135m")
    cases = [case for group in groups.values() for case in group]
    assert len({case.name for case in cases}) == len(cases)
    large = [case for case in cases if case.config == "llama3_8b"]
    assert {(case.batch, case.context) for case in large} == {
        (1, 100),
        (8, 100),
        (32, 100),
        (64, 100),
        (1, 4000),
        (8, 4000),
    }
    assert {case.layout for case in large} == {"default", "stacked"}


@pytest.mark.exhaustive
def test_a_complete_run_with_toy_shapes(tmp_path):
    """Every row, on this CPU; with torch, `transformers` beside it."""
    file = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--minutes", "10", "--repeats", "1", "--out", str(file)],
        capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags(devices=1)},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])
    written = json.loads(file.read_text())
    names = [row["what"] for row in written["rows"]]
    assert not written["missing"] and all(row["value"] not in ("failed", "") for row in written["rows"]), written
    for name in ("llama3_8b: a step", "llama3_8b, batch 64: a step", "llama3_8b, stacked: a step",
                 "llama3_8b, 300 tokens of context: prefill", "smollm2_135m: a step", "copies in memory",
                 "smollm2_135m: a pass over 8, 16, 32, 64 tokens", "float32 products: relative error"):  # fmt: skip
        assert name in names
