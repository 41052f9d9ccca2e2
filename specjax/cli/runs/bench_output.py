"""What `specjax bench` leaves behind: the JSON document, the table and the plot."""

from __future__ import annotations

from rich import box
from rich.table import Table

from specjax.bench.records import dtypes, tokens_per_second
from specjax.cli.options.prompts import BadLine
from specjax.cli.output.console import Console
from specjax.cli.runs.bench import PLAIN, Runs
from specjax.cli.runs.session import provenance
from specjax.files import plotting


def document(bench: Runs, bad: list[BadLine], skipped: list[BadLine]) -> dict:
    """Everything about the runs so far, as JSON: `overall` by method, `tasks` by task and method, then the prompts;
    `left`: prompts that were not reached."""
    settings = {
        name: getattr(bench.settings, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    }
    return {
        **provenance(bench.session),
        "settings": settings | {"batch_size": bench.batch_size, "repeats": bench.repeats},
        "overall": {name: bench.record(name) for name in bench.methods},
        "tasks": {task: {name: bench.record(name, task) for name in bench.methods} for task in bench.tasks},
        "prompts": [_prompts(bench, group) for group in bench.done],
        "differences": [entry for group in bench.done for found in group.differences.values() for entry in found],
        "left": bench.left,
        "skipped": [entry._asdict() for entry in skipped],
        "errors": [entry._asdict() for entry in bad],
    }


def _prompts(bench: Runs, group) -> dict:
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
            }
            for name, run in ((name.replace(PLAIN, "autoregressive"), run) for name, run in group.runs.items())
        },
    }


def sections(document: dict) -> dict[str, dict[str, dict]]:
    """Tasks, then "overall" if there are several, each with its records by method."""
    return document["tasks"] | ({"overall": document["overall"]} if len(document["tasks"]) != 1 else {})


SPEED = {
    "n": lambda entry: str(entry["prompts"]),
    "tok/s": lambda entry: f"{entry['tokens_per_second']:.1f}",
    "plain": lambda entry: f"{entry['baseline_tokens_per_second']:.1f}",
    "ratio": lambda entry: "refused" if entry["refused"] else f"{entry['speedup']:.2f}",
}
OF_DRAFTS = {
    "tok/pass": lambda entry: f"{entry['block_efficiency']:.2f}",
    "accepted": lambda entry: f"{entry['mean_accepted']:.2f}",
}
OF_DENOISING = {
    "tok/pass": lambda entry: f"{entry['tokens_per_pass']:.2f}",
    "col/tok": lambda entry: f"{entry['columns_per_token']:.1f}",
    "plain col/tok": lambda entry: f"{entry['baseline_columns_per_token']:.1f}",
    "equal": lambda entry: f"{entry['agreement']:.0%}",
}
SAME = {"same": lambda entry: {True: "yes", False: "no", None: "-"}[entry["identical"]]}
"""Columns of the table, of the records."""


def is_denoising(document: dict) -> bool:
    """Whether it is of a diffusion model."""
    return any("columns_per_token" in entry for entry in document["overall"].values())


def show(document: dict, out: Console) -> None:
    """The table."""
    cells = SPEED | (OF_DENOISING if is_denoising(document) else OF_DRAFTS) | SAME
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
    """One line about a text that differs."""
    if "top_two_gap" not in entry:
        return (
            f"{entry['method']} differs from what it speeds up on line {entry['line']} ({entry['task']}) first at new "
            f"token {entry['position']}: {entry['text']!r} instead of {entry['plain_text']!r}"
        )
    return (
        f"{entry['method']} differs on line {entry['line']} ({entry['task']}) first at new token {entry['position']}: "
        f"{entry['text']!r} instead of {entry['plain_text']!r}; the two largest logits there are "
        f"{entry['top_two_gap']:.2g} apart" + (" (a near-tie)" if entry["near_tie"] else "")
    )


def plot(document: dict) -> bytes:
    """A PNG: the speed-up per task and method, with tokens per target pass (and what they cost) above the bars."""
    groups = sections(document)
    methods = list(document["overall"])
    denoising = is_denoising(document)
    above = "tokens per target pass, bonus token included"
    said = lambda entry: f"{entry['block_efficiency']:.2f}"
    if denoising:
        above = "tokens per pass | columns computed per token"
        said = lambda entry: f"{entry['tokens_per_pass']:.2f} | {entry['columns_per_token']:.0f}"
    figure = plotting.new_figure(max(5.0, 1.2 + 0.75 * len(groups) * (len(methods) + 0.6)), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for number, name in enumerate(methods):
        places = [i - 0.4 + width * (number + 0.5) for i in range(len(groups))]
        entries = [records[name] for records in groups.values()]
        bars = axes.bar(places, [entry["speedup"] or 0 for entry in entries], width * 0.92, label=name)
        labels = ["refused" if entry["refused"] else said(entry) for entry in entries]
        axes.bar_label(bars, labels, padding=2, fontsize=8)
    axes.axhline(1.0, color="0.3", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(groups)), [task.replace("_", "\n") for task in groups])
    axes.set_ylabel(f"tokens/s, relative to {'one column a pass' if denoising else 'plain decoding'}")
    axes.margins(y=0.15)
    where = f"{document['target']}, {dtypes(document)}, {document['machine']['device_kind']}"
    axes.set_title(f"{where}\nabove the bars: {above}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=min(len(methods), 4), frameon=False)
    plotting.hide_top_right_spines(axes)
    return plotting.to_png(figure)
