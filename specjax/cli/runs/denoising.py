"""The run of `specjax generate` for diffusion models: it prints final text, or the canvas while it fills."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import typer
from rich.live import Live
from rich.text import Text

from specjax.bench import measure, near_ties
from specjax.catalog import METHODS
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console, visible
from specjax.cli.output.text import TextStream
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import peak_memory_bytes, stage
from specjax.cli.runs.run import PromptRun, Report, describe_memory, print_heading
from specjax.cli.runs.session import Session
from specjax.diffusion import Denoiser, Procedure
from specjax.diffusion.frames import Frame, frames
from specjax.diffusion.procedures import reference_of
from specjax.engine.value_checks import explain_failure
from specjax.errors import UsageError
from specjax.persistence.fingerprint import digest_weights

OPEN, NEW = Text("▁", style="dim"), "bold green"


class DenoisedText(NamedTuple):
    """A finished text."""

    tokens: list[int]
    order: list[int]  # the pass that decided each token, from 0
    hit_eos: bool
    passes: int
    columns: int  # columns of its canvas in all passes
    computed: int  # columns that the program computed for it, padding included


class DenoisedTotals(NamedTuple):
    """Sums over finished texts."""

    rows: list[DenoisedText]
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

    @property
    def computed_per_token(self) -> float:
        return sum(row.computed for row in self.rows) / max(self.tokens, 1)


class Denoising(PromptRun):
    """A method over some prompts and, with --compare, the procedure that it speeds up after it."""

    def __init__(
        self, session: Session, denoiser: Denoiser, decoding: Decoding, method: tuple[str, Mapping[str, Any]],
        rows: Sequence[Encoded], batch_size: int, *, compare: bool = False, show: str = "text",
    ):  # fmt: skip
        """Create the run.

        method: its name and options. show: "text", or "order" for the canvas.
        """
        super().__init__(session, decoding, rows, batch_size)
        name, options = method
        self.denoiser, self.method, self.options, self.show = denoiser, METHODS[name], options, show
        self.settings = session.settings(decoding, name)
        self.procedure: Procedure = self.method.make(denoiser, **options)
        is_greedy = self.settings.is_greedy
        self.plain = (
            reference_of(self.method, denoiser, self.procedure, options, is_greedy=is_greedy) if compare else None
        )
        self.totals, self.plain_totals = DenoisedTotals([], 0.0, []), DenoisedTotals([], 0.0, [])
        self.texts: list[TextStream] = []
        self.compile_seconds = 0.0

    def compile(self, log: Console) -> None:
        """Compile every program that `run` needs."""
        shapes = {measure.bucket([row.ids for row in batch]): batch for batch in self.batches}
        programs = [(self.denoiser, self.procedure)]
        if self.plain is not None:
            programs.append((self.plain.denoiser, self.plain.procedure))
        with stage(log, "compiling", f"compiled {self.method.name}{f' and {self.plain.name}' if self.plain else ''}"):
            start = time.perf_counter()
            for batch, (denoiser, procedure) in itertools.product(shapes.values(), programs):
                for _ in itertools.islice(self._frames(denoiser, procedure, batch), 2):
                    pass
            self.compile_seconds = time.perf_counter() - start

    def run_batch(self, number: int, report: Report) -> None:
        """Decode a batch; print its final text or, with --show order, the canvas of each pass."""
        batch, out, tokenizer = self.batches[number], report.out, self.session.tokenizer
        streams, printed = [TextStream(tokenizer, tokenizer.eos) for _ in batch], [0] * len(batch)
        draws = self.show == "order" and out.is_terminal and not out.quiet
        is_live = len(batch) == 1 and not draws

        def on_frame(frame: Frame) -> None:
            for i, stream in enumerate(streams):
                final = frame.final(i)
                for token in final[printed[i] :]:
                    new = stream.push(token, False)
                    if is_live:
                        out.print(new, end="", soft_wrap=True)
                printed[i] = len(final)
            if draws:
                screen.update(Text("\n").join(canvas(frame, i, tokenizer) for i in range(len(batch))), refresh=True)

        if is_live:
            print_heading(batch[0], out)
        screen = Live(console=out, auto_refresh=False, transient=True)
        with screen if draws else contextlib.nullcontext():
            self.totals = self._decode(self.totals, self.denoiser, self.procedure, batch, on_frame)
        for row, stream, text in zip(batch, streams, self.totals.rows[-len(batch) :], strict=True):
            end = stream.flush()
            if is_live:
                out.print(end, soft_wrap=True)
            else:
                print_heading(row, out)
                out.print(stream.text, soft_wrap=True)
            if self.show == "order" and not draws:
                for line in order_lines(text, tokenizer):
                    out.print(line, style="dim", soft_wrap=True)
        self.texts += streams

    def finish(self, report: Report) -> None:
        """Decode all prompts with the procedure that the method is compared with."""
        if self.plain is None:
            return
        with stage(report.log, f"decoding {self.plain.name}", f"decoded {self.plain.name}"):
            for batch in self.batches:
                self.plain_totals = self._decode(self.plain_totals, self.plain.denoiser, self.plain.procedure, batch)

    def _frames(self, denoiser: Denoiser, procedure: Procedure, batch: Sequence[Encoded]):
        return frames(self.task(denoiser, procedure, batch, self.settings).job())

    def _decode(
        self, totals: DenoisedTotals, denoiser: Denoiser, procedure: Procedure, batch: Sequence[Encoded],
        on_frame: Callable[[Frame], None] = lambda frame: None,
    ) -> DenoisedTotals:  # fmt: skip
        """Decode a batch, and return the sums with its texts."""
        start, first, last = time.perf_counter(), None, None
        for last in self._frames(denoiser, procedure, batch):
            if not last.finite.all():
                raise UsageError(f"--target: {explain_failure(self.denoiser.target)}")
            if first is None and (last.length > last.start).any():
                first = time.perf_counter() - start
            on_frame(last)
        assert last is not None
        rows = [
            DenoisedText(
                last.final(i), last.order(i), bool(last.hit_eos[i]), int(last.passes[i]), int(last.columns[i]),
                int(last.computed[i]),
            )
            for i in range(len(batch))
        ]  # fmt: skip
        seconds = totals.seconds + time.perf_counter() - start
        return DenoisedTotals(totals.rows + rows, seconds, totals.first + ([] if first is None else [first]))

    @property
    def is_compared(self) -> bool:
        """True if the reference has decoded all prompts."""
        return self.plain is not None and len(self.plain_totals.rows) == len(self.rows)

    @property
    def identical(self) -> bool | None:
        """Return True if the texts equal those of the reference; None: not compared, or equal in distribution only."""
        if self.plain is None or not self.is_compared:
            return None
        if self.method.guarantee == "distribution" and not self.plain.is_promised:
            return None
        return [row.tokens for row in self.totals.rows] == [row.tokens for row in self.plain_totals.rows]

    @property
    def is_refused(self) -> bool:
        """Return True if texts differ that must be equal, by more than rounding."""
        is_promised = self.plain is not None and self.plain.is_promised
        return is_promised and self.identical is False and near_ties.are_excluded(self.denoiser.target)

    def report(self, report: Report) -> None:
        """Print the JSON document, or the table and the verdict.

        Raises: typer.Exit(1) if texts differ that must be equal.
        """
        super().report(report)
        if self.is_refused and not report.bad:
            raise typer.Exit(1)

    def record(self) -> dict[str, Any]:
        """Return the totals over all finished prompts as JSON."""
        totals, plain = self.totals, self.plain_totals if self.is_compared else None
        return {
            "method": self.method.name,
            "guarantee": self.method.guarantee,
            "options": {name: _plain(value) for name, value in self.options.items()},
            "prompts": len(totals.rows),
            "tokens": totals.tokens,
            "seconds": totals.seconds,
            "tokens_per_second": totals.per_second,
            "target_passes": sum(row.passes for row in totals.rows),
            "tokens_per_pass": totals.per_pass,
            "columns_per_token": totals.columns_per_token,
            "computed_per_token": totals.computed_per_token,
            "baseline": plain and self.plain and self.plain.name,
            "baseline_tokens_per_second": plain and plain.per_second,
            "baseline_tokens_per_pass": plain and plain.per_pass,
            "baseline_columns_per_token": plain and plain.columns_per_token,
            "baseline_computed_per_token": plain and plain.computed_per_token,
            "speedup": None if plain is None or self.is_refused else totals.per_second / plain.per_second,
            "identical": self.identical,
            "time_to_first_token": statistics.median(totals.first) if totals.first else None,
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def results(self) -> list[dict[str, Any]]:
        """Return the results per finished prompt as JSON."""
        return [
            {
                "line": row.prompt.line,
                "question_id": row.prompt.question_id,
                "text": stream.plain,
                "token_ids": text.tokens,
                "decided_at": text.order,
                "finish_reason": "eos" if text.hit_eos else "length",
                "prompt_tokens": len(row.ids),
                "tokens": len(text.tokens),
                "target_passes": text.passes,
                "tokens_per_pass": len(text.tokens) / max(text.passes, 1),
                "columns_per_token": text.columns / max(len(text.tokens), 1),
                "computed_per_token": text.computed / max(len(text.tokens), 1),
            }
            for row, stream, text in zip(self.rows[: len(self.texts)], self.texts, self.totals.rows, strict=True)
        ]

    def table(self) -> dict[str, str]:
        """Return the totals as lines of a table."""
        record = self.record()
        first = record["time_to_first_token"]
        lines = {
            "method": f"{record['method']} (guarantee: {record['guarantee']})",
            "tokens": f"{record['tokens']} in {record['seconds']:.2f} s",
            "tokens/s": f"{record['tokens_per_second']:.1f}",
            "tokens per pass": f"{record['tokens_per_pass']:.2f}",
            "canvas columns per token": f"{record['columns_per_token']:.1f}",
            "columns computed per token": f"{record['computed_per_token']:.1f}, padding included",
            "passes": str(record["target_passes"]),
            "time to first final token": "-" if first is None else f"{first:.3f} s",
            "compilation": f"{record['compile_seconds']:.1f} s",
            "peak memory": describe_memory(record["peak_memory_bytes"]),
        }
        if self.plain is not None and self.is_compared:
            lines[self.plain.name] = (
                f"{record['baseline_tokens_per_second']:.1f} tokens/s, {record['baseline_tokens_per_pass']:.2f} tokens "
                f"per pass, {record['baseline_computed_per_token']:.1f} columns computed per token"
            )
            lines["speed ratio"] = "refused" if self.is_refused else f"{record['speedup']:.2f}"
        return lines

    def verdict(self) -> list[str]:
        """Return the result of the comparison in words."""
        if self.plain is None or not self.is_compared:
            return []
        name, guarantee = self.plain.name, self.method.guarantee
        if self.identical is None:
            return [
                f"outputs: not compared; sampled texts have the distribution of {name}, and another text for each seed"
            ]
        if self.identical:
            return [f"outputs: identical to {name}"]
        if not self.plain.is_promised:
            return [f"outputs: differ from {name}" + ("; this method is lossy" if guarantee == "lossy" else "")]
        return self._broken_promise()

    def _broken_promise(self) -> list[str]:
        """Return a line for the first difference of each text that should be equal."""
        assert self.plain is not None
        lines = []
        reason = "rounding may decide near-ties, less often in float32"
        if self.is_refused:
            reason = "the method promises equal texts, and rounding is no reason in float32"
        for row, text, other in zip(self.rows, self.totals.rows, self.plain_totals.rows, strict=True):
            position = near_ties.first_difference(text.tokens, other.tokens)
            if position is not None:
                where = f"line {row.prompt.line}: " if row.prompt.line else ""
                pieces = [self.session.tokenizer.decode(x.tokens[position : position + 1]) for x in (text, other)]
                lines.append(
                    f"outputs differ: {where}first at new token {position}: {pieces[0]!r} instead of {pieces[1]!r} of "
                    f"{self.plain.name}; {reason}"
                )
        return lines


def canvas(frame: Frame, row: int, tokenizer: Any) -> Text:
    """Return the columns after the prompt: open ones, decided ones, and those that the last pass decided."""
    start, end = int(frame.start[row]), int(frame.stop[row])
    newest = int(frame.passes[row]) - 1
    parts = []
    for column in range(start, end):
        if frame.open[row, column]:
            parts.append(OPEN)
        else:
            piece = visible(tokenizer.decode([int(frame.tokens[row, column])]))
            parts.append(Text(piece, style=NEW if frame.decided_at[row, column] == newest else ""))
    return Text().join(parts)


def order_lines(text: DenoisedText, tokenizer: Any) -> list[str]:
    """Return a line per pass with the tokens that it decided."""
    lines = []
    for number in sorted(set(text.order)):
        decided = [f"{i} {tokenizer.decode([text.tokens[i]])!r}" for i, at in enumerate(text.order) if at == number]
        lines.append(f"pass {number + 1}: {', '.join(decided)}")
    return lines


def _plain(value: Any) -> Any:
    """Return the value of an option as JSON; arrays of a file by their digest."""
    has_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
    return digest_weights(value) if has_arrays else value
