"""What the planner found, as dataclasses, JSON and a table."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from specjax.bench.records import dtypes
from specjax.planning.chips import GIB


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, as the compiler lays them out."""

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
    """One program, per device. What was not compiled has a reason and no figures."""

    name: str
    compiles: bool
    reason: str = ""  # why not, one sentence
    needed_bytes: int | None = None  # of HBM, where it did not fit
    compile_seconds: float = 0.0
    memory: Memory | None = None
    flops: float = 0.0
    moved_bytes: float = 0.0  # to and from HBM, as compiled
    must_bytes: float = 0.0  # at least, by the shapes
    cycles: float = 0.0
    kernel_calls: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # memory, compute, collectives, roofline, schedule
    collectives: tuple[dict, ...] = ()  # kind, count, bytes, wire_bytes, group
    findings: tuple[dict, ...] = ()  # kind, count, bytes, sentence
    assumed: dict[str, float] = field(default_factory=dict)  # trips of loops that depend on the data

    @classmethod
    def from_json(cls, record: dict) -> ProgramReport:
        memory = record["memory"] and Memory(**record["memory"])
        lists = {name: tuple(record[name]) for name in ("collectives", "findings")}
        return cls(**{**record, **lists, "memory": memory})


@dataclass(frozen=True)
class Fit:
    """A change with which a program that did not fit was compiled."""

    change: str  # such as --topology v5e:4x4
    needed_bytes: int


@dataclass(frozen=True)
class SpeedUp:
    """One row of the table by acceptance."""

    acceptance: float
    tokens: float  # per target pass
    roofline: float
    schedule: float


@dataclass(frozen=True)
class Report:
    """Everything about one target, draft and topology."""

    inputs: dict[str, Any]
    chip: dict[str, Any]
    versions: dict[str, str]
    programs: tuple[ProgramReport, ...]
    speedups: tuple[SpeedUp, ...] = ()
    cost_ratio: dict[str, float] = field(default_factory=dict)  # step of the method over a plain one
    fits: tuple[Fit, ...] = ()

    def program(self, name: str) -> ProgramReport | None:
        """By name, None if there is none."""
        return next((p for p in self.programs if p.name == name), None)

    @property
    def compiles(self) -> bool:
        return all(program.compiles for program in self.programs)

    def to_json(self) -> dict:
        """Plain dicts and lists."""
        return dataclasses.asdict(self)


SHOWN = 3  # copies named per program

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"


def needed_bytes(message: str) -> int | None:
    """How much HBM a refused program needed, from the compiler's message; None: it was refused for another reason."""
    for pattern in (
        rf"total memory required for [\w ]+\({_SIZE}\) exceeds available HBM",
        rf"Used {_SIZE} of {_SIZE} hbm",
        rf"Exceeded hbm capacity.*?Total hbm usage >= {_SIZE}",
    ):
        found = re.search(pattern, message, re.IGNORECASE | re.DOTALL)
        if found:
            return int(float(found.group(1)) * _UNITS[found.group(2).upper()])
    return None


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def mesh_of(inputs: dict[str, Any]) -> str:
    """The axes of a job's mesh that split anything."""
    axes = [f"{name} {inputs[name]}" for name in ("data", "layer", "sequence", "model") if inputs[name] > 1]
    return f"mesh {' x '.join(axes)}" if axes else "one device"


def warnings(report: Report) -> list[str]:
    """One sentence each: what does not compile, what would, and what the HLO shows."""
    lines = [f"{p.name} does not compile: {p.reason}" for p in report.programs if not p.compiles]
    if any(p.needed_bytes for p in report.programs):
        lines += [f"it fits with {fit.change} ({gib(fit.needed_bytes)} per device)" for fit in report.fits]
        lines += [] if report.fits else ["no smaller change that was tried fits either"]
    for program in report.programs:
        largest = sorted(program.findings, key=lambda finding: -finding["bytes"])
        copies = [finding for finding in largest if finding["kind"] == "copy"]
        shown = [finding for finding in largest if finding not in copies[SHOWN:]]
        lines += [f"{program.name}: {finding['sentence']}" for finding in shown]
        if copies[SHOWN:]:
            lines.append(f"{program.name}: {len(copies) - SHOWN} more copies, listed by --json")
        if program.kernel_calls:
            lines.append(
                f"{program.name}: {program.kernel_calls:g} calls of Pallas kernels, by their authors' estimates"
            )
    return lines


def show(report: Report, out) -> None:
    """Tables and sentences on a rich console."""
    from rich import box
    from rich.table import Table

    say = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs = report.inputs
    models = inputs["target"] + (f", draft {inputs['draft']}" if inputs["draft"] else "")
    what = " ".join(filter(None, (inputs["method"], inputs["tree"])))
    say(
        f"{models}; {what}; batch {inputs['batch']}, {inputs['context']} cached tokens, {dtypes(inputs)}\n"
        f"{inputs['topology']}, {mesh_of(inputs)}, per device:"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("program", no_wrap=True)
    for heading in ("HBM GiB", "args", "temps", "out", "alias", "roofline ms", "schedule ms", "must MB", "moved MB",
                    "GFLOP", "collectives"):  # fmt: skip
        table.add_column(heading, justify="right")
    for p in report.programs:
        if not p.compiles or p.memory is None:
            need = "" if p.needed_bytes is None else f"{p.needed_bytes / GIB:.2f}!"
            table.add_row(p.name, need, *[""] * 10, style="yellow")
            continue
        m = p.memory
        sizes = [f"{size / GIB:.2f}" for size in (m.total, m.arguments, m.temporaries, m.output, m.aliased)]
        count = sum(entry["count"] for entry in p.collectives)
        wire = sum(entry["wire_bytes"] for entry in p.collectives)
        table.add_row(
            p.name, *sizes, milliseconds(p.seconds["roofline"]), milliseconds(p.seconds["schedule"]),
            f"{p.must_bytes / 1e6:.0f}", f"{p.moved_bytes / 1e6:.0f}", f"{p.flops / 1e9:.4g}",
            f"{count:.0f}, {wire / 1e6:.3g} MB" if count else "-",
        )  # fmt: skip
    out.print(table)
    say(f"of {gib(report.chip['hbm_bytes'])}; figures of the chip: {report.chip['source']}", style="dim")
    for line in warnings(report):
        say(line, style="yellow" if "not" in line.split(":")[0] else "")
    if report.speedups:
        ratio = report.cost_ratio
        say(
            f"\na step of {what} costs {ratio['roofline']:.2f} plain steps by the roofline, {ratio['schedule']:.2f} by "
            "the compiler's schedule"
        )
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("acceptance", "tokens/pass", "speed-up: roofline", "schedule"):
            table.add_column(heading, justify="right")
        for row in report.speedups:
            table.add_row(f"{row.acceptance:.2f}", f"{row.tokens:.2f}", f"{row.roofline:.2f}", f"{row.schedule:.2f}")
        out.print(table)
    say("estimates, not measurements: docs of specjax.planning.cost say what each is good for", style="dim")
