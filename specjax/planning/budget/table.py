"""This module prints the table of a plan within a memory budget."""

from __future__ import annotations

import itertools

from specjax.files.sizes import gib, gib_cell
from specjax.planning.budget.frontier import LOSS
from specjax.planning.budget.within_memory import MemoryPlan

AXES = ("data", "model", "layer", "sequence", "expert")
SHOWN = 4
"""Drafts of a batch in the table. `--json` has all of them."""


def show_memory_plan(plan: MemoryPlan, out) -> None:
    """Print the drafts by batch, and the chosen plan with the bytes of its compiled programs, on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs = plan.inputs
    write(
        f"{inputs['target']} in {inputs['dtype']}; {inputs['topology']}, {gib(plan.budget_bytes)} per device, of which "
        f"{gib(plan.usable_bytes)} are used; prompts of {inputs['context']} and texts of {inputs['max_new_tokens']} "
        "tokens"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("draft", no_wrap=True)
    for heading in ("nodes", "fastest\nnodes", "tokens/s", "needed\nGiB", "longest\nprompt"):
        table.add_column(heading, justify="right")
    for batch, rows in itertools.groupby(plan.rows, key=lambda row: row.batch):
        for row in list(rows)[:SHOWN]:
            if row.reason:
                table.add_row(str(batch), row.name, "--", "--", "--", gib_cell(row.needed_bytes), "--")
                continue
            table.add_row(
                str(batch), row.name, str(row.num_nodes), str(row.fastest_nodes), f"{row.tokens_per_second:,.0f}",
                gib_cell(row.needed_bytes), f"{row.longest_context:,}",
                style="bold" if plan.best is not None and row is plan.best.draft else None,
            )  # fmt: skip
    out.print(table)
    for compiled in plan.tried:
        draft = compiled.draft
        if compiled.needed_bytes is None:
            reasons = [program.reason for program in compiled.programs if not program.compiles]
            verdict = f"the compiler refuses it: {reasons[0]}"
        else:
            verdict = f"the compiler needs {gib(compiled.needed_bytes)}, estimated were {gib(draft.needed_bytes)}"
        is_best = compiled is plan.best
        word = "best" if is_best else "refused" if compiled.needed_bytes is None else "too large"
        axes = "".join(f" --{name} {inputs[name]}" for name in AXES if inputs[name] > 1)
        write(f"{word}: --batch-size {draft.batch}{axes} {draft.flags}; {verdict}", style=None if is_best else "yellow")
    if plan.best is None:
        write("no programs that fit were found; use a larger --memory, a shorter --context or a smaller model")
    for row in plan.rows:
        if row.reason:
            write(f"{row.name} does not fit with {row.batch} rows: {row.reason}", style="dim")
    write(
        f"nodes: of the smallest tree that keeps {1 - LOSS:.0%} of the speed of the fastest one that fits\n"
        "tokens/s: of all rows, by the roofline of the shapes and the acceptance rates, not a measurement\n"
        "needed, longest prompt: sums over shapes with this tree; only the programs of the last lines are compiled",
        style="dim",
    )
