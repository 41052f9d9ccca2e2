"""Choice of the mesh: how many devices share the weights, for the time of one step.

More devices read the weights faster, but each layer sums over all of them. A small model is therefore fastest on few.
"""

from __future__ import annotations

import dataclasses

from specjax.models.layout import fits_heads
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.records import ProgramReport
from specjax.planning.workload import Workload


def choose_mesh(work: Workload, cache: bool, notify: Notify) -> tuple[Workload, tuple[ProgramReport, ...]]:
    """Return the workload with the size of the axis "model" whose plain step is fastest by the schedule.

    Sizes are powers of 2 that divide the heads, and the size of the workload, which is the largest. Without a size that
    compiles, the workload is unchanged.

    Returns: the workload, and a report per size, named such as "model 4". There is none if only one size is possible.
    """
    powers = [1 << i for i in range(work.model.bit_length()) if fits_heads(work.target, work.layer << i)]
    sizes = sorted({*powers, work.model})
    if len(sizes) < 2:
        return work, ()
    candidates = [dataclasses.replace(work, model=size) for size in sizes]
    reports = [
        compile_programs(one, cache, notify, only=("step",), rename={"step": f"model {one.model}"}, nodes=1)[0]
        for one in candidates
    ]
    fitting = [(report.seconds["schedule"], i) for i, report in enumerate(reports) if report.compiles]
    return (candidates[min(fitting)[1]] if fitting else work), tuple(reports)
