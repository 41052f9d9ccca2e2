"""`specjax generate` of diffusion models: a method beside one column a pass, text as it becomes final, the canvas."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.live import Live
from rich.table import Table
from rich.text import Text

from specjax.bench import measure
from specjax.catalog import METHODS
from specjax.cli.options.common import Settings
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console, visible
from specjax.cli.output.progress import Pace
from specjax.cli.output.text import TextStream
from specjax.cli.runs.generation import heading
from specjax.cli.runs.session import Session, peak_memory_bytes, stage
from specjax.diffusion import Denoiser, Procedure
from specjax.diffusion.frames import Frame, frames
from specjax.diffusion.prepare import prepare
from specjax.engine.prepare import Settings as EngineSettings
from specjax.engine.value_checks import explain
from specjax.errors import UsageError

OPEN, NEW = Text("▁", style="dim"), "bold green"


class Row(NamedTuple):
    """What became of a prompt."""

    tokens: list[int]
    order: list[int]  # the pass that decided each, from 0
    hit_eos: bool
    passes: int
    columns: int  # computed


class Totals(NamedTuple):
    """Of all prompts."""

    rows: list[Row]
    seconds: float
    first: list[float]  # seconds to the first final token, per batch

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_pass(self) -> float:
        return self.tokens / max(sum(row.passes for row in self.rows), 1)

    @property
    def columns_per_token(self) -> float:
        return sum(row.columns for row in self.rows) / max(self.tokens, 1)


class Denoisings:
    """One method over some prompts, and one column a pass beside it if asked for."""

    def __init__(
        self, session: Session, denoiser: Denoiser, settings: Settings, method: str, options: Mapping[str, Any],
        rows: list[Encoded], batch_size: int, compare: bool, show: str,
    ):  # fmt: skip
        self.session, self.denoiser, self.settings, self.batch_size = session, denoiser, settings, batch_size
        self.method, self.options, self.rows, self.show = METHODS[method], options, rows, show
        self.procedure: Procedure = self.method.make(denoiser, **options)
        self.plain = one_a_pass(denoiser, options) if compare else None
        self.groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        self.done, self.plain_done = Totals([], 0.0, []), Totals([], 0.0, [])
        self.texts: list[TextStream] = []
        self.compile_seconds = 0.0

    def compile(self, log: Console) -> None:
        """Compile every program that `run` needs."""
        shapes = {measure.bucket([row.ids for row in group]): group for group in self.groups}
        with stage(log, "compiling", f"compiled {self.method.name}{' and one column a pass' if self.plain else ''}"):
            begin = time.perf_counter()
            for group, procedure in itertools.product(shapes.values(), (self.procedure, self.plain)):
                if procedure is not None:
                    for _ in itertools.islice(frames(self._job(procedure, group)), 2):
                        pass
            self.compile_seconds = time.perf_counter() - begin

    def run(self, log: Console, out: Console) -> None:
        """Decode everything, printing text to `out`."""
        pace = Pace(log, len(self.rows), shown=not out.quiet)
        for group in self.groups:
            self._show(group, out)
            pace.tell(len(self.texts))
        if self.plain is not None:
            with stage(log, "decoding one column a pass", "decoded one column a pass"):
                for group in self.groups:
                    self.plain_done = self._decoded(self.plain_done, self.plain, group)

    def _job(self, procedure: Procedure, group: Sequence[Encoded]):
        own, eos = self.settings, self.session.tokenizer.eos
        settings = EngineSettings(own.temperature, own.top_k, own.top_p, eos, min_p=own.min_p)
        keys = measure.row_keys(own.seed, [row.ordinal for row in group])
        rows = measure.pack([row.ids for row in group])
        return prepare(self.denoiser, procedure, rows, settings, key=keys, max_new_tokens=own.max_new_tokens)

    def _decoded(
        self, before: Totals, procedure: Procedure, group: Sequence[Encoded],
        on_frame: Callable[[Frame], None] = lambda frame: None,
    ) -> Totals:  # fmt: skip
        start, first, last = time.perf_counter(), None, None
        for last in frames(self._job(procedure, group)):
            if not last.finite.all():
                raise UsageError(f"--target: {explain(self.denoiser.target)}")
            if first is None and (last.length > last.start).any():
                first = time.perf_counter() - start
            on_frame(last)
        assert last is not None
        rows = [
            Row(last.final(i), last.order(i), bool(last.hit_eos[i]), int(last.passes[i]), int(last.columns[i]))
            for i in range(len(group))
        ]
        seconds = before.seconds + time.perf_counter() - start
        return Totals(before.rows + rows, seconds, before.first + ([] if first is None else [first]))

    def _show(self, group: Sequence[Encoded], out: Console) -> None:
        tokenizer = self.session.tokenizer
        streams, told = [TextStream(tokenizer, tokenizer.eos) for _ in group], [0] * len(group)
        draws = self.show == "order" and out.is_terminal and not out.quiet
        live = len(group) == 1 and not draws

        def on_frame(frame: Frame) -> None:
            for i, stream in enumerate(streams):
                final = frame.final(i)
                for token in final[told[i] :]:
                    new = stream.push(token, False)
                    if live:
                        out.print(new, end="", soft_wrap=True)
                told[i] = len(final)
            if draws:
                screen.update(Text("\n").join(canvas(frame, i, tokenizer) for i in range(len(group))), refresh=True)

        if live:
            heading(group[0], out)
        screen = Live(console=out, auto_refresh=False, transient=True)
        with screen if draws else contextlib.nullcontext():
            self.done = self._decoded(self.done, self.procedure, group, on_frame)
        for row, stream, done in zip(group, streams, self.done.rows[-len(group) :], strict=True):
            rest = stream.flush()
            if live:
                out.print(rest, soft_wrap=True)
            else:
                heading(row, out)
                out.print(stream.text, soft_wrap=True)
            if self.show == "order" and not draws:
                for line in order_lines(done, tokenizer):
                    out.print(line, style="dim", soft_wrap=True)
        self.texts += streams

    @property
    def left(self) -> int:
        """Prompts that are not done."""
        return len(self.rows) - len(self.texts)

    @property
    def identical(self) -> bool | None:
        """Whether the text is that of one column a pass; None: not compared."""
        if self.plain is None or len(self.plain_done.rows) < len(self.rows):
            return None
        return [row.tokens for row in self.done.rows] == [row.tokens for row in self.plain_done.rows]

    def record(self) -> dict[str, Any]:
        """The JSON record over all prompts that are done."""
        done, plain = self.done, self.plain_done if self.identical is not None else None
        return {
            "method": self.method.name,
            "guarantee": self.method.guarantee,
            "options": dict(self.options),
            "prompts": len(done.rows),
            "tokens": done.tokens,
            "seconds": done.seconds,
            "tokens_per_second": done.per_second,
            "target_passes": sum(row.passes for row in done.rows),
            "tokens_per_pass": done.per_pass,
            "columns_per_token": done.columns_per_token,
            "baseline_tokens_per_second": plain and plain.per_second,
            "baseline_tokens_per_pass": plain and plain.per_pass,
            "baseline_columns_per_token": plain and plain.columns_per_token,
            "speedup": plain and done.per_second / plain.per_second,
            "identical": self.identical,
            "time_to_first_token": statistics.median(done.first) if done.first else None,
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def results(self) -> list[dict[str, Any]]:
        """Per prompt that is done."""
        return [
            {
                "line": row.prompt.line,
                "question_id": row.prompt.question_id,
                "text": text.plain,
                "token_ids": done.tokens,
                "decided_at": done.order,
                "finish_reason": "eos" if done.hit_eos else "length",
                "prompt_tokens": len(row.ids),
                "tokens": len(done.tokens),
                "target_passes": done.passes,
                "tokens_per_pass": len(done.tokens) / max(done.passes, 1),
                "columns_per_token": done.columns / max(len(done.tokens), 1),
            }
            for row, text, done in zip(self.rows[: len(self.texts)], self.texts, self.done.rows, strict=True)
        ]


def one_a_pass(denoiser: Denoiser, options: Mapping[str, Any]) -> Procedure:
    """The reference: the surest column of each pass, in the same blocks."""
    if denoiser.is_causal:
        return METHODS["sdar"].make(denoiser, remasking="static")
    return METHODS["llada"].make(denoiser, **{name: x for name, x in options.items() if name == "block"})


def canvas(frame: Frame, row: int, tokenizer) -> Text:
    """The columns behind the prompt as they are: what is open, and what the last pass decided."""
    first, end = int(frame.start[row]), int(frame.stop[row])
    newest = int(frame.passes[row]) - 1
    parts = []
    for column in range(first, end):
        if frame.open[row, column]:
            parts.append(OPEN)
        else:
            piece = visible(tokenizer.decode([int(frame.tokens[row, column])]))
            parts.append(Text(piece, style=NEW if frame.decided_at[row, column] == newest else ""))
    return Text().join(parts)


def order_lines(row: Row, tokenizer) -> list[str]:
    """Of each pass, what it decided."""
    lines = []
    for number in sorted(set(row.order)):
        found = [f"{i} {tokenizer.decode([row.tokens[i]])!r}" for i, at in enumerate(row.order) if at == number]
        lines.append(f"pass {number + 1}: {', '.join(found)}")
    return lines


def show(run: Denoisings, out: Console) -> None:
    """The table and, after a comparison, the verdict in words."""
    record = run.record()
    memory, first = record["peak_memory_bytes"], record["time_to_first_token"]
    lines = {
        "method": f"{record['method']} (guarantee: {record['guarantee']})",
        "tokens": f"{record['tokens']} in {record['seconds']:.2f} s",
        "tokens/s": f"{record['tokens_per_second']:.1f}",
        "tokens per pass": f"{record['tokens_per_pass']:.2f}",
        "columns computed per token": f"{record['columns_per_token']:.1f}",
        "passes": str(record["target_passes"]),
        "time to first final token": "-" if first is None else f"{first:.3f} s",
        "compilation": f"{record['compile_seconds']:.1f} s",
        "peak memory": f"{memory / 2**20:.0f} MiB" if memory else "unknown",
    }
    if run.identical is not None:
        lines["one column a pass"] = (
            f"{record['baseline_tokens_per_second']:.1f} tokens/s, {record['baseline_tokens_per_pass']:.2f} tokens per "
            f"pass, {record['baseline_columns_per_token']:.1f} columns per token"
        )
        lines["speed ratio"] = f"{record['speedup']:.2f}"
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, value)
    out.print(table)
    if run.identical is not None:
        said = "identical to" if run.identical else "differ from"
        out.print(f"outputs: {said} one column a pass", soft_wrap=True)
