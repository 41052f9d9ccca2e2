"""Choice of the draft tree and the mesh for a chip from compiled programs: `choose` with the compiler's costs.

t_target(n) and t_draft of `specjax.planning.tree.choice` come from the schedule and from the roofline (see
`specjax.costs.roofline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.costs.roofline import CLOCKS, clocks_of
from specjax.errors import UsageError
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.records import ProgramReport
from specjax.planning.report_cache import versions
from specjax.planning.tree.choice import Choice, choose
from specjax.planning.tree.mesh import choose_mesh
from specjax.planning.tree.rank_acceptance import read_acceptance
from specjax.planning.workload import describe, make_workload

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
DRAFTING = {"head", "method", "tree", "num_draft_tokens", "options"}
"""Arguments of `make_workload` that a plan does not have."""
SIDES = ("schedule", "roofline")  # keys of CLOCKS, in the order of the report


@dataclass(frozen=True)
class Plan:
    """The cost curve and the chosen trees."""

    inputs: dict[str, Any]
    versions: dict[str, str]
    acceptance: tuple[float, ...]  # acceptance rates by rank
    acceptance_source: str
    widths: tuple[ProgramReport, ...]  # target passes over 1, 2, 4, ... nodes
    draft: ProgramReport | None  # one pass of the draft model
    choices: tuple[Choice, ...]
    clocks: dict[str, str] = field(default_factory=lambda: dict(CLOCKS))  # meaning of the time estimates
    meshes: tuple[ProgramReport, ...] = ()  # plain steps by the size of the axis "model"; (): it was given

    def to_json(self) -> dict:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)


def plan(
    target: str | Any,
    topology: str,
    *,
    acceptance: str | Path | Sequence[float],
    widths: Sequence[int] = WIDTHS,
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> Plan:
    """Propose the tree and the mesh for a pair of models, chips and a measured acceptance.

    Args:
      acceptance: probabilities by rank, as a text ".6,.2,.1" or as numbers. The r-th is the probability that the r-th
        child of an accepted node is accepted. It can also be a JSON file of `specjax compare-verifiers` or
        `specjax bench`.
      widths: numbers of nodes for which a target pass is compiled. Costs are interpolated between them.
      cache, on_step, options: arguments of `compile_report`, without those of DRAFTING. Without a draft model, drafting
        has no cost, as with prompt lookup. Without `model`, the plan chooses its size
        (`specjax.planning.tree.mesh`).

    Raises: UsageError for bad options, a missing compiler, or a plain step that does not compile.
    """
    curve, source = read_acceptance(acceptance)
    sizes = sorted({1, *widths})
    if len(sizes) < 2 or sizes[0] < 1 or sizes[-1] > 512:
        raise UsageError(f"--widths must be numbers from 1 to 512, at least one above 1, not {list(widths)}")
    for name in DRAFTING & set(options):
        raise UsageError(
            f"a plan chooses the tree of a draft model, and has no {name}; leave it out, or compile_report"
        )
    notify = on_step or (lambda name: None)
    draft = options.pop("draft", None)
    pair = make_workload(target, topology, draft=draft, **options)
    if pair.reading is not None:
        raise UsageError(
            f"--target: {pair.target.name} is a diffusion model, which drafts no tree; use specjax compile"
        )
    work = dataclasses.replace(pair, method="autoregressive", draft=None)
    work, meshes = choose_mesh(work, cache, notify) if options.get("model") is None else (work, ())
    reports = []
    for n in sizes:
        width_reports = compile_programs(work, cache, notify, only=("step",), rename={"step": f"verify {n}"}, nodes=n)
        reports += width_reports
    draft_report = None
    if pair.draft is not None:
        alone = dataclasses.replace(work, target=pair.draft)
        (draft_report,) = compile_programs(alone, cache, notify, only=("step",), rename={"step": "draft"}, nodes=1)
        _require(draft_report)
    _require(reports[0])
    good = [(n, r) for n, r in zip(sizes, reports, strict=True) if r.compiles]
    choices = []
    for side in SIDES:
        curve_of_cost = [(n, r.seconds[side]) for n, r in good]
        choices.append(choose(curve, curve_of_cost, draft_report.seconds[side] if draft_report else 0.0, side))
    inputs = describe(work) | {"draft": pair.draft.name if pair.draft else None}
    clocks = clocks_of(work.topology.chip)
    return Plan(inputs, versions(), tuple(curve), source, tuple(reports), draft_report, tuple(choices), clocks, meshes)


def _require(report: ProgramReport) -> None:
    if not report.compiles:
        raise UsageError(f"--topology: {report.name} does not compile: {report.reason}; see specjax compile")
