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
    aliased: int  # bytes of the output that reuse the memory of arguments
    available: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.output - self.aliased


@dataclass(frozen=True)
class ProgramReport:
    """A program, per device. A program that was not compiled has a reason and no figures."""

    name: str
    compiles: bool
    reason: str = ""  # one sentence, why it was not compiled
    needed_bytes: int | None = None  # bytes of HBM that a program needed that does not fit
    compile_seconds: float = 0.0
    memory: MemoryUse | None = None
    flops: float = 0.0
    moved_bytes: float = 0.0  # bytes to and from HBM in the compiled program
    must_bytes: float = 0.0  # minimum of these bytes, by the shapes
    cycles: float = 0.0
    kernel_calls: float = 0.0  # calls of Pallas kernels
    kernels: dict[str, float] = field(default_factory=dict)  # launches on a GPU: products, attention, other
    loops: tuple[dict, ...] = ()  # name, depth, executions, iterations, known
    seconds: dict[str, float] = field(default_factory=dict)  # memory, compute, collectives, roofline, schedule
    collectives: tuple[dict, ...] = ()  # kind, count, bytes, wire_bytes, group
    findings: tuple[dict, ...] = ()  # kind, count, bytes, sentence
    assumed: dict[str, float] = field(default_factory=dict)  # iterations of loops that depend on the data
    logits: dict | None = None  # the largest array of logits: dtype, shape, rows, bytes; None: no logits

    @classmethod
    def from_json(cls, record: dict) -> ProgramReport:
        memory = record["memory"] and MemoryUse(**record["memory"])
        lists = {name: tuple(record[name]) for name in ("collectives", "findings", "loops")}
        return cls(**{**record, **lists, "memory": memory})


@dataclass(frozen=True)
class Fit:
    """A change with which a program fits that is too large without it."""

    change: str  # a flag, such as --topology v5e:4x4
    needed_bytes: int


@dataclass(frozen=True)
class SpeedUp:
    """A row of the table by acceptance rate."""

    acceptance: float
    tokens: float  # expected tokens per target pass
    roofline: float  # speed-up by the roofline
    schedule: float  # speed-up by the compiler's schedule


@dataclass(frozen=True)
class BlockRow:
    """The cost of a block of a diffusion model for a number of columns per pass."""

    columns: int
    passes: int  # passes per block, including a separate clean pass if the model needs one
    passes_apart: int | None  # passes per block if a fused clean pass were separate; None: it is not fused
    seconds_per_token: dict[str, float]  # by roofline and schedule
    gain: dict[str, float]  # factor by which a block takes longer with a separate clean pass


@dataclass(frozen=True)
class PlanReport:
    """All results for one target, draft and topology."""

    inputs: dict[str, Any]
    chip: dict[str, Any]
    versions: dict[str, str]
    programs: tuple[ProgramReport, ...]
    speedups: tuple[SpeedUp, ...] = ()
    cost_ratio: dict[str, float] = field(default_factory=dict)  # cost of a step of the method over a plain step
    fits: tuple[Fit, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    window: dict[str, int] = field(default_factory=dict)  # for diffusion models: columns of the window and the canvas
    clocks: dict[str, str] = field(default_factory=lambda: dict(CLOCKS))  # meaning of the time estimates

    def program(self, name: str) -> ProgramReport | None:
        """Return the report of a program by name, or None."""
        return next((p for p in self.programs if p.name == name), None)

    @property
    def compiles(self) -> bool:
        return all(program.compiles for program in self.programs)

    def to_json(self) -> dict:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)
