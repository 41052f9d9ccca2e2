"""The protocol of a run: prompts that a command decodes in batches, and the report of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from specjax.bench.measure import DecodeTask, row_keys
from specjax.bench.near_ties import TextOrigin
from specjax.cli.options.prompts import BadLine, Encoded, describe
from specjax.cli.output.console import Console, print_json
from specjax.cli.output.progress import ProgressLines
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.session import Session, provenance
from specjax.diffusion import Denoiser, Procedure
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.models import images, sources
from specjax.types import Drafter, PyTree, Target


class Report(NamedTuple):
    """The consoles and the form of a run's results."""

    log: Console
    out: Console
    as_json: bool = False
    is_first: bool = True  # False on hosts that print nothing
    bad: Sequence[BadLine] = ()
    path: Path | None = None  # the file of the prompts


def inputs_of(target: Target | Denoiser, batch: Sequence[Encoded]) -> PyTree:
    """Return the inputs of the target for the sources or the images of a batch; None for prompts without either."""
    texts = [row.source for row in batch if row.source is not None]
    if texts:
        return sources(texts)
    if not isinstance(target, Target) or all(row.tiles is None for row in batch):
        return None
    return images(target, [row.ids for row in batch], [row.tiles for row in batch])


class PromptRun:
    """Prompts that are decoded batch by batch. `execute` calls `compile`, `run` and `report`.

    A subclass implements `run_batch`, `record` and `table`. It may implement `compile`, `finish` and `results`, too.
    """

    differences: Sequence[dict[str, Any]] = ()  # between texts that are compared

    def __init__(self, session: Session, decoding: Decoding, rows: Sequence[Encoded], batch_size: int = 1):
        self.session, self.decoding, self.rows, self.batch_size = session, decoding, list(rows), batch_size
        self.batches = [self.rows[i : i + batch_size] for i in range(0, len(self.rows), batch_size)]
        self.num_done = 0  # prompts

    def compile(self, log: Console) -> None:
        """Compile every program that the batches need."""

    def run_batch(self, number: int, report: Report) -> None:
        """Decode a batch and print its texts."""
        raise NotImplementedError

    def finish(self, report: Report) -> None:
        """Run the steps after the last batch, such as a comparison."""

    def record(self) -> dict[str, Any]:
        """Return the totals over all finished prompts as JSON."""
        raise NotImplementedError

    def results(self) -> list[dict[str, Any]]:
        """Return the results per finished prompt as JSON."""
        return []

    def table(self) -> Mapping[str, str]:
        """Return the totals as lines of a table."""
        raise NotImplementedError

    def verdict(self) -> Sequence[str]:
        """Return the result of a comparison in words."""
        return ()

    @property
    def failures(self) -> Sequence[BadLine]:
        """Return the finished prompts without a text, and the reason of each."""
        return ()

    @property
    def num_left(self) -> int:
        """Return the number of prompts that are not finished."""
        return len(self.rows) - self.num_done

    def task(
        self, target: Target | Denoiser, drafter: Drafter | Procedure, batch: Sequence[Encoded], settings: Settings
    ) -> DecodeTask:
        """Return a batch with its keys and settings."""
        keys = row_keys(self.decoding.seed, [row.ordinal for row in batch])
        rows = [row.ids for row in batch]
        inputs = inputs_of(self.session.target, batch)
        return DecodeTask(target, drafter, rows, keys, settings, self.decoding.max_new_tokens, inputs)

    def origin_of(self, row: Encoded, settings: Settings, widths: Sequence[int], batch: int) -> TextOrigin:
        """Return the decoding of a prompt's text in a batch, with passes of some widths."""
        key = None if settings.is_greedy else row_keys(self.decoding.seed, [row.ordinal])[0]
        inputs = inputs_of(self.session.target, [row])
        return TextOrigin(widths, batch, tuple(settings.processors), settings.to_sampling(), key, inputs)

    def run(self, report: Report) -> None:
        """Decode all batches."""
        progress = ProgressLines(report.log, len(self.rows), shown=not report.out.quiet)
        for number, batch in enumerate(self.batches):
            self.run_batch(number, report)
            self.num_done += len(batch)
            progress.update(self.num_done)
        self.finish(report)

    def document(self, bad: Sequence[BadLine]) -> dict[str, Any]:
        """Return the JSON document of all finished prompts."""
        return {
            **self.record(),
            **provenance(self.session),
            "settings": self.decoding.record() | {"batch_size": self.batch_size},
            "results": self.results(),
            "differences": list(self.differences),
            "left": self.num_left,
            "errors": [entry._asdict() for entry in join_bad(bad, self.failures)],
        }

    def report(self, report: Report) -> None:
        """Print the JSON document, or the table and the verdict."""
        if not report.is_first:
            return
        if report.as_json:
            print_json(self.document(report.bad))
            return
        print_table(self.table(), report.out)
        for line in self.verdict():
            report.out.print(line, soft_wrap=True)

    def save_partial(self, report: Report) -> str | None:
        """Save the results of a run that ends early; return the place that has them, or None."""
        if not (report.as_json and report.is_first and self.num_done):
            return None
        print_json(self.document(report.bad))
        return "stdout"


def execute(run: PromptRun, report: Report) -> None:
    """Compile, run and report. A run that ends early reports the prompts that are finished.

    Raises: KeyboardInterrupt with the place of the finished results, and UsageError about bad lines.
    """
    run.compile(report.log)
    try:
        run.run(report)
    except BaseException as error:
        place = run.save_partial(report)
        if place is not None and isinstance(error, KeyboardInterrupt):
            message = f"{place} has the {run.num_done} of {len(run.rows)} prompts that are finished"
            raise KeyboardInterrupt(message) from None
        raise
    run.report(report)
    bad = join_bad(report.bad, run.failures)
    if bad:
        raise UsageError(describe(bad, report.path))


def join_bad(bad: Sequence[BadLine], failures: Sequence[BadLine]) -> list[BadLine]:
    """Return the bad lines and the prompts that failed, by line."""
    return sorted([*bad, *failures], key=lambda entry: entry.line or 0)


def print_table(lines: Mapping[str, str], out: Console) -> None:
    """Print a table of two columns."""
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, value)
    out.print(table)


def print_heading(row: Encoded, out: Console) -> None:
    """Print the line number of a prompt from a file."""
    if row.prompt.line is not None:
        out.rule(f"line {row.prompt.line}", align="left", style="dim")


def describe_memory(peak: int | None) -> str:
    """Return a peak memory in words."""
    return f"{peak / 2**20:.0f} MiB" if peak else "unknown"
