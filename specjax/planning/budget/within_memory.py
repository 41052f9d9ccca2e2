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

from specjax.catalog import find_drafter
from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.planning.budget.frontier import DraftWithin, rows_by_batch, search_within, terms_of_plain, workload_of
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.records import ProgramReport
from specjax.planning.tree.drafts import Candidate, Rates
from specjax.planning.tree.plan import WIDTHS
from specjax.planning.workload import Workload, describe


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
    notify = on_step or (lambda name: None)
    search = search_within(target, topology, memory, acceptance, draft, head, method, widths, options)
    plain, candidates, drafts, room = search.plain, search.candidates, search.drafts, search.room
    of_batches = rows_by_batch(search, notify)
    if not of_batches:
        raise UsageError(_refusal(plain, memory, room, terms_of_plain(search)))
    rows = [row for of_batch in of_batches for row in of_batch]
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
    elif (sized := _with_tree(one, workload_of(one, workload, work), row)) is not None:
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


def _with_tree(one: Candidate, work: Workload, row: DraftWithin) -> Workload | None:
    """Return the workload with the size of a row; None for a draft whose size is no option."""
    if not one.method:
        return None
    if find_drafter(one.method).option("tree") is not None:
        return dataclasses.replace(work, tree=row.spec)
    return dataclasses.replace(work, num_draft_tokens=row.num_nodes - 1) if one.is_chain else None
