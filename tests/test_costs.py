"""Costs of passes from their three sources."""

import types

import numpy as np
from toy import tiny_llama

from specjax import costs


def test_measured_on_this_device():
    found = costs.measured(tiny_llama(), (1, 4), context=16, repeats=3)
    assert found.shape == (2,) and found[0] == 1.0 and found[1] > 0


def test_planned_from_a_report():
    report = lambda n, ms: types.SimpleNamespace(name=f"verify {n}", compiles=True, seconds={"schedule": ms})
    plan = types.SimpleNamespace(widths=(report(1, 4.0), report(8, 5.0), report(16, 7.0)))
    np.testing.assert_allclose(costs.planned(plan, (1, 8, 12)), [1, 1.25, 1.5])


def test_estimated_rises_with_width_and_batch():
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 16):
            found = costs.estimated((1, 4, 8, 32), batch, dtype, "cpu")
            assert found[0] == 1 and (np.diff(found) > 0).all()
