"""The report of `specjax bench`: JSON per group, the table and the plot."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from specjax.bench import near_ties
from specjax.bench.records import dtypes, tokens_per_second
from specjax.cli.output.console import Console
from specjax.cli.runs.bench.group import PLAIN, Group
from specjax.files import plotting


def describe_group(group: Group) -> dict[str, Any]:
    """Return the prompts of a group and their runs as JSON."""
    return {
        "task": group.task,
        "lines": [row.prompt.line for row in group.rows],
        "question_ids": [row.prompt.question_id for row in group.rows],
        "prompt_tokens": [len(row.ids) for row in group.rows],
        "runs": {
            name: {
                "tokens": sum(map(len, run.tokens)),
                "seconds": run.seconds,
                "tokens_per_second": tokens_per_second(run),
                "target_passes": int(run.stats.target_passes.sum()),
                **({} if run.columns is None else {"columns": int(run.columns.sum())}),
                **({} if run.computed is None else {"computed": int(run.computed.sum())}),
            }
            for name, run in ((name.replace(PLAIN, "autoregressive"), run) for name, run in group.runs.items())
        },
    }


def sections(document: dict) -> dict[str, dict[str, dict]]:
    """Return the records by task and method, with "overall" unless there is one task."""
    return document["tasks"] | ({"overall": document["overall"]} if len(document["tasks"]) != 1 else {})


SPEED_COLUMNS = {
    "n": lambda entry: str(entry["prompts"]),
    "tok/s": lambda entry: f"{entry['tokens_per_second']:.1f}",
    "plain": lambda entry: f"{entry['baseline_tokens_per_second']:.1f}",
    "ratio": lambda entry: "refused" if entry["refused"] else f"{entry['speedup']:.2f}",
}
DRAFT_COLUMNS = {
    "tok/pass": lambda entry: f"{entry['block_efficiency']:.2f}",
    "accepted": lambda entry: f"{entry['mean_accepted']:.2f}",
}
DENOISER_COLUMNS = {
    "tok/pass": lambda entry: f"{entry['tokens_per_pass']:.2f}",
    "col/tok": lambda entry: f"{entry['columns_per_token']:.1f}",
    "computed": lambda entry: f"{entry['computed_per_token']:.1f}",
    "plain col/tok": lambda entry: f"{entry['baseline_columns_per_token']:.1f}",
    "equal": lambda entry: f"{entry['agreement']:.0%}",
}
EQUALITY_COLUMN = {"same": lambda entry: {True: "yes", False: "no", None: "-"}[entry["identical"]]}
"""Columns of the table: their heading, and their text for a record."""


def is_denoising(document: dict) -> bool:
    """Return True for the document of a diffusion model."""
    return any("columns_per_token" in entry for entry in document["overall"].values())


def show(document: dict, out: Console) -> None:
    """Print the table."""
    cells = SPEED_COLUMNS | (DENOISER_COLUMNS if is_denoising(document) else DRAFT_COLUMNS) | EQUALITY_COLUMN
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for heading in ("task", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in cells:
        table.add_column(heading, justify="right")
    for task, records in sections(document).items():
        for number, (name, entry) in enumerate(records.items()):
            table.add_row("" if number else task, name, *(cell(entry) for cell in cells.values()))
        table.add_section()
    out.print(table)


def describe_difference(entry: dict) -> str:
    """Return one line about a text that differs."""
    if "top_two_gap" not in entry:
        return (
            f"{entry['method']} differs from the procedure that it accelerates on line {entry['line']} "
            f"({entry['task']}), first at new token {entry['position']}: {entry['text']!r} instead of "
            f"{entry['plain_text']!r}"
        )
    return (
        f"{entry['method']} differs on line {entry['line']} ({entry['task']}), first at new token {entry['position']}: "
        f"{entry['text']!r} instead of {entry['plain_text']!r}; {near_ties.describe_gap(entry)}"
    )


def plot(document: dict) -> bytes:
    """Return a PNG of the speedup per task and method, with tokens per target pass above the bars."""
    groups = sections(document)
    methods = list(document["overall"])
    denoising = is_denoising(document)
    caption = "tokens per target pass, bonus token included"
    label = lambda entry: f"{entry['block_efficiency']:.2f}"
    if denoising:
        caption = "tokens per pass | columns computed per token"
        label = lambda entry: f"{entry['tokens_per_pass']:.2f} | {entry['computed_per_token']:.0f}"
    figure = plotting.new_figure(max(5.0, 1.2 + 0.75 * len(groups) * (len(methods) + 0.6)), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for number, name in enumerate(methods):
        places = [i - 0.4 + width * (number + 0.5) for i in range(len(groups))]
        entries = [records[name] for records in groups.values()]
        bars = axes.bar(places, [entry["speedup"] or 0 for entry in entries], width * 0.92, label=name)
        labels = ["refused" if entry["refused"] else label(entry) for entry in entries]
        axes.bar_label(bars, labels, padding=2, fontsize=8)
    axes.axhline(1.0, color="0.3", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(groups)), [task.replace("_", "\n") for task in groups])
    axes.set_ylabel(f"tokens/s, relative to {'one column per pass' if denoising else 'plain decoding'}")
    axes.margins(y=0.15)
    where = f"{document['target']}, {dtypes(document)}, {document['machine']['device_kind']}"
    axes.set_title(f"{where}\nabove the bars: {caption}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=min(len(methods), 4), frameon=False)
    plotting.hide_top_right_spines(axes)
    return plotting.to_png(figure)
