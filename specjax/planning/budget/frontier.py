"""This module finds, from shapes, the drafts and trees that fit in a memory budget with each batch.

`within_memory` compiles the fastest of them, and has the source of the method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax import costs, trees
from specjax.costs.accelerators import equivalent_bytes
from specjax.costs.experts import launched_layers
from specjax.costs.row_bytes import row_bytes
from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.planning.abstract import unsharded
from specjax.planning.budget.footprint import Footprint, footprint_of
from specjax.planning.compiler import Notify
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.memory import Memory, available_bytes, longest_context, slots_of
from specjax.planning.traffic import mean_context, pass_bytes
from specjax.planning.tree.choice import Choice, choose
from specjax.planning.tree.drafts import Candidate, DraftCost, Rates, cost_in_seconds, draft_cost, flags_of
from specjax.planning.tree.plan import PLAIN, WIDTHS, check_widths, compared_drafts
from specjax.planning.workload import Workload

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
class FrontierSearch:
    """The workload of plain decoding with the smallest batch, the drafts to compare, and the memory of a device."""

    plain: Workload
    drafts: Mapping[str, Workload]  # by name
    candidates: tuple[Candidate, ...]
    widths: tuple[int, ...]  # numbers of nodes of the trees to compare
    devices: list[Any]
    room: float  # bytes


def search_within(
    target: str | Any, topology: str, memory: int, acceptance: Any, draft: Any, head: Any, method: Any,
    widths: Sequence[int], options: Mapping[str, Any],
) -> FrontierSearch:  # fmt: skip
    """Return the search of `plan_within_memory` for its arguments.

    Raises: UsageError for bad options, or more memory than the device has.
    """
    sizes = check_widths(widths)
    plain, drafts, candidates, _ = compared_drafts(target, topology, acceptance, draft, head, method, dict(options))
    chip = plain.topology.chip
    if not 0 < memory <= chip.hbm_bytes:
        raise UsageError(f"--memory must be above 0 and at most the {gib(chip.hbm_bytes)} of a {chip.name} device, "
                         f"not {gib(memory)}")  # fmt: skip
    if plain.batch > MAX_BATCH:
        raise UsageError(f"--batch-size must be at most {MAX_BATCH} with --memory, not {plain.batch}; lower it")
    devices, room = describe_devices(plain.topology), available_bytes(memory)
    return FrontierSearch(plain, drafts, tuple(candidates), tuple(sizes), devices, room)


def rows_by_batch(search: FrontierSearch, notify: Notify) -> list[list[DraftWithin]]:
    """Return the drafts of each batch in which plain decoding fits, the fastest first.

    Batches are that of the workload and its doubles. The list is empty if plain decoding of the smallest does not fit.
    """
    result: list[list[DraftWithin]] = []
    batch = search.plain.batch
    while batch <= MAX_BATCH:
        work = dataclasses.replace(search.plain, batch=batch)
        notify(f"the shapes of {batch} rows")
        smallest = footprint_of(work, search.devices)
        if smallest.total(slots_of(work, work.context, 1), 1) > search.room:
            break
        rows = [_plain_row(work, smallest, search.room)]
        rows += [_row(one, work, search, smallest.target) for one in search.candidates]
        result.append(sorted(rows, key=lambda row: (-row.tokens_per_second, row.name != PLAIN)))
        batch *= 2
    return result


def terms_of_plain(search: FrontierSearch) -> dict[str, float]:
    """Return the bytes of plain decoding of the smallest batch by what takes them."""
    work = search.plain
    return footprint_of(work, search.devices).terms(slots_of(work, work.context, 1), 1)


def memory_frontier(
    target: str | Any,
    topology: str,
    memory: int,
    contexts: Sequence[int],
    *,
    acceptance: Rates | Mapping[str, Rates] | None = None,
    draft: Any = (),
    head: Any = (),
    method: Any = (),
    widths: Sequence[int] = WIDTHS,
    on_step: Notify | None = None,
    **options: Any,
) -> dict[int, list[list[DraftWithin]]]:
    """Return the drafts of each batch that fits in a memory budget, by the length of the prompts. Nothing is compiled.

    contexts: lengths of the prompts. The other arguments are those of `plan_within_memory`.

    Raises: UsageError for bad options, or more memory than the device has.
    """
    result: dict[int, list[list[DraftWithin]]] = {}
    for context in contexts:
        search = search_within(
            target, topology, memory, acceptance, draft, head, method, widths, options | {"context": context}
        )
        result[context] = rows_by_batch(search, on_step or (lambda name: None))
    return result


def workload_of(one: Candidate, workload: Workload | None, work: Workload) -> Workload:
    """Return the workload of a draft with the batch of another workload."""
    if workload is None:
        return dataclasses.replace(work, method=one.method) if one.method else work
    return dataclasses.replace(workload, batch=work.batch, model=work.model)


def _plain_row(work: Workload, footprint: Footprint, room: float) -> DraftWithin:
    needed = footprint.total(slots_of(work, work.context, 1), 1)
    return DraftWithin(
        PLAIN, work.batch, 1, 1, work.batch / _seconds(work, footprint, 1), int(needed),
        longest_context(work, footprint, 1, room), f"--method {PLAIN}",
    )  # fmt: skip


def _row(one: Candidate, plain: Workload, search: FrontierSearch, target: Memory) -> DraftWithin:
    """Return the best tree of a draft that fits with the batch of `plain`."""
    work, sizes, room = workload_of(one, search.drafts.get(one.name), plain), search.widths, search.room
    footprint = footprint_of(work, search.devices, target)
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
    weights = pass_bytes(work.target, target.pass_params, 0.0, work.context, experts=(1, 1))
    recurrent = 2 * rows * nodes * row_bytes(target).updates / parts + 2 * memory.states
    cached = memory.per_slot * mean_context(work.target, work.context)
    # On a GPU the curve is relative to a pass with the launches of its kernels, which the roofline leaves out.
    added = (float(growth) - 1) * equivalent_bytes(chip.name, weights / parts, launched_layers(target))
    return (weights / parts + added + cached + recurrent) / chip.hbm_bandwidth
