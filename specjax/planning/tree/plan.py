"""Choice of draft, tree and mesh for a chip from compiled programs.

For each draft, `specjax.planning.tree.choice` chooses the tree. t_target(n) and the pass of a draft model come from the
compiled programs, by the schedule and by the roofline (see `specjax.costs.roofline`). Other drafts have the costs of
`specjax.planning.tree.drafts`. Acceptance is an input, and a plan contains the source of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specjax.catalog import find_drafter
from specjax.catalog.defaults import NATIVE
from specjax.costs.drafting import long_context
from specjax.costs.roofline import CLOCKS, clocks_of
from specjax.errors import UsageError
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.memory import memory_of, target_of
from specjax.planning.records import ProgramReport
from specjax.planning.report_cache import versions
from specjax.planning.tree.choice import Choice, choose
from specjax.planning.tree.drafts import (
    Candidate,
    DraftCost,
    Rates,
    cost_in_seconds,
    draft_cost,
    find_candidates,
    flags_of,
)
from specjax.planning.tree.mesh import choose_mesh
from specjax.planning.workload import Workload, describe, make_workload

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
FIXED = {"tree", "num_draft_tokens", "options"}
"""Arguments of `make_workload` that a plan does not have, because it chooses them."""
SIDES = ("schedule", "roofline")  # keys of CLOCKS, in the order of the report
PLAIN = "autoregressive"
LONG_DRAFTS = "sparse_cache and triforce"
"""The methods that draft over a part of the target's cache."""
NO_RATES = (
    f"the target's own module ({NATIVE}) is not compared, because its acceptance depends on the checkpoint; give it "
    f"with --acceptance {NATIVE}=.6,.2"
)


@dataclass(frozen=True)
class DraftPlan:
    """A draft with its best tree by each estimate of time."""

    name: str  # of the draft model, head or method
    method: str
    acceptance: tuple[float, ...]  # acceptance rates by rank; (): plain decoding
    acceptance_source: str
    is_given: bool  # named by the user
    choices: tuple[Choice, ...]  # by SIDES
    tokens_per_second: dict[str, float]  # of all rows, by SIDES
    flags: str  # options of `specjax generate` for the choice by the schedule

    def choice(self, side: str = "schedule") -> Choice:
        """Return the tree by one estimate of time."""
        return next(choice for choice in self.choices if choice.side == side)


@dataclass(frozen=True)
class Plan:
    """The cost curve, and all drafts with their best trees."""

    inputs: dict[str, Any]
    versions: dict[str, str]
    widths: tuple[ProgramReport, ...]  # target passes over 1, 2, 4, ... nodes
    drafts: tuple[DraftPlan, ...]  # the fastest by the schedule first; plain decoding is one of them
    choices: tuple[Choice, ...]  # of the fastest draft that the user named, or of the fastest one
    draft_passes: tuple[ProgramReport, ...]  # one pass of each draft model
    clocks: dict[str, str] = field(default_factory=lambda: dict(CLOCKS))  # meaning of the time estimates
    notes: tuple[str, ...] = ()  # sentences about drafts that are not compared, and about long contexts
    meshes: tuple[ProgramReport, ...] = ()  # plain steps by the size of the axis "model"; (): it was given

    @property
    def best(self) -> DraftPlan:
        """Return the draft with the most expected tokens per second by the schedule."""
        return self.drafts[0]

    def to_json(self) -> dict:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)


