"""The runs behind `specjax bench`: every prompt plainly and with each method, in turn, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specjax.bench import measure, near_ties
from specjax.bench import records as report
from specjax.cli.options.common import Settings
from specjax.cli.options.drafter_flags import Drafting
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.output.progress import Pace
from specjax.cli.runs.session import Session, peak_memory_bytes
from specjax.types import Drafter

PLAIN = "plain decoding"


@dataclass
class Group:
    """Prompts of one task that are decoded together, and what came out."""

    task: str
    rows: list[Encoded]
    runs: dict[str, report.Run] = field(default_factory=dict)  # by program: a method, or what is beside it
    differences: dict[str, list[dict]] = field(default_factory=dict)  # by method

    @property
    def ids(self) -> list[list[int]]:
        return [row.ids for row in self.rows]


class Runs:
    """Programs over all prompts in turn, each beside what it is compared with: what all kinds of methods share."""

    plain: dict[str, str]  # by method, the program that it is compared with

    def __init__(
        self, session: Session, settings: Settings, methods: list[str], programs: Iterable[str], rows: list[Encoded],
        batch_size: int, repeats: int,
    ):  # fmt: skip
        self.session, self.settings, self.methods, self.programs = session, settings, methods, list(programs)
        self.batch_size, self.repeats = batch_size, repeats
        # Parts of a program are made ready when they are first entered: 0.4 s per width of a pass, which a median of
        # three passes over.
        self.untimed = 1 if repeats < 3 else 0
        self.groups = list(_groups(rows, batch_size))
        self.done: list[Group] = []
        self.compile_seconds: dict[tuple[str, tuple[int, int]], float] = {}  # by program and bucket

    def run(self, log: Console) -> Iterator[None]:
        """Compile, then time group after group; yields whenever one more is `done`.

        Shows a bar on `log`, or where that is no terminal says now and then how far it is.
        """
        first = {measure.bucket(group.ids): group for group in reversed(self.groups)}
        runs = self.untimed + self.repeats
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=log, disable=not log.is_terminal) as bar:
            compiling = bar.add_task("compiling", total=len(first) * len(self.programs))
            running = bar.add_task("decoding", total=len(self.groups) * runs * len(self.programs), start=False)
            pace = Pace(log, total := self.left, shown=log.is_terminal)
            whole: dict[tuple[str, tuple[int, int]], float] = {}  # seconds of a first call: compiling, and one run
            for shape, group in first.items():
                for name in self.programs:
                    whole[name, shape] = self.decode(name, group).seconds
                    bar.advance(compiling)
            bar.start_task(running)
            for number, group in enumerate(self.groups):
                self._run_group(group, number, lambda: bar.advance(running))
                shape = measure.bucket(group.ids)
                if first[shape] is group:
                    for name, run in group.runs.items():
                        self.compile_seconds[name, shape] = max(whole[name, shape] - run.seconds, 0.0)
                self.done.append(group)
                yield
                pace.tell(total - self.left)
        log.print(f"compiled in {sum(self.compile_seconds.values()):.1f} s", style="dim")

    def _run_group(self, group: Group, number: int, advance) -> None:
        names = self.programs
        times: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(self.untimed + self.repeats):
            turn = (number + repeat) % len(names)  # nobody is always first
            for name in names[turn:] + names[:turn]:
                group.runs[name] = self.decode(name, group)
                times[name].append(group.runs[name].seconds)
                advance()
        for name, seconds in times.items():
            group.runs[name] = group.runs[name]._replace(seconds=statistics.median(seconds[self.untimed :]))
        for name in self.methods:
            group.differences[name] = list(self.differences(group, name))

    def decode(self, program: str, group: Group) -> report.Run:
        """One timed run."""
        raise NotImplementedError

    def differences(self, group: Group, method: str) -> Iterable[dict]:
        """Where texts that should equal others do not."""
        return ()

    def record(self, method: str, task: str | None = None) -> dict:
        """The JSON record of a method on a task (None: on all), of what is done."""
        raise NotImplementedError

    @property
    def tasks(self) -> list[str]:
        """Of what is done, in the order of the file."""
        return list(dict.fromkeys(group.task for group in self.done))

    @property
    def left(self) -> int:
        """Prompts that are not done."""
        return sum(len(group.rows) for group in self.groups[len(self.done) :])

    def of_task(self, method: str, task: str | None) -> Selected:
        """What is done of a task."""
        groups = [group for group in self.done if task in (None, group.task)]
        plain = self.plain[method]
        shapes = {measure.bucket(group.ids) for group in groups}
        return Selected(
            groups,
            [entry for group in groups for entry in group.differences.get(method, ())],
            report.merge([group.runs[method] for group in groups]),
            report.merge([group.runs[plain] for group in groups]),
            sum(self.compile_seconds[method, shape] for shape in shapes),
            statistics.median(ratio(group, method, plain) for group in groups),
        )


class Selected(NamedTuple):
    """What is done of a task, by one method."""

    groups: list[Group]
    differences: list[dict]
    run: report.Run
    plain: report.Run
    compile_seconds: float
    median_speedup: float


class Bench(Runs):
    """Drafters against plain decoding."""

    def __init__(
        self, session: Session, settings: Settings, methods: list[str], drafting: Drafting, rows: list[Encoded],
        batch_size: int, repeats: int,
    ):  # fmt: skip
        self.drafters: dict[str, Drafter] = {PLAIN: session.drafter("autoregressive")}
        self.drafters |= {name: session.drafter(name, drafting) for name in methods}
        self.options = {name: session.keywords(settings, name) for name in methods}
        # It drafts nothing.
        self.options[PLAIN] = session.keywords(settings, "autoregressive") | {"verifier": None, "controller": None}
        self.plain = dict.fromkeys(methods, PLAIN)
        super().__init__(session, settings, methods, self.drafters, rows, batch_size, repeats)

    def decode(self, program: str, group: Group) -> report.Run:
        """As `specjax.decode`."""
        keys = measure.row_keys(self.settings.seed, [row.ordinal for row in group.rows])
        options = self.options[program]
        return measure.run_decode(self.session.target, self.drafters[program], group.ids, keys, options)

    def promise(self, name: str) -> bool | None:
        """True: the text must be plain decoding's. False: it may differ (lossy). None: equality means nothing here."""
        if self.settings.is_comparable(name, self.drafters[name].traits.draws):
            return True
        return False if self.settings.promise(name) == "lossy" else None

    def differences(self, group: Group, method: str) -> Iterable[dict]:
        """Those from plain decoding, where equality means something."""
        if self.promise(method) is None:
            return
        for row, ours, plain in zip(group.rows, group.runs[method].tokens, group.runs[PLAIN].tokens, strict=True):
            found = near_ties.difference(self.session.target, row.ids, ours, plain, self.session.coarsest)
            if found is not None:
                where = {"method": method, "task": group.task, "line": row.prompt.line}
                yield near_ties.difference_record(
                    found, self.session.tokenizer, **where, question_id=row.prompt.question_id
                )

    def record(self, method: str, task: str | None = None) -> dict:
        """The JSON record of a method on a task (None: on all), of what is done."""
        own = self.of_task(method, task)
        refused = self.promise(method) is True and not all(entry["near_tie"] for entry in own.differences)
        entry = report.record(
            method,
            self.settings.promise(method),
            own.run,
            own.plain,
            identical=None if self.promise(method) is None else not own.differences,
            refused=refused,
            compile_seconds=own.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        return entry | {"median_speedup": None if refused else own.median_speedup, "refused": refused}


def ratio(group: Group, method: str, plain: str) -> float:
    """Speed-up on one group."""
    return report.tokens_per_second(group.runs[method]) / report.tokens_per_second(group.runs[plain])


def _groups(rows: list[Encoded], batch_size: int) -> Iterable[Group]:
    for task in dict.fromkeys(row.prompt.task for row in rows):
        mine = [row for row in rows if row.prompt.task == task]
        for start in range(0, len(mine), batch_size):
            yield Group(task, mine[start : start + batch_size])
