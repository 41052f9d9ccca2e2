"""The table of attention and feed-forward stages."""

from __future__ import annotations

from specjax.costs.chips import GIB
from specjax.planning.reports.tables import milliseconds
from specjax.planning.stages.compiled import CompiledStages
from specjax.planning.stages.report import StagePlan, StageRow

COLUMNS = "GiB", "formula", "roof-\nline", "sched-\nule"
"""The columns of each stage."""


def show_compiled_stages(stages: CompiledStages, out) -> None:
    """Print a row for each compiled pass on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    experts = "" if stages.experts is None else f", {stages.experts[1]} of {stages.experts[0]} experts per token"
    rows = -(-stages.batch // stages.attention_devices)
    write(
        f"{stages.target} in {stages.dtype}{experts}; {stages.topology}, {stages.attention_devices} attention and "
        f"{stages.feed_devices} feed-forward devices; batch {stages.batch}, {stages.context} cached tokens"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("nodes", *(f"{part}\n{name}" for part in ("atten-\ntion", "feed") for name in COLUMNS)):
        table.add_column(heading, justify="right", no_wrap=True)
    refused = []
    for one in stages.passes:
        cells = [str(one.nodes)]
        for formula, report in ((one.attention_formula, one.attention), (one.feed_formula, one.feed)):
            cells += [f"{report.memory.total / GIB:.2f}" if report.memory else "-", milliseconds(formula)]
            names = ("roofline", "schedule")
            cells += [milliseconds(report.seconds[name]) if report.compiles else "-" for name in names]
            if not report.compiles:
                refused.append(f"{report.name}, {one.nodes} nodes, does not compile: {report.reason}")
        table.add_row(*cells)
    out.print(table)
    for text in dict.fromkeys(refused):
        write(text, style="yellow")
    write(
        f"GiB: of memory per device; attention is for {rows} rows, and feed for all rows with its sums over devices\n"
        "formula: of specjax plan --stages, without these sums; roofline and schedule: of the compiled stages, in ms\n"
        "transfers between the stages are not compiled, and nothing was measured",
        style="dim",
    )


def show_stages(plan: StagePlan, out) -> None:
    """Print a row for each number of nodes on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    experts = "" if plan.experts is None else f", {plan.experts[1]} of {plan.experts[0]} experts per token"
    write(
        f"{plan.target} in {plan.dtype}{experts}; {plan.topology}, {plan.devices} devices; batch {plan.batch}, "
        f"{plan.context} cached tokens"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = (
        "nodes", "atten-\ntion\nms", "feed\nms", "both\nms", "balance\nrows", "A:F", "micro-\nbatches",
        "transfer\nms", "step\nms", "ratio",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_cells(row))
    out.print(table)
    if not all(row.together_fits for row in plan.rows):
        write("both stages on every device do not fit into its memory", style="yellow")
    write(
        "nodes: of a pass, per row; 1 is plain decoding\n"
        "attention, feed, both: seconds of the attention part and the feed-forward part on all devices together\n"
        "balance: rows from which the feed-forward part waits for products instead of weights\n"
        "A:F: attention and feed-forward devices of the fastest division, with its transfers and step\n"
        "ratio: both / step, above 1 if separate devices are faster; up to the second number if the exchange between\n"
        "devices that do both is not hidden",
        style="dim",
    )
    write(plan.limits, style="dim")


def _cells(row: StageRow) -> tuple[str, ...]:
    """Return the texts of a row."""
    split = row.split
    return (
        str(row.nodes),
        milliseconds(row.attention_seconds),
        milliseconds(row.feed_seconds),
        milliseconds(row.together_seconds),
        f"{row.balance_rows:,.0f}",
        f"{split.attention_devices}:{split.feed_devices}",
        str(split.micro_batches),
        milliseconds(split.transfer_seconds),
        milliseconds(split.step_seconds),
        f"{row.ratio:.2f}-{row.ratio_with_exchange:.2f}",
    )
