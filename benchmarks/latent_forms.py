"""Latent attention on a TPU: the kernel against the loop of XLA, by the compiler's schedule.

    python benchmarks/latent_forms.py
    python benchmarks/latent_forms.py --topology v6e:1x1 --nodes 1,64 --json

Each program is a step of a model that has only the attention layers of `--target`, with their projections, for one
device (`planning.stages`). The figures are estimates, not measurements. The compiler counts no cycles for the kernel,
which counts with its own estimate of bytes and products. The loop of XLA counts one turn per 256 cached tokens. Needs
the extra tpu-compile, no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any
from unittest import mock

import jax
from rich.console import Console
from rich.table import Table

from specjax.files.sizes import gib
from specjax.pallas_kernels.tree_attention import tpu
from specjax.planning.compiler import compile_programs
from specjax.planning.inputs.topologies import one_of
from specjax.planning.stages.programs import stage_configs
from specjax.planning.workload import make_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="deepseek_v2_lite")
    parser.add_argument("--topology", default="v5e:1x1")
    parser.add_argument("--context", default="1024,4096,8192")
    parser.add_argument("--nodes", default="1,16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    numbers = lambda text: [int(part) for part in text.split(",")]
    log, results = Console(stderr=True), []
    for context in numbers(args.context):
        for nodes in numbers(args.nodes):
            for form in ("xla", "kernel"):
                results.append(measure(args, context, nodes, form))
                log.print(json.dumps(results[-1]), style="dim", soft_wrap=True)
    if args.json:
        print(json.dumps({"settings": vars(args), "results": results}))
    else:
        show(results, args)


def measure(args: argparse.Namespace, context: int, nodes: int, form: str) -> dict[str, Any]:
    """Return the estimates of one program."""
    work = make_workload(args.target, args.topology, batch=args.batch_size, context=context)
    attention, _ = stage_configs(work.target)
    one = dataclasses.replace(work.plain, target=attention, topology=one_of(work.topology.chip), model=1)
    largest = 0 if form == "xla" else tpu.MAX_SHARED_DIM  # XLA computes what the kernel does not take
    jax.clear_caches()  # traces do not depend on the form otherwise
    with mock.patch.object(tpu, "MAX_SHARED_DIM", largest):
        (report,) = compile_programs(one, False, lambda name: None, only=("step",), nodes=nodes)
    assert report.compiles and report.memory is not None, report.reason
    return {
        "context": context,
        "nodes": nodes,
        "form": form,
        "kernel_calls": report.kernel_calls,
        "schedule_ms": 1e3 * report.seconds["schedule"],
        "roofline_ms": 1e3 * report.seconds["roofline"],
        "moved_bytes": report.moved_bytes,
        "temporary_bytes": report.memory.temporaries,
        "compile_seconds": report.compile_seconds,
        "findings": [finding["sentence"] for finding in report.findings],
    }


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title=f"Attention layers of {args.target} on {args.topology}, estimates of the compiler")
    for name in ("context", "nodes", "form", "kernel calls", "schedule", "roofline", "HBM traffic", "temporaries"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for row in results:
        times = (f"{row[name]:.2f} ms" for name in ("schedule_ms", "roofline_ms"))
        sizes = (gib(row[name]) for name in ("moved_bytes", "temporary_bytes"))
        table.add_row(str(row["context"]), str(row["nodes"]), row["form"], f"{row['kernel_calls']:.0f}", *times, *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
