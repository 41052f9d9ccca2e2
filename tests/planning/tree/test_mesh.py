"""Choice of the mesh by the time of a plain step."""

from __future__ import annotations

import pytest

from specjax.planning.records import ProgramReport
from specjax.planning.tree import mesh
from specjax.planning.workload import make_workload


@pytest.fixture
def times(monkeypatch):
    """Milliseconds of a plain step by the size of the axis; None: it does not fit."""

    def patch(**milliseconds):
        def compiled(work, cache, notify, *, only, rename, nodes):
            assert only == ("step",) and nodes == 1 and work.method == "autoregressive"
            ms = milliseconds[f"_{work.model}"]
            return [ProgramReport(rename["step"], ms is not None, seconds={"schedule": ms})]

        monkeypatch.setattr(mesh, "compile_programs", compiled)

    return patch


@pytest.mark.parametrize(
    ("milliseconds", "best"),
    [
        ({"_1": 4.0, "_2": 3.0, "_4": 2.5, "_8": 2.7}, 4),
        ({"_1": 1.0, "_2": 1.5, "_4": 2.0, "_8": 3.0}, 1),
        ({"_1": None, "_2": None, "_4": 3.0, "_8": 3.5}, 4),
        ({"_1": None, "_2": None, "_4": None, "_8": None}, 8),
    ],
)
def test_the_fastest_size_that_fits(times, milliseconds, best):
    times(**milliseconds)
    work, reports = mesh.choose_mesh(make_workload("llama3_8b", "h200:8"), False, lambda name: None)
    assert work.model == best and work.topology.name == "h200:8"
    assert [report.name for report in reports] == ["model 1", "model 2", "model 4", "model 8"]


def test_a_single_device_leaves_no_choice(times):
    work = make_workload("llama3_8b", "h200:1")
    assert mesh.choose_mesh(work, False, lambda name: None) == (work, ())
