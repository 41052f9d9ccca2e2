"""Drafts that a plan compares: their acceptance, and the seconds in which they draft a tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specjax import costs
from specjax.catalog import Method, of_kind
from specjax.catalog.defaults import NATIVE
from specjax.errors import UsageError
from specjax.models.heads.kinds import abstract_head
from specjax.planning.abstract import unsharded
from specjax.planning.tree.rank_acceptance import read_acceptance
from specjax.planning.workload import Workload

GIVEN = "given acceptance"
"""The name of a draft without cost, for an acceptance without a draft model, head or method."""

Rates = str | Path | Sequence[float]
"""Probabilities by rank, as `read_acceptance` reads them."""


@dataclass(frozen=True)
class Candidate:
    """A draft to compare."""

    name: str  # as the user wrote it, or the method
    method: str
    acceptance: tuple[float, ...]  # probabilities by rank
    source: str  # of the acceptance: "given", or a measurement
    is_given: bool  # named by the user
    draft: Any = None  # config of a draft model
    head: Any = None  # config of a draft head
    is_chain: bool = False  # it drafts no siblings


class DraftCost(NamedTuple):
    """Cost of drafting in passes of the target over one token: that of the first level and of each later one."""

    first: float
    later: float
    levels_per_pass: int = 1
    max_depth: int | None = None  # None: any

    def __call__(self, depth: int) -> float:
        """Return the cost of a draft with `depth` levels."""
        return self.first + (math.ceil(depth / self.levels_per_pass) - 1) * self.later


def find_candidates(
    drafts: Mapping[str, Workload], acceptance: Rates | Mapping[str, Rates] | None
) -> Iterator[Candidate]:
    """Yield the drafts to compare: those given, and the drafters of the catalogue that need nothing.

    Args:
      drafts: workloads of draft models, heads and methods, by the names under which the user gave them.
      acceptance: as in `plan`.

    Raises: UsageError for an acceptance of an unknown draft, or for a draft without any.
    """
    rows = of_kind("drafter")
    by_name = acceptance if isinstance(acceptance, Mapping) else {}
    common = None if isinstance(acceptance, Mapping) else acceptance
    free = [name for name, row in rows.items() if row.acceptance and not row.needs and name not in drafts]
    names = [*drafts, *free]
    for name in by_name:
        if name not in names:
            raise UsageError(f'--acceptance: "{name}" is not a draft of this plan; choose one of {", ".join(names)}')
    if common is not None and not drafts:
        yield Candidate(GIVEN, "", *_read(common), True)
    for name, work in drafts.items():
        yield _candidate(name, rows[work.method], by_name.get(name, common), work)
    for name in free:
        yield _candidate(name, rows[name], by_name.get(name), None)


def _candidate(name: str, row: Method, rates: Rates | None, work: Workload | None) -> Candidate:
    if rates is None and row.acceptance is None:
        raise UsageError(f"the catalogue has no typical acceptance for {name}; give it with --acceptance {name}=.6,.2")
    if rates is not None:
        by_rank, source = _read(rates)
    else:
        assert row.acceptance is not None
        by_rank, source = row.acceptance
    is_chain = row.option("tree") is None and row.size == "num_tokens"
    by_rank = by_rank[:1] if is_chain else by_rank
    if work is None:
        return Candidate(name, row.name, by_rank, source, False, is_chain=is_chain)
    return Candidate(name, row.name, by_rank, source, True, work.draft, work.head, is_chain)


def _read(rates: Rates) -> tuple[tuple[float, ...], str]:
    by_rank, source = read_acceptance(rates)
    return tuple(by_rank), source


def draft_cost(candidate: Candidate, work: Workload) -> DraftCost:
    """Return the cost of drafting without a draft model, whose pass is compiled instead.

    A lookup costs nothing. A drafter from layers of the target costs the share in its row of the catalogue. The cost of
    a head is that of the weights which it reads (`costs.of_head`).
    """
    if candidate.head is None:
        row = of_kind("drafter").get(candidate.method)
        share = row.draft_cost if row else 0.0
        return DraftCost(share, share)
    target = unsharded(work.target)
    head = abstract_head(candidate.method, candidate.head)
    one, two = (costs.of_head(target, head, passes, work.topology.chip.name) for passes in (1, 2))
    return DraftCost(one, max(two - one, 0.0), head.head.levels_per_pass, head.head.max_depth)


def cost_in_seconds(cost: DraftCost, plain: float) -> Callable[[int], float]:
    """Return a function from depth to the seconds of a draft, where a plain pass of the target takes `plain`."""
    return lambda depth: cost(depth) * plain


def flags_of(candidate: Candidate, spec: str | None, depth: int) -> str:
    """Return the options of `specjax generate` for a draft. Those of a head need its folder.

    Args:
      spec: the best tree of the form AxBxC; None: do not draft.
    """
    if spec is None:
        return "--method autoregressive"
    size = f"--num-draft-tokens {depth}" if candidate.is_chain else f"--tree {spec}"
    row = of_kind("drafter").get(candidate.method)
    if row is not None and row.option("tree") is None and not candidate.is_chain:
        size = ""  # it has no option for its size
    if candidate.name == NATIVE:
        return f"--draft {NATIVE} --method {candidate.method} {size}"
    if candidate.head is not None:
        return f"--draft FOLDER {size}"
    if candidate.draft is not None:
        return f"--draft {candidate.name} {size}"
    return f"--method {candidate.method} {size}".rstrip() if candidate.method else size
