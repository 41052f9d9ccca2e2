"""This module chooses batch, prompt length and tree within a memory budget.

Speculative Decoding is in Your Pocket (SpecMemo, 2025), arXiv 2506.01986.

Rule: the bytes of a decode are a sum of terms in the rows, the slots of the cache and the nodes of the tree. For each
batch, find the draft and tree with the most tokens per second that fit. Then take the smallest tree of that draft that
keeps all except LOSS of the speed, because each node needs memory for logits and for entries of the cache.
Deviations: no code of the authors was found, so the terms are those of this engine. Buffers of rejected tokens are
reused by construction: a pass has one slot per node, and the cache grows only by accepted tokens.
Times are rooflines from shapes. The programs of the fastest draft are compiled. If the compiler needs more than the
budget, the fastest draft of a smaller batch is next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax import costs, trees
from specjax.catalog import find_drafter
from specjax.costs.accelerators import equivalent_bytes
from specjax.costs.chips import gib
from specjax.costs.experts import launched_layers
from specjax.costs.row_bytes import row_bytes
from specjax.errors import UsageError
from specjax.planning.abstract import unsharded
from specjax.planning.budget.footprint import Footprint, footprint_of
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.memory import Memory, available_bytes, longest_context, slots_of
from specjax.planning.records import ProgramReport
from specjax.planning.traffic import mean_context, pass_bytes
from specjax.planning.tree.choice import Choice, choose
from specjax.planning.tree.drafts import Candidate, DraftCost, Rates, cost_in_seconds, draft_cost, flags_of
from specjax.planning.tree.plan import PLAIN, WIDTHS, check_widths, compared_drafts
from specjax.planning.workload import Workload, describe

LOSS = 0.04
"""Share of the speed that a smaller tree may cost. It is that of the paper's abstract."""
MAX_BATCH = 1 << 12
DEEPEST = 8
"""Depth of the deepest tree of a draft model."""


@dataclass(frozen=True)
class DraftWithin:
    """The best tree of a draft that fits with a batch. Bytes are those of one device."""

    name: str  # of the draft
    batch: int
    num_nodes: int  # of the smallest tree within LOSS of the fastest one; 1: plain decoding; 0: nothing fits
    fastest_nodes: int  # of the fastest tree that fits
    tokens_per_second: float  # of all rows with the smallest tree, by the roofline
    needed_bytes: int  # at the context of the plan; of the smallest tree, if none fits
    longest_context: int  # prompt tokens that fit with the smallest tree
    flags: str  # options of `specjax generate`
    spec: str | None = None  # the tree, of the form AxBxC
    reason: str = ""  # the largest term of a draft that does not fit


@dataclass(frozen=True)
class Compiled:
    """A draft whose programs were compiled."""

    draft: DraftWithin
    programs: tuple[ProgramReport, ...]
    needed_bytes: int | None  # of the largest program; None: one was refused for another reason than its size


@dataclass(frozen=True)
class MemoryPlan:
    """A list of the batches and drafts that fit in a memory budget, with their speeds."""

    inputs: dict[str, Any]
    budget_bytes: int  # of one device
    usable_bytes: int  # without the share that is left free
    rows: tuple[DraftWithin, ...]  # by batch, the fastest draft of a batch first
    tried: tuple[Compiled, ...]  # fastest first; only the last one can fit
    fits: bool  # True if the programs of the last one fit

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)

    @property
    def best(self) -> Compiled | None:
        """Return the fastest draft whose compiled programs fit, or None."""
        return self.tried[-1] if self.fits else None


