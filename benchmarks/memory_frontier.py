"""The prompts, batches and trees that fit in a memory budget (SpecMemo), from shapes, as a figure.

    python benchmarks/memory_frontier.py [--memory 12GiB] [--out docs/memory_frontier.png]

The rows are those of `specjax plan --memory` for several lengths of the prompt, without its compilation. No weights are
read, and times are rooflines, so no figure here is a measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from specjax.cli.options.planning import parse_bytes
from specjax.files.plotting import hide_top_right_spines, new_figure, to_png
from specjax.files.sizes import GIB
from specjax.planning import memory_frontier


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report: the fastest draft of each batch and length of the prompt, and plain decoding beside it."""
    memory = parse_bytes(options.memory, "--memory")
    frontier = memory_frontier(
        options.target, options.topology, memory, options.contexts, head=tuple(options.head),
        draft=tuple(options.draft), acceptance=options.acceptance, model=options.model,
        max_new_tokens=options.max_new_tokens,
    )  # fmt: skip
    points = []
    for context, batches in frontier.items():
        for rows in batches:
            for kind, row in {"fastest": rows[0], "plain": next(row for row in rows if row.num_nodes == 1)}.items():
                points.append({"context": context, "kind": kind, **dataclasses.asdict(row)})
    names = ("target", "topology", "memory", "head", "draft", "acceptance", "max_new_tokens")
    return {name: getattr(options, name) for name in names} | {"memory_bytes": memory, "points": points}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw speed, bytes and the longest prompt against the rows, with the nodes of the trees."""
    figure = new_figure(12, 4)
    speed, needed, longest = (figure.add_subplot(1, 3, column) for column in (1, 2, 3))
    points = report["points"]
    contexts = sorted({point["context"] for point in points})
    select = lambda context, kind: [p for p in points if (p["context"], p["kind"]) == (context, kind)]
    for index, context in enumerate(contexts):
        color, fastest, plain = f"C{index}", select(context, "fastest"), select(context, "plain")
        rows = [point["batch"] for point in fastest]
        speed.plot(rows, [point["tokens_per_second"] for point in fastest], "o-", color=color, label=f"{context:,}")
        speed.plot(rows, [point["tokens_per_second"] for point in plain], ":", color=color)
        for point in fastest:
            speed.annotate(
                point["num_nodes"], (point["batch"], point["tokens_per_second"]), (0, 5), textcoords="offset points",
                fontsize=7, ha="center",
            )  # fmt: skip
        needed.plot(rows, [point["needed_bytes"] / GIB for point in fastest], "o-", color=color)
    needed.axhline(report["memory_bytes"] / GIB, color="0.5", linestyle="--")
    for kind, style in (("fastest", "o-"), ("plain", ":")):
        points_of_kind = select(contexts[0], kind)
        longest.plot(
            [point["batch"] for point in points_of_kind],
            [point["longest_context"] for point in points_of_kind],
            style,
            color="C0",
        )
    speed.legend(title="prompt tokens", fontsize=8)
    speed.set(ylabel="tokens/s of all rows (dotted: plain)", yscale="log")
    needed.set(ylabel="GiB per device (dashed: the budget)", ylim=(0, None))
    longest.set(ylabel="longest prompt (dotted: plain)", yscale="log")
    for axes in (speed, needed, longest):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows")
        hide_top_right_spines(axes)
    path.write_bytes(to_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama3_8b", help="a built-in config, a folder or a GGUF file")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--model", type=int, help="devices that share the weights; default: all")
    parser.add_argument("--memory", default="12GiB", help="bytes per device")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--head", nargs="*", default=["eagle3"], help="kinds of draft heads")
    parser.add_argument("--draft", nargs="*", default=[], help="draft models")
    parser.add_argument("--acceptance", default=".72,.13,.06", help="assumed acceptance by rank")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the report into this file")
    parser.add_argument("--out", type=Path, help="draw the results into this PNG file")
    options = parser.parse_args()
    report = measure(options)
    for point in report["points"]:
        names = ("context", "batch", "kind", "name", "num_nodes", "longest_context")
        sizes = f"tokens/s {point['tokens_per_second']:,.0f} GiB {point['needed_bytes'] / GIB:.2f}"
        print(*(f"{name} {point[name]}" for name in names), sizes, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.out is not None:
        draw(report, options.out)


if __name__ == "__main__":
    main()
