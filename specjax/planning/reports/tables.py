"""Planner results as tables and sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specjax.bench.records import dtypes
from specjax.costs.chips import DOCS, NVIDIA
from specjax.costs.roofline import CLOCKS
from specjax.files.sizes import gib, gib_cell
from specjax.planning.inputs.warping import PENALTIES
from specjax.planning.records import PlanReport, ProgramReport
from specjax.planning.tree.plan import Plan

if TYPE_CHECKING:
    from specjax.planning.reports.training import TrainingReport

SHOWN = 3  # copies named per program
RESERVED = 0.75
"""The part of a GPU's memory that JAX reserves (docs.jax.dev/en/latest/gpu_memory_allocation.html)."""
LARGEST = 0.98
"""The largest part that a report proposes to reserve."""


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def mesh_of(inputs: dict[str, Any]) -> str:
    """Return the axes of a job's mesh with more than one device."""
    axes = [f"{name} {inputs[name]}" for name in ("data", "layer", "sequence", "expert", "model") if inputs[name] > 1]
    return f"mesh {' x '.join(axes)}" if axes else "one device"


def sampling_of(inputs: dict[str, Any]) -> str:
    """Return the sampling options of a job, as the end of a list."""
    names = ("temperature", "top_k", "top_p", "min_p", *(f"{name}_penalty" for name in PENALTIES))
    names_used = [name for name in names if inputs.get(name) and (inputs["temperature"] or name.endswith("penalty"))]
    return "".join(f", {name.replace('_', '-')} {inputs[name]:g}" for name in names_used)


def warnings(report: PlanReport) -> list[str]:
    """Return a sentence for each program that does not compile, each change that fits, and each HLO finding."""
    lines = [f"{p.name} does not compile: {p.reason}" for p in report.programs if not p.compiles]
    if any(p.needed_bytes for p in report.programs):
        lines += [f"it fits with {fit.change} ({gib(fit.needed_bytes)} per device)" for fit in report.fits]
        lines += [] if report.fits else ["none of the smaller configurations that were tried fits"]
    lines += _memory_fraction(report)
    for program in report.programs:
        largest = sorted(program.findings, key=lambda finding: -finding["bytes"])
        copies = [finding for finding in largest if finding["kind"] in ("copy", "slice")]
        shown = [finding for finding in largest if finding not in copies[SHOWN:]]
        lines += [f"{program.name}: {finding['sentence']}" for finding in shown]
        if copies[SHOWN:]:
            lines.append(f"{program.name}: {len(copies) - SHOWN} more copies, listed by --json")
        if program.kernel_calls:
            lines.append(
                f"{program.name}: {program.kernel_calls:g} calls of Pallas kernels, by their authors' estimates"
            )
    return lines


def _memory_fraction(report: PlanReport) -> list[str]:
    """Return a sentence if a program needs more of a GPU than JAX reserves by default."""
    needed = max((p.memory.total / p.memory.available for p in report.programs if p.memory), default=0.0)
    if report.chip["platform"] != "gpu" or needed <= RESERVED:
        return []
    fraction = min(needed + 0.05, LARGEST)
    return [describe_fraction(fraction)]


def describe_fraction(fraction: float) -> str:
    """Return the setting with which JAX reserves a share of a GPU's memory."""
    return f"JAX reserves {RESERVED:.0%} of a GPU by default; set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}"


