"""Cost of a token on 1 to 256 chips, with plain and with speculative decoding, estimated by the TPU compiler.

    python benchmarks/chips_curve.py --target llama3_8b --draft llama3_1b --chip v5e --out docs/chips_llama3_8b.png
    python benchmarks/chips_curve.py --target llama3_70b --draft llama3_8b --chip v5e --out docs/chips_llama3_70b.png

For each slice the weights are split over up to `--most-model` chips, and further chips take more rows. Each group of
chips decodes `--rows` rows. The figures are the milliseconds per token of a row (latency) and the chip-milliseconds per
token (cost) of a step, for plain decoding and for a drafted tree at the given acceptance. They are estimates from the
roofline and the compiler's schedule, not measurements. Needs the extra tpu-compile, no TPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specjax.costs.chips import CHIPS
from specjax.errors import UsageError
from specjax.planning.compiler import compile_programs
from specjax.planning.drafting import tokens_of
from specjax.planning.inputs.topologies import Topology, larger, one_of
from specjax.planning.records import ProgramReport
from specjax.planning.workload import make_workload

SIDES = ("roofline", "schedule")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama3_8b")
    parser.add_argument("--draft", default="llama3_1b")
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--tree", default="4x2x2x1")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--rows", type=int, default=1, help="of each group of chips")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--most-model", type=int, default=16, help="largest split of the weights")
    parser.add_argument("--most-chips", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a plot; the figures go beside it as .json")
    args = parser.parse_args()
    log, rows = Console(stderr=True), []
    for topology in slices(args.chip, args.most_chips):
        row = measure(args, topology, log)
        rows.append(row)
        log.print(f"{topology.name}: {row['reason'] or 'compiled'}", style="dim")
    show(rows, args)
    if args.out is not None:
        settings = vars(args) | {"out": args.out.name}
        args.out.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}))
        plot(rows, args)


def slices(chip: str, max_devices: int) -> list[Topology]:
    """Return one chip, and every larger slice of the table."""
    topology, topologies = one_of(CHIPS[chip]), []
    while topology is not None and topology.num_devices <= max_devices:
        topologies.append(topology)
        topology = larger(topology)
    return topologies


def measure(args: argparse.Namespace, topology: Topology, log: Console) -> dict:
    """Milliseconds of a step of both kinds on one slice, or the reason why it does not compile."""
    total = topology.num_devices
    model = max(n for n in range(1, min(args.most_model, total) + 1) if total % n == 0)
    data = total // model
    options = {"batch": args.rows * data, "context": args.context, "data": data, "model": model}
    row = {"slice": topology.name, "chips": total, "data": data, "model": model, "reason": ""}
    try:
        plain = make_workload(args.target, topology.name, method="autoregressive", **options)
        tree = make_workload(args.target, topology.name, draft=args.draft, tree=args.tree, **options)
    except UsageError as error:
        return row | {"reason": str(error)}
    tokens = tokens_of(tree)(args.acceptance)
    for name, work, per_step in (("plain", plain, 1.0), ("tree", tree, tokens)):
        report: ProgramReport = compile_programs(work, True, lambda what: None, only=("step",))[0]
        if not report.compiles:
            return row | {"reason": report.reason}
        for side in SIDES:
            latency = report.seconds[side] * 1e3 / per_step
            row[f"{name} {side}"] = latency, latency * model / args.rows
    return row


def show(rows: list[dict], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.target} with {args.draft}, tree {args.tree}, acceptance {args.acceptance}")
    for name in ("slice", "data x model", *(f"{kind} {side}" for kind in ("plain", "tree") for side in SIDES)):
        table.add_column(name)
    for row in rows:
        cells = [row["slice"], f"{row['data']} x {row['model']}"]
        if row["reason"]:
            table.add_row(*cells, row["reason"][:60])
            continue
        figures = (row[f"{kind} {side}"] for kind in ("plain", "tree") for side in SIDES)
        table.add_row(*cells, *(f"{ms:.2f} ms, {chip_ms:.0f} chip-ms" for ms, chip_ms in figures))
    Console().print(table)


def plot(rows: list[dict], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    good = [row for row in rows if not row["reason"]]
    units = "ms per token of a row", "chip-ms per token"
    for index, (axes, what) in enumerate(zip(figure.subplots(1, 2), units, strict=True)):
        for kind, color in (("plain", "tab:gray"), ("tree", "tab:green")):
            low, high = ([row[f"{kind} {side}"][index] for row in good] for side in SIDES)
            axes.fill_between([row["chips"] for row in good], low, high, color=color, alpha=0.35, label=kind)
        axes.set(xscale="log", ylim=(0, 1.05 * max(row[f"plain {SIDES[1]}"][index] for row in good)), ylabel=what)
        axes.set_xlabel(f"chips ({args.chip})")
        axes.set_xticks([row["chips"] for row in good], [str(row["chips"]) for row in good])
        axes.minorticks_off()
        axes.legend(title="roofline to schedule")
    figure.suptitle(f"{args.target} with {args.draft}, tree {args.tree} at acceptance {args.acceptance}")
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
