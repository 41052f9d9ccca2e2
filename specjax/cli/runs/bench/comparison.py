"""The base of the runs of `specjax bench`: programs over all prompts in turn, timed in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specjax.bench import measure, records
from specjax.cli.options.prompts import BadLine, Encoded, describe
from specjax.cli.output import files
from specjax.cli.output.console import print_error, print_json
from specjax.cli.output.progress import ProgressLines
from specjax.cli.runs.bench import output
from specjax.cli.runs.bench.group import Group
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.run import PromptRun, Report
from specjax.cli.runs.session import Session, provenance


class TaskRuns(NamedTuple):
    """The finished runs of one method on a task."""

    groups: list[Group]
    differences: list[dict]
    run: records.MeasuredRun
    plain: records.MeasuredRun
    compile_seconds: float
    median_speedup: float


class BenchOptions(NamedTuple):
    """The flags of a bench besides methods and models."""

    out: Path
    batch_size: int = 1
    repeats: int = 3
    skipped: Sequence[BadLine] = ()  # prompts that do not fit the models


class BenchRun(PromptRun):
    """Programs over all prompts in turn, each with its baseline.

    A subclass sets `plain` and `programs`, and implements `decode` and `record_of`.
    """

    plain: dict[str, str]  # the baseline's program, by method
    programs: list[str]

    def __init__(
        self, session: Session, decoding: Decoding, methods: Sequence[str], rows: Sequence[Encoded],
        options: BenchOptions,
    ):  # fmt: skip
        super().__init__(session, decoding, rows, options.batch_size)
        self.methods, self.options = list(methods), options
        self.groups = list(_groups(self.rows, options.batch_size))
        # Parts of a program are prepared when they first run: 0.4 s per width of a pass. A median of three runs ignores
        # that; fewer repeats need a run without a clock.
        self.untimed = 1 if options.repeats < 3 else 0
        self.finished: list[Group] = []
        self.first_seconds: dict[tuple[str, tuple[int, int]], float] = {}  # seconds of a first call, by program, bucket
        self.compile_seconds: dict[tuple[str, tuple[int, int]], float] = {}

    def decode(self, program: str, group: Group) -> records.MeasuredRun:
        """Run a program once, with a clock."""
        raise NotImplementedError

    def find_differences(self, group: Group, method: str) -> Iterable[dict]:
        """Return the differences of texts that must be equal."""
        return ()

    def record_of(self, method: str, task: str | None = None) -> dict[str, Any]:
        """Return the JSON record of a method on a finished task; None: on all tasks."""
        raise NotImplementedError

    def run(self, report: Report) -> None:
        """Compile all programs, then time group after group. The JSON file is written after each group."""
        self._first = {measure.bucket(group.ids): group for group in reversed(self.groups)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        log, runs = report.log, self.untimed + self.options.repeats
        with Progress(*columns, TimeRemainingColumn(), console=log, disable=not log.is_terminal) as bar:
            compiling = bar.add_task("compiling", total=len(self._first) * len(self.programs))
            decoding = bar.add_task("decoding", total=len(self.groups) * runs * len(self.programs), start=False)
            lines = ProgressLines(log, len(self.rows), shown=log.is_terminal)
            for shape, group in self._first.items():
                for name in self.programs:
                    self.first_seconds[name, shape] = self.decode(name, group).call_seconds
                    bar.advance(compiling)
            bar.start_task(decoding)
            for number, group in enumerate(self.groups):
                self._run_group(group, number, lambda: bar.advance(decoding))
                self.finished.append(group)
                self.num_done += len(group.rows)
                files.write_json(self.options.out, self.document(report.bad))
                lines.update(self.num_done)
        log.print(f"compiled in {sum(self.compile_seconds.values()):.1f} s", style="dim")

    def _run_group(self, group: Group, number: int, advance: Callable[[], None]) -> None:
        """Time each program on a group; the programs take turns in the first position."""
        names = self.programs
        times: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(self.untimed + self.options.repeats):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                group.runs[name] = self.decode(name, group)
                times[name].append(group.runs[name].seconds)
                advance()
        shape = measure.bucket(group.ids)
        for name, seconds in times.items():
            run = group.runs[name] = group.runs[name]._replace(seconds=statistics.median(seconds[self.untimed :]))
            if self._first[shape] is group:
                self.compile_seconds[name, shape] = max(self.first_seconds[name, shape] - run.seconds, 0.0)
        for name in self.methods:
            group.differences[name] = list(self.find_differences(group, name))

    @property
    def tasks(self) -> list[str]:
        """Return the finished tasks in the order of the file."""
        return list(dict.fromkeys(group.task for group in self.finished))

    def runs_of(self, method: str, task: str | None) -> TaskRuns:
        """Return the finished runs of a method on a task; None: on all tasks."""
        groups = [group for group in self.finished if task in (None, group.task)]
        plain = self.plain[method]
        shapes = {measure.bucket(group.ids) for group in groups}
        return TaskRuns(
            groups,
            [entry for group in groups for entry in group.differences.get(method, ())],
            records.merge([group.runs[method] for group in groups]),
            records.merge([group.runs[plain] for group in groups]),
            sum(self.compile_seconds[method, shape] for shape in shapes),
            statistics.median(_speedup(group, method, plain) for group in groups),
        )

    def document(self, bad: Sequence[BadLine]) -> dict[str, Any]:
        """Return the JSON of all finished prompts: `overall` by method, `tasks` by task and method, then prompts."""
        settings = self.decoding.record() | {"batch_size": self.batch_size, "repeats": self.options.repeats}
        return {
            **provenance(self.session),
            "settings": settings,
            "overall": {name: self.record_of(name) for name in self.methods},
            "tasks": {task: {name: self.record_of(name, task) for name in self.methods} for task in self.tasks},
            "prompts": [output.describe_group(group) for group in self.finished],
            "differences": [x for group in self.finished for entries in group.differences.values() for x in entries],
            "left": self.num_left,
            "skipped": [entry._asdict() for entry in self.options.skipped],
            "errors": [entry._asdict() for entry in bad],
        }

    def report(self, report: Report) -> None:
        """Print the document or the table, write the plot, and list skipped prompts and differences.

        Raises: typer.Exit(1) if texts differ that must be equal.
        """
        document, out, log = self.document(report.bad), self.options.out, report.log
        picture = output.plot(document)
        files.write_atomically(out.with_suffix(".png"), lambda file: file.write(picture))
        if report.as_json:
            print_json(document)
        else:
            output.show(document, report.out)
            if self.session.formats is not None:
                report.out.print(f"plain: {self.session.baseline}", soft_wrap=True)
        log.print(f"wrote {out} and {out.with_suffix('.png')}", style="dim", soft_wrap=True)
        for entry in self.options.skipped:
            log.print(f"skipped: {describe([entry], report.path)}", soft_wrap=True)
        for entry in document["differences"]:
            log.print(output.describe_difference(entry), soft_wrap=True)
        refused = [name for name, entry in document["overall"].items() if entry["refused"]]
        if refused and not report.bad:
            print_error(f"no speed is reported for {', '.join(refused)}: outputs that must be equal differ")
            raise typer.Exit(1)

    def save_partial(self, report: Report) -> str | None:
        """Return the JSON file, which has all finished prompts."""
        return str(self.options.out) if self.num_done else None


def _speedup(group: Group, method: str, plain: str) -> float:
    return records.tokens_per_second(group.runs[method]) / records.tokens_per_second(group.runs[plain])


def _groups(rows: Sequence[Encoded], batch_size: int) -> Iterator[Group]:
    """Yield batches of prompts of one task."""
    for task in dict.fromkeys(row.prompt.task for row in rows):
        of_task = [row for row in rows if row.prompt.task == task]
        for start in range(0, len(of_task), batch_size):
            yield Group(task, of_task[start : start + batch_size])