def show_report(report: PlanReport, out) -> None:
    """Print tables and sentences on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs = report.inputs
    models = inputs["target"] + (f", draft {inputs['draft']}" if inputs["draft"] else "")
    if inputs["head_params"]:
        models += f", head of {inputs['head_params'] / 1e6:,.0f} M parameters"
    written = [f"{name}={text}" for name, text in inputs["options"].items()]
    method = " ".join(filter(None, (inputs["method"], inputs["tree"], *written)))
    write(
        f"{models}; {method}; batch {inputs['batch']}, {inputs['context']} cached tokens, {dtypes(inputs)}"
        f"{sampling_of(inputs)}\n{inputs['topology']}, {mesh_of(inputs)}, per device:"
    )
    # Two tables, because one with all columns is too wide for 80 characters.
    memory, times = (Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)) for _ in range(2))
    for table, headings in (
        (memory, ("HBM GiB", "args", "temps", "out", "alias")),
        (times, ("roofline\nms", "schedule\nms", "must\nGB", "moved\nGB", "GFLOP", "collec-\ntives", "wire\nMB")),
    ):
        table.add_column("program", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right")
    for p in report.programs:
        if not p.compiles or p.memory is None:
            memory.add_row(p.name, "" if p.needed_bytes is None else gib_cell(p.needed_bytes) + "!", style="yellow")
            continue
        m = p.memory
        sizes = [gib_cell(size) for size in (m.total, m.arguments, m.temporaries, m.output, m.aliased)]
        memory.add_row(p.name, *sizes)
        count = sum(entry["count"] for entry in p.collectives)
        wire = sum(entry["wire_bytes"] for entry in p.collectives)
        times.add_row(
            p.name, milliseconds(p.seconds["roofline"]), milliseconds(p.seconds["schedule"]),
            f"{p.must_bytes / 1e9:.2f}", f"{p.moved_bytes / 1e9:.2f}", f"{p.flops / 1e9:,.0f}",
            *((f"{count:,.0f}", f"{wire / 1e6:,.1f}") if count else "--"),
        )  # fmt: skip
    out.print(memory)
    if times.row_count:
        out.print(times)
    _show_launches(report, out)
    page = (NVIDIA if report.chip["platform"] == "gpu" else DOCS) + report.chip["name"]
    write(f"of {gib(report.chip['hbm_bytes'])}; chip data from {page} and others, see --json", style="dim")
    for line in warnings(report):
        write(line, style="yellow" if "not" in line.split(":")[0] else "")
    if report.speedups:
        ratio = report.cost_ratio
        write(
            f"\na step of {method} costs {ratio['roofline']:.2f} plain steps by the roofline, "
            f"{ratio['schedule']:.2f} by the compiler's schedule"
        )
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("acceptance", "tokens/pass", "speed-up: roofline", "schedule"):
            table.add_column(heading, justify="right")
        for row in report.speedups:
            table.add_row(f"{row.acceptance:.2f}", f"{row.tokens:.2f}", f"{row.roofline:.2f}", f"{row.schedule:.2f}")
        out.print(table)
    if report.window:
        _show_blocks(report, out, write)
    _show_clocks(report.clocks, write)


def _show_launches(report: PlanReport, out) -> None:
    """Print the kernels and loops of each program for a GPU."""
    from rich import box
    from rich.table import Table

    programs = [program for program in report.programs if program.kernels]
    if not programs:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("program", no_wrap=True)
    for heading in ("kernels", "products", "attention", "others", "loops of\nknown length", "of unknown\nlength"):
        table.add_column(heading, justify="right")
    for program in programs:
        counts = [sum(program.kernels.values()), *program.kernels.values()]
        count_loops = lambda known, loops=program.loops: sum(
            loop["executions"] for loop in loops if loop["known"] is known
        )
        loops = [count_loops(True), count_loops(False)]
        table.add_row(program.name, *(f"{count:,.0f}" for count in (*counts, *loops)))
    out.print(table)


def _show_blocks(report: PlanReport, out, write: Callable[..., None]) -> None:
    """Print the logits of each program and the cost of a block of a diffusion model."""
    from rich import box
    from rich.table import Table

    programs = [program for program in report.programs if program.logits is not None and program.name != "loop"]
    for program in programs:
        logits: dict[str, Any] = program.logits or {}
        shape = f"{logits['dtype']}[{','.join(map(str, logits['shape']))}]"
        write(
            f"{program.name}: the largest logits are {shape} per device, of {logits['rows']} columns; a window has "
            f"{report.window['window']}, a canvas {report.window['canvas']}"
        )
    if not report.blocks:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    fused = report.blocks[0].passes_apart is not None
    headings = ["columns per pass", "passes per block", *(f"{clock} ms/token" for clock in CLOCKS)]
    for heading in (
        *headings,
        *(["clean pass apart", *(f"{clock}: times as long" for clock in CLOCKS)] if fused else []),
    ):
        table.add_column(heading, justify="right")
    for row in report.blocks:
        more = [str(row.passes_apart), *(f"{row.gain[clock]:.2f}" for clock in CLOCKS)] if fused else []
        times = [milliseconds(row.seconds_per_token[clock]) for clock in CLOCKS]
        table.add_row(str(row.columns), str(row.passes), *times, *more)
    out.print(table)


def show_training(report: TrainingReport, out) -> None:
    """Print a training step on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs, p = report.inputs, report.program
    write(
        f"{inputs['target']}, {inputs['method']} of {inputs['head_params'] / 1e6:,.0f} M parameters; a step of "
        f"{inputs['rows']} rows of {inputs['length']} tokens, with a loss on {report.places} of them and "
        f"{inputs['depths']} drafts each\n{inputs['topology']}, {mesh_of(inputs)}, per device:"
    )
    if not p.compiles or p.memory is None:
        write(f"it does not compile: {p.reason}; give fewer --rows, a shorter --length or more chips", style="yellow")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("HBM GiB", "args", "temps", "TFLOP", "moved GB", "collectives"):
        table.add_column(heading, justify="right")
    for clock in CLOCKS:
        table.add_column(f"{clock} s", justify="right")
        table.add_column("tokens/s", justify="right")
    m = p.memory
    wire = sum(entry["wire_bytes"] for entry in p.collectives)
    times = [text for clock in CLOCKS for text in (f"{p.seconds[clock]:.3g}", f"{report.rate(clock):,.0f}")]
    table.add_row(
        *(gib_cell(size) for size in (m.total, m.arguments, m.temporaries)), f"{p.flops / 1e12:.3g}",
        f"{p.moved_bytes / 1e9:.3g}", f"{wire / 1e9:.3g} GB" if wire else "-", *times,
    )  # fmt: skip
    out.print(table)
    write("two estimates of time, no measurement; tokens/s counts the tokens with a loss", style="dim")


