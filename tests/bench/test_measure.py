"""Timed runs: the parts of a program that run before the clock starts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from toy import markov

from specjax.bench import measure
from specjax.drafters import prompt_lookup
from specjax.engine.prepare import Settings


@pytest.mark.parametrize(("rows", "widths"), [(1, [1, 3, 8]), (4, [1, 5])])
def test_every_width_of_a_batch_runs_beforehand(monkeypatch, rows, widths):
    """The widths of some drafters depend on the batch, as those of `auto` do."""
    drafter = prompt_lookup(7)
    hooks = drafter.hooks._replace(widths=lambda batch, target: (1, 3, 8) if batch == 1 else (1, 5))
    task = measure.DecodeTask(
        markov(), drafter.replace(hooks=hooks), [[0, 1]] * rows, measure.row_keys(0, range(rows)), Settings(), 8
    )
    job, room = task.job(), []
    state = SimpleNamespace(length=job.starts)
    state._replace = lambda stop: room.append(np.unique(stop - state.length).tolist())
    programs = SimpleNamespace(start=lambda job: state, step=lambda parts, state: ())
    monkeypatch.setattr(measure, "programs_of", lambda *arguments: programs)
    measure._run_widths(job, None)
    assert room == [[width] for width in widths]
