"""Planner results as dataclasses and JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from specjax.costs.roofline import CLOCKS


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device in the compiler's layout."""

    arguments: int
    temporaries: int
    output: int
    aliased: int  # of the output, in place of arguments
    available: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.output - self.aliased


@dataclass(frozen=True)
class ProgramReport:
    """A program, per device. A program that was not compiled has a reason and no figures."""

    name: str
    compiles: bool
    reason: str = ""  # why not, one sentence
    needed_bytes: int | None = None  # of HBM, where it did not fit
    compile_seconds: float = 0.0
    memory: MemoryUse | None = None
    flops: float = 0.0
    moved_bytes: float = 0.0  # to and from HBM, as compiled
    must_bytes: float = 0.0  # at least, by the shapes
    cycles: float = 0.0
    kernel_calls: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # memory, compute, collectives, roofline, schedule
    collectives: tuple[dict, ...] = ()  # kind, count, bytes, wire_bytes, group
    findings: tuple[dict, ...] = ()  # kind, count, bytes, sentence
    assumed: dict[str, float] = field(default_factory=dict)  # trips of loops that depend on the data
    logits: dict | None = None  # the largest array of them: dtype, shape, rows, bytes; None: there are none

    @classmethod
    def from_json(cls, record: dict) -> ProgramReport:
        memory = record["memory"] and MemoryUse(**record["memory"])
        lists = {name: tuple(record[name]) for name in ("collectives", "findings")}
        return cls(**{**record, **lists, "memory": memory})


@dataclass(frozen=True)
class Fit:
    """A change with which a program fits that did not fit before."""

    change: str  # such as --topology v5e:4x4
    needed_bytes: int


@dataclass(frozen=True)
class SpeedUp:
    """A row of the table by acceptance rate."""

    acceptance: float
    tokens: float  # per target pass
    roofline: float
    schedule: float


@dataclass(frozen=True)
class BlockRow:
    """The cost of a block of a diffusion model for a number of columns per pass."""

    columns: int
    passes: int  # per block, one that only reads what is decided among them if there is one
    passes_apart: int | None  # likewise, were the clean pass one of its own; None: it is none, or there is none
    seconds_per_token: dict[str, float]  # roofline, schedule
    gain: dict[str, float]  # how many times as long it took with the clean pass apart


@dataclass(frozen=True)
class PlanReport:
    """All results for one target, draft and topology."""

    inputs: dict[str, Any]
    chip: dict[str, Any]
    versions: dict[str, str]
    programs: tuple[ProgramReport, ...]
    speedups: tuple[SpeedUp, ...] = ()
    cost_ratio: dict[str, float] = field(default_factory=dict)  # step of the method over a plain one
    fits: tuple[Fit, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    window: dict[str, int] = field(default_factory=dict)  # of a diffusion model: columns of the window and the canvas
    clocks: dict[str, str] = field(default_factory=lambda: dict(CLOCKS))  # of seconds, speed-ups and cost ratio

    def program(self, name: str) -> ProgramReport | None:
        """Return the report of a program by name, or None."""
        return next((p for p in self.programs if p.name == name), None)

    @property
    def compiles(self) -> bool:
        return all(program.compiles for program in self.programs)

    def to_json(self) -> dict:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)