def show_plan(plan_result: Plan, out) -> None:
    """Print the drafts by expected tokens per second, and the cost curve, on a rich console."""
    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs = plan_result.inputs
    write(
        f"{inputs['target']}; batch {inputs['batch']}, {inputs['context']} cached tokens, {dtypes(inputs)}"
        f"{sampling_of(inputs)}; {inputs['topology']}, {mesh_of(inputs)}"
    )
    if plan_result.meshes:
        write("mesh by the schedule of a plain step: " + ", ".join(map(_mesh_cost, plan_result.meshes)))
    _show_passes(plan_result, out)
    _show_drafts(plan_result, out)
    write(f"the fastest by the schedule: {plan_result.best.name}, specjax generate {plan_result.best.flags}")
    for note in plan_result.notes:
        write(note)
    write("a tree in the options is the best of the form AxBxC; --json has the best tree of any form", style="dim")
    write("tokens per second depend on the acceptance, which is assumed:", style="dim")
    for row in plan_result.drafts:
        if row.acceptance:
            rates = ", ".join(f"{rate:.3g}" for rate in row.acceptance)
            write(f"  {row.name}: {rates} by rank ({row.acceptance_source})", style="dim")
    _show_clocks(plan_result.clocks, write)


def _show_passes(plan_result: Plan, out) -> None:
    """Print the time of target passes over numbers of nodes, and of the draft models."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("program", no_wrap=True)
    for heading in ("roofline ms", "of plain", "schedule ms", "of plain", "GFLOP", "moved MB"):
        table.add_column(heading, justify="right")
    plain = plan_result.widths[0].seconds
    for report in (*plan_result.widths, *plan_result.draft_passes):
        if not report.compiles:
            table.add_row(report.name, report.reason, style="yellow")
            continue
        s = report.seconds
        times = [x for side in CLOCKS for x in (milliseconds(s[side]), f"{s[side] / plain[side]:.2f}")]
        table.add_row(report.name, *times, f"{report.flops / 1e9:.4g}", f"{report.moved_bytes / 1e6:.0f}")
    out.print(table)


def _show_drafts(plan_result: Plan, out) -> None:
    """Print the drafts, the fastest by the schedule first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("draft", no_wrap=True)
    for heading in (
        "drafted",
        "deep",
        "tokens\n/pass",
        "tokens/s\nschedule",
        "of\nplain",
        "tokens/s\nroofline",
        "of\nplain",
    ):
        table.add_column(heading, justify="right")
    table.add_column("options")
    for row in plan_result.drafts:
        choice, lower = row.choice("schedule"), row.choice("roofline")
        shape = (str(choice.num_nodes - 1), str(choice.depth)) if choice.spec else ("-", "-")
        rates = [
            text
            for side in (choice, lower)
            for text in (f"{row.tokens_per_second[side.side]:,.0f}", f"{side.speedup:.2f}")
        ]
        table.add_row(row.name, *shape, f"{choice.tokens:.2f}", *rates, row.flags)
    out.print(table)


def _mesh_cost(report: ProgramReport) -> str:
    """Return the time of a plain step for a size of the axis "model"."""
    return (
        f"{report.name} {milliseconds(report.seconds['schedule'])} ms"
        if report.compiles
        else f"{report.name} too large"
    )


def _show_clocks(clocks: dict[str, str], write: Callable[..., None]) -> None:
    """Print the meaning of each time estimate."""
    write("two estimates of time, no measurement; see docs/tpu.md if they disagree:", style="dim")
    for name, meaning in clocks.items():
        write(f"  {name}: {meaning}", style="dim")