def plan_within_memory(
    target: str | Any,
    topology: str,
    memory: int,
    *,
    acceptance: Rates | Mapping[str, Rates] | None = None,
    draft: Any = (),
    head: Any = (),
    method: Any = (),
    widths: Sequence[int] = WIDTHS,
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> MemoryPlan:
    """Find the batches, prompts and trees that fit in a memory budget, and compile the fastest of them.

    Args:
      memory: bytes per device.
      widths: numbers of nodes of the trees to compare.
      options: as in `plan`. `batch` is the smallest batch, which is doubled until nothing fits. `context` is the
        prompt that must fit.

    Other arguments are those of `plan`.

    Raises: UsageError for bad options, more memory than the device has, or a budget in which plain decoding of the
      smallest batch does not fit. The error names the largest term.
    """
    sizes = check_widths(widths)
    plain, drafts, candidates, _ = compared_drafts(target, topology, acceptance, draft, head, method, options)
    chip = plain.topology.chip
    if not 0 < memory <= chip.hbm_bytes:
        raise UsageError(f"--memory must be above 0 and at most the {gib(chip.hbm_bytes)} of a {chip.name} device, "
                         f"not {gib(memory)}")  # fmt: skip
    if plain.batch > MAX_BATCH:
        raise UsageError(f"--batch-size must be at most {MAX_BATCH} with --memory, not {plain.batch}; lower it")
    devices, room, notify = describe_devices(plain.topology), available_bytes(memory), on_step or (lambda name: None)
    rows: list[DraftWithin] = []
    batch = plain.batch
    while batch <= MAX_BATCH:
        work = dataclasses.replace(plain, batch=batch)
        notify(f"the shapes of {batch} rows")
        smallest = footprint_of(work, devices)
        terms = smallest.terms(slots_of(work, work.context, 1), 1)
        if sum(terms.values()) > room:
            if not rows:
                raise UsageError(_refusal(work, memory, room, terms))
            break
        of_batch = [_plain_row(work, smallest, room)]
        of_batch += [_row(one, drafts.get(one.name), work, sizes, room, devices, smallest.target) for one in candidates]
        rows += sorted(of_batch, key=lambda row: (-row.tokens_per_second, row.name != PLAIN))
        batch *= 2
    tried: list[Compiled] = []
    left = rows
    while left:
        fastest = max(left, key=lambda row: row.tokens_per_second)
        one = next((one for one in candidates if one.name == fastest.name), None)
        tried.append(_compiled(fastest, one, drafts.get(fastest.name), plain, cache, notify))
        is_too_large = tried[-1].needed_bytes is not None and not _fits(tried[-1], memory)
        left = [row for row in left if is_too_large and row.batch < fastest.batch]
    return MemoryPlan(describe(plain), memory, int(room), tuple(rows), tuple(tried), _fits(tried[-1], memory))


def _compiled(
    row: DraftWithin, one: Candidate | None, workload: Workload | None, plain: Workload, cache: bool, notify: Notify
) -> Compiled:
    """Compile the programs of a draft."""
    work = dataclasses.replace(plain, batch=row.batch)
    if one is None or row.num_nodes == 1:
        programs = compile_programs(work, cache, notify, only=("prefill", "step"))
    elif (sized := _with_tree(one, _workload(one, workload, work), row)) is not None:
        programs = compile_programs(sized, cache, notify, only=("prefill", "step"))
    else:  # the draft has no size, or only an acceptance is known
        programs = compile_programs(work, cache, notify, only=("prefill",))
        programs += compile_programs(work, cache, notify, only=("step",), nodes=row.num_nodes)
    sizes = [program.memory.total if program.memory else program.needed_bytes for program in programs]
    in_bytes = [size for size in sizes if size is not None]
    return Compiled(row, tuple(programs), max(in_bytes) if len(in_bytes) == len(sizes) else None)


def _fits(compiled: Compiled, memory: int) -> bool:
    return compiled.needed_bytes is not None and compiled.needed_bytes <= memory


def _refusal(work: Workload, memory: int, room: float, terms: Mapping[str, float]) -> str:
    """Return the sentence for a budget in which plain decoding does not fit."""
    largest = max(terms, key=terms.__getitem__)
    return (
        f"--memory {gib(memory)}: plain decoding of {work.target.name} with {work.batch} x {work.context} prompt "
        f"tokens needs {gib(sum(terms.values()))} of the {gib(room)} that are usable; the largest term is {largest} "
        f"with {gib(terms[largest])}"
    )


def _workload(one: Candidate, workload: Workload | None, work: Workload) -> Workload:
    """Return the workload of a draft with the batch of another workload."""
    if workload is None:
        return dataclasses.replace(work, method=one.method) if one.method else work
    return dataclasses.replace(workload, batch=work.batch, model=work.model)


def _with_tree(one: Candidate, work: Workload, row: DraftWithin) -> Workload | None:
    """Return the workload with the size of a row; None for a draft whose size is no option."""
    if not one.method:
        return None
    if find_drafter(one.method).option("tree") is not None:
        return dataclasses.replace(work, tree=row.spec)
    return dataclasses.replace(work, num_draft_tokens=row.num_nodes - 1) if one.is_chain else None


def _plain_row(work: Workload, footprint: Footprint, room: float) -> DraftWithin:
    needed = footprint.total(slots_of(work, work.context, 1), 1)
    return DraftWithin(
        PLAIN, work.batch, 1, 1, work.batch / _seconds(work, footprint, 1), int(needed),
        longest_context(work, footprint, 1, room), f"--method {PLAIN}",
    )  # fmt: skip


def _row(
    one: Candidate, workload: Workload | None, plain: Workload, sizes: Sequence[int], room: float, devices: list,
    target: Memory,
) -> DraftWithin:  # fmt: skip
    """Return the best tree of a draft that fits with the batch of `plain`."""
    work = _workload(one, workload, plain)
    footprint = footprint_of(work, devices, target)
    needed = lambda nodes: footprint.total(slots_of(work, work.context, nodes), nodes)
    fitting = [nodes for nodes in sizes if needed(nodes) <= room]
    if len(fitting) < 2:
        terms = footprint.terms(slots_of(work, work.context, sizes[1]), sizes[1])
        draft_terms = {name: size for name, size in terms.items() if name != "the weights"}
        largest = max(draft_terms, key=draft_terms.__getitem__)
        total = sum(terms.values())
        reason = (
            f"it needs {gib(total)} with {sizes[1]} nodes; beside the weights, the largest term is {largest} with "
            f"{gib(terms[largest])}"
        )
        return DraftWithin(one.name, work.batch, 0, 0, 0.0, int(total), 0, "", reason=reason)
    curve = [(nodes, _seconds(plain, footprint, nodes)) for nodes in fitting]
    cost = _draft_cost(one, work)
    drafting = cost_in_seconds(cost, curve[0][1]) if cost.first or cost.later else 0.0
    best_of = lambda count: choose(one.acceptance, curve[:count], drafting, "roofline", cost.max_depth)
    fastest = best_of(len(curve))
    smallest = _smallest(best_of, len(curve), fastest)
    nodes, depth = _nodes(smallest.spec), len(smallest.spec.split("x")) if smallest.spec else 0
    return DraftWithin(
        one.name, work.batch, nodes, _nodes(fastest.spec), work.batch * smallest.spec_speedup / curve[0][1],
        int(needed(nodes)), longest_context(work, footprint, nodes, room), flags_of(one, smallest.spec, depth),
        spec=smallest.spec,
    )  # fmt: skip


def _nodes(spec: str | None) -> int:
    """Return the nodes of a tree of the form AxBxC, root included; None: plain decoding."""
    return 1 if spec is None else trees.parse(spec).num_nodes


def _smallest(best_of, count: int, fastest: Choice) -> Choice:
    """Return the choice of the fewest sizes whose speed is within LOSS of the fastest one."""
    for sizes in range(1, count):
        choice = best_of(sizes)
        if choice.spec_speedup >= (1 - LOSS) * fastest.spec_speedup:
            return choice
    return fastest


def _draft_cost(one: Candidate, work: Workload) -> DraftCost:
    """Return the cost of drafting. A draft model costs its share of the bytes, where `plan` compiles its pass."""
    if one.draft is None:
        return draft_cost(one, work)
    share = costs.of_draft(unsharded(work.target), unsharded(one.draft), work.topology.chip.name)
    return DraftCost(share, share, max_depth=DEEPEST)


def _seconds(work: Workload, footprint: Footprint, nodes: int) -> float:
    """Return the roofline of a pass over `nodes` nodes of each row: weights by their cost curve, caches by bytes."""
    target, memory = unsharded(work.target), footprint.target
    chip = work.topology.chip
    rows = -(-work.batch // work.data)
    shares = costs.shares_of(target, chip.name)._replace(states=0.0, updates=0.0)
    growth = costs.estimated((1, rows * nodes), 1, costs.dtype_of(target), chip.name, shares)[1]
    parts = work.devices / work.data
    weights = pass_bytes(work.target, target.params, 0.0, work.context, experts=(1, 1))
    recurrent = 2 * rows * nodes * row_bytes(target).updates / parts + 2 * memory.states
    cached = memory.per_slot * mean_context(work.target, work.context)
    # On a GPU the curve is relative to a pass with the launches of its kernels, which the roofline leaves out.
    added = (float(growth) - 1) * equivalent_bytes(chip.name, weights / parts, launched_layers(target))
    return (weights / parts + added + cached + recurrent) / chip.hbm_bandwidth
