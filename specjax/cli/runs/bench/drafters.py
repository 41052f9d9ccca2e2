"""The run of `specjax bench` for autoregressive models: drafters and plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.bench import measure, near_ties, records
from specjax.catalog import METHODS
from specjax.cli.options.drafter_flags import MethodOptions
from specjax.cli.options.prompts import Encoded
from specjax.cli.runs.bench.comparison import BenchOptions, BenchRun
from specjax.cli.runs.bench.group import PLAIN, Group
from specjax.cli.runs.decoding import Decoding, without_draft
from specjax.cli.runs.environment import peak_memory_bytes
from specjax.cli.runs.loops.checks import LOOP_DRAWS, LOOP_WIDTH, loop_settings, only_loops
from specjax.cli.runs.session import Session
from specjax.types import Drafter

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class DrafterComparison(BenchRun):
    """Drafters, methods with loops of their own, and plain decoding."""

    def __init__(
        self, session: Session, decoding: Decoding, methods: Sequence[str], flags: MethodOptions,
        rows: Sequence[Encoded], options: BenchOptions, explicit: Mapping[str, Any] = NO_SETTINGS,
    ):  # fmt: skip
        """Create the run. explicit: the settings that flags set, for loops, which have their own defaults."""
        super().__init__(session, decoding, methods, rows, options)
        loops = only_loops(methods)
        self.loops = {name: session.loop(name, flags, loop_settings(METHODS[name], explicit)) for name in loops}
        self.drafters: dict[str, Drafter] = {PLAIN: session.drafter("autoregressive")}
        self.drafters |= {name: session.drafter(name, flags) for name in methods if name not in loops}
        self.settings = {name: session.settings(decoding, name) for name in methods}
        self.settings[PLAIN] = without_draft(session.settings(decoding, "autoregressive"))
        self.plain, self.programs = dict.fromkeys(methods, PLAIN), [PLAIN, *methods]

    def decode(self, program: str, group: Group) -> records.MeasuredRun:
        """Decode a group with a method, or plainly."""
        if program in self.loops:
            keys = measure.row_keys(self.decoding.seed, [row.ordinal for row in group.rows])
            return measure.run_loop(self.loops[program], group.ids, keys, self.decoding.max_new_tokens)
        settings = self.settings[program]
        return measure.run_decode(self.task(self.session.target, self.drafters[program], group.rows, settings))

    def must_equal(self, name: str) -> bool | None:
        """Return True if the text must equal that of plain decoding, False if it may differ (lossy).

        None: the method keeps the distribution, or is greedy and plain decoding is not. So a comparison of texts is
        meaningless.
        """
        if name in self.loops and "key" not in METHODS[name].settings and not self.decoding.settings.is_greedy:
            return None
        draws = LOOP_DRAWS if name in self.loops else self.drafters[name].traits.draws
        if self.decoding.is_comparable(name, draws):
            return True
        return False if self.decoding.guarantee(name) == "lossy" else None

    def find_differences(self, group: Group, method: str) -> Iterator[dict]:
        """Yield the differences from plain decoding, if a comparison is meaningful."""
        if self.must_equal(method) is None:
            return
        target, batch = self.session.target, len(group.rows)
        widths = (LOOP_WIDTH,) if method in self.loops else self.drafters[method].pass_widths(batch, target)
        for row, text, plain in zip(group.rows, group.runs[method].tokens, group.runs[PLAIN].tokens, strict=True):
            origin = self.origin_of(row, self.settings[PLAIN], widths, batch)
            difference = near_ties.find_difference(target, row.ids, text, plain, origin)
            if difference is not None:
                position = {"method": method, "task": group.task, "line": row.prompt.line}
                yield near_ties.difference_record(
                    difference, self.session.tokenizer, **position, question_id=row.prompt.question_id
                )

    def record_of(self, method: str, task: str | None = None) -> dict[str, Any]:
        """Return the JSON record of a method on a finished task; None: on all tasks."""
        runs, must_equal = self.runs_of(method, task), self.must_equal(method)
        refused = must_equal is True and not all(entry["near_tie"] for entry in runs.differences)
        record = records.record(
            method,
            self.decoding.guarantee(method),
            runs.run,
            runs.plain,
            identical=None if must_equal is None else not runs.differences,
            refused=refused,
            compile_seconds=runs.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        return record | {"median_speedup": None if refused else runs.median_speedup, "refused": refused}