def plan(
    target: str | Any,
    topology: str,
    *,
    acceptance: Rates | Mapping[str, Rates] | None = None,
    draft: str | Any | Sequence[Any] = (),
    head: str | Sequence[str] = (),
    method: str | Sequence[str] = (),
    widths: Sequence[int] = WIDTHS,
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> Plan:
    """Choose the draft, its tree and the mesh for a target and chips.

    The drafts are plain decoding, the drafters of the catalogue that need no model and have a typical acceptance, and
    all drafts that are given.

    Args:
      acceptance: probabilities by rank, as a text ".6,.2,.1" or as numbers. The r-th is the probability that the r-th
        child of an accepted node is accepted. It can also be a JSON file of `specjax compare-verifiers` or
        `specjax bench`. It applies to all drafts that are given. Without any it is that of a draft without cost. A dict
        has acceptance by the name of a draft. Without a given draft it is that of the target's own module, "native", if
        there is one. Drafts without one use the typical acceptance of the catalogue.
      draft: draft models, as in `make_workload`. head: kinds of heads, as in `make_workload`. method: more drafters
        without a model.
      widths: numbers of nodes for which a target pass is compiled. Costs are interpolated between them.
      cache, on_step, options: arguments of `compile_report`, without those of FIXED. Without `model`, the plan chooses
        its size (`specjax.planning.tree.mesh`).

    Raises: UsageError for bad options, a draft without acceptance, a missing compiler, or a plain step that does not
      compile.
    """
    sizes = check_widths(widths)
    plain, _, candidates, notes = compared_drafts(target, topology, acceptance, draft, head, method, options)
    notify = on_step or (lambda name: None)
    work, meshes = choose_mesh(plain, cache, notify) if options.get("model") is None else (plain, ())
    reports = []
    for n in sizes:
        reports += compile_programs(work, cache, notify, only=("step",), rename={"step": f"verify {n}"}, nodes=n)
    _require(reports[0])
    good = [(n, report) for n, report in zip(sizes, reports, strict=True) if report.compiles]
    passes = {one.name: _draft_pass(one, work, cache, notify) for one in candidates if one.draft is not None}
    rows = [_plain_row(work, reports[0]), *(_row(one, work, good, passes.get(one.name)) for one in candidates)]
    rows.sort(key=lambda row: (-row.tokens_per_second["schedule"], row.method != PLAIN))
    named_rows = [row for row in rows if row.is_given] or rows
    return Plan(
        describe(work), versions(), tuple(reports), tuple(rows), named_rows[0].choices, tuple(passes.values()),
        clocks_of(work.topology.chip), (*notes, *long_context_notes(work)), meshes,
    )  # fmt: skip


def long_context_notes(work: Workload) -> tuple[str, ...]:
    """Return a sentence with the context from which drafts over a part of the cache pay.

    There is none for several devices and other caches than keys and values, over which no method drafts.
    """
    if work.devices > 1:
        return ()
    target = target_of(work)
    if target.model.queries is None:
        return ()
    memory = memory_of(work, target)
    tokens = long_context(memory.weights - memory.module, memory.per_slot - memory.module_per_slot)
    return (
        f"drafts over a part of the cache ({LONG_DRAFTS}) pay from about {tokens:,} cached tokens per row on; "
        f"this plan has {work.context:,}",
    )


def check_widths(widths: Sequence[int], *, has_trees: bool = True) -> list[int]:
    """Return the sizes of target passes, from one node on, rising.

    has_trees: one of the sizes must be above 1.

    Raises: UsageError for other numbers.
    """
    sizes = sorted({1, *widths})
    if sizes[0] < 1 or sizes[-1] > 512 or (has_trees and len(sizes) < 2):
        trees_only = ", at least one above 1" if has_trees else ""
        raise UsageError(f"--widths must be numbers from 1 to 512{trees_only}, not {list(widths)}")
    return sizes


class Compared(NamedTuple):
    """The drafts that a plan compares."""

    plain: Workload  # plain decoding
    given: dict[str, Workload]  # workloads of the drafts that the user gave, by name
    candidates: list[Candidate]  # all drafts except plain decoding
    notes: tuple[str, ...]  # sentences about drafts that are not compared


def compared_drafts(
    target: str | Any,
    topology: str,
    acceptance: Rates | Mapping[str, Rates] | None,
    draft: Any,
    head: Any,
    method: Any,
    options: Mapping[str, Any],
) -> Compared:
    """Return the drafts that a plan compares. The arguments are those of `plan`. Raises: UsageError."""
    for name in FIXED & set(options):
        raise UsageError(f"a plan chooses the tree, and has no {name}; leave it out, or use compile_report")
    plain = make_workload(target, topology, **options)
    if plain.reading is not None:
        raise UsageError(
            f"--target: {plain.target.name} is a diffusion model, which drafts no tree; use specjax compile"
        )
    drafts = _given_drafts(target, topology, draft, head, method, options)
    notes: tuple[str, ...] = ()
    if plain.head is not None and not _items(draft) and not _items(head):
        has_rates = NATIVE in acceptance if isinstance(acceptance, Mapping) else acceptance is not None and not drafts
        drafts |= {NATIVE: plain} if has_rates else {}
        notes = () if has_rates else (NO_RATES,)
    return Compared(plain.plain, drafts, list(find_candidates(drafts, acceptance)), notes)


def _given_drafts(
    target: Any, topology: str, draft: Any, head: Any, method: Any, options: Mapping[str, Any]
) -> dict[str, Workload]:
    """Return a workload for each given draft, by the name under which it was given. Raises: UsageError."""
    drafts: dict[str, Workload] = {}
    for model in _items(draft):
        name = str(getattr(model, "name", model))
        drafts[name] = make_workload(target, topology, draft=model, **options)
    for kind in _items(head):
        drafts[kind] = work = make_workload(target, topology, head=kind, **options)
        if find_drafter(work.method).option("tree") is None:
            raise UsageError(f"--head {kind}: this head drafts trees of its own; use specjax compile")
    for name in _items(method):
        if find_drafter(name).needs:
            raise UsageError(
                f"--method {name}: a plan has --draft for models, --head for heads, and methods that need nothing; "
                "leave it out or use specjax compile"
            )
        drafts[name] = make_workload(target, topology, method=name, **options)
    return drafts


def _items(value: Any) -> list[Any]:
    """Return one item, several or none as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _draft_pass(candidate: Candidate, work: Workload, cache: bool, notify: Notify) -> ProgramReport:
    """Compile one pass of a draft model on the plan's mesh."""
    alone = dataclasses.replace(work, target=candidate.draft)
    name = f"draft {candidate.name}"
    (report,) = compile_programs(alone, cache, notify, only=("step",), rename={"step": name}, nodes=1)
    _require(report)
    return report


def _plain_row(work: Workload, report: ProgramReport) -> DraftPlan:
    choices = tuple(choose((0.0,), [(1, report.seconds[side])], 0.0, side) for side in SIDES)
    return DraftPlan(PLAIN, PLAIN, (), "", False, choices, _rates(work, choices), f"--method {PLAIN}")


def _row(
    candidate: Candidate, work: Workload, good: list[tuple[int, ProgramReport]], draft: ProgramReport | None
) -> DraftPlan:
    """Return a draft with its best trees, from target passes over numbers of nodes and one of its own passes."""
    cost = draft_cost(candidate, work)
    choices = []
    for side in SIDES:
        plain = good[0][1].seconds[side]
        if draft is not None:
            share = draft.seconds[side] / plain
            cost = DraftCost(share, share)
        curve = [(n, report.seconds[side]) for n, report in good]
        drafting = cost_in_seconds(cost, plain) if cost.first or cost.later else 0.0
        choices.append(choose(candidate.acceptance, curve, drafting, side, cost.max_depth))
    flags = flags_of(candidate, choices[0].spec, choices[0].depth)
    return DraftPlan(
        candidate.name, candidate.method, candidate.acceptance, candidate.source, candidate.is_given, tuple(choices),
        _rates(work, choices), flags,
    )  # fmt: skip


def _rates(work: Workload, choices: Sequence[Choice]) -> dict[str, float]:
    return {choice.side: work.batch / choice.seconds_per_token for choice in choices}


def _require(report: ProgramReport) -> None:
    if not report.compiles:
        raise UsageError(f"--topology: {report.name} does not compile: {report.reason}; see specjax compile")
