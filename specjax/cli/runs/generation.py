"""The run of `specjax generate` for autoregressive models: it streams texts, and compares them with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from specjax.bench import measure, near_ties
from specjax.bench import records as report_of
from specjax.catalog import METHODS
from specjax.cli.options.drafter_flags import MethodOptions
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.output.text import DRAFTED_STYLE, TextStream
from specjax.cli.runs.compression.prompts import CompressedPrompts
from specjax.cli.runs.decoding import Decoding, describe_uncompared, without_draft
from specjax.cli.runs.environment import peak_memory_bytes, stage
from specjax.cli.runs.run import PromptRun, Report, describe_memory, inputs_of, print_heading
from specjax.cli.runs.session import Session
from specjax.engine.run import canonical
from specjax.persistence import Checkpoints
from specjax.persistence.program_cache import ProgramCache
from specjax.types import Drafter, Draws, Processor


class GenerationOptions(NamedTuple):
    """The parts of a generation besides method and prompts."""

    compare: bool = False
    checkpoint: str | None = None
    checkpoint_every: int = 64
    stop: tuple[str, ...] = ()
    adapt: str | None = None
    processors: tuple[Processor, ...] = ()
    programs: ProgramCache | None = None
    compressed: CompressedPrompts | None = None
    cache: str | None = None  # the form of a compressed cache

    @property
    def lossy_part(self) -> tuple[str, str] | None:
        """Return the part that makes the text lossy under an exact method: its name in JSON, and words for it."""
        if self.adapt is not None:
            return "adapted_target", f"the target with {self.adapt}"
        if self.compressed is not None:
            return self.compressed.lossy_part
        if self.cache is not None:
            return "compressed_cache", f"the target with the cache {self.cache}"
        return None


class Generation(PromptRun):
    """A method over some prompts and, with --compare, plain decoding after it."""

    def __init__(
        self,
        session: Session,
        decoding: Decoding,
        method: str,
        options: MethodOptions,
        rows: Sequence[Encoded],
        batch_size: int,
        more: GenerationOptions,
    ):
        super().__init__(session, decoding, rows, batch_size)
        self.method, self.more = METHODS[method], more
        self.guarantee = decoding.guarantee(method)
        self.drafter = session.drafter(method, options)
        self.plain = session.drafter("autoregressive") if more.compare else None
        self.settings = session.settings(decoding, method, more.processors)
        # Each batch starts with the parameters that the previous batch learned. A run with checkpoints cannot do this,
        # because the checkpoint of a finished batch stores only its text.
        is_exported = self.drafter.hooks.export is not None
        self.carries_over = len(self.batches) > 1 and is_exported and more.checkpoint is None
        if self.carries_over:
            self.drafter = session.on_mesh(canonical(session.target, self.drafter))
        self.runs: list[report_of.MeasuredRun] = []
        self.plain_runs: list[report_of.MeasuredRun] = []
        self.compile_seconds, self.plain_compile_seconds = 0.0, 0.0
        self.texts: list[TextStream] = []
        self.differences: list[dict] = []

    def compile(self, log: Console) -> None:
        """Compile every program that `run` needs."""
        inputs_shape = lambda batch: jax.tree.map(jnp.shape, inputs_of(self.session.target, batch))
        shape_of = lambda batch: (measure.bucket([row.ids for row in batch]), inputs_shape(batch))
        shapes = {shape_of(batch): batch for batch in self.batches}
        with stage(log, "compiling", f"compiled {self.method.name}{' and plain decoding' if self.plain else ''}"):
            for batch in shapes.values():
                self.compile_seconds += measure.warm_stream(
                    self._task(batch), self.more.programs, measured=self.plain is not None
                )
                if self.plain is not None:
                    plain = self._plain_task(batch, self.plain)
                    self.plain_compile_seconds += measure.warm_stream(plain, self.more.programs)

    def run(self, report: Report) -> None:
        """Decode all batches, and print the texts as they grow."""
        if report.out.color_system and not report.out.quiet:
            report.log.print(Text.assemble(("drafted and accepted", DRAFTED_STYLE), ", plain: written by the target"))
        super().run(report)

    def run_batch(self, number: int, report: Report) -> None:
        """Decode a batch and print its texts; the text of a batch of one is printed while it grows."""
        batch, out = self.batches[number], report.out
        streams = self._text_streams(batch)
        is_live, export = len(batch) == 1, None

        def on_step(step):
            nonlocal export
            export = step.drafter
            if step.earlier is not None:
                count = sum(map(len, step.tokens))
                report.log.print(f"continuing after {count} tokens", style="dim")
            for row, stream in enumerate(streams):
                new = stream.push_step(step, row)
                if is_live:
                    out.print(new, end="", soft_wrap=True)
            return _have_stopped(streams)

        if is_live:
            print_heading(batch[0], out)
        run = measure.run_stream(
            self._task(batch), on_step, checkpoint=self._checkpoints(number), programs=self.more.programs
        )
        self.runs.append(cut(run, streams))
        for row, stream in zip(batch, streams, strict=True):
            end = stream.flush()
            if is_live:
                out.print(end, soft_wrap=True)
            else:
                print_heading(row, out)
                out.print(stream.text, soft_wrap=True)
        self.texts += streams
        if export is not None and self.carries_over:
            self.drafter = self.session.on_mesh(export())

    def finish(self, report: Report) -> None:
        """Run plain decoding, and compare the texts."""
        if self.plain is None:
            return
        columns = (TextColumn("plain decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=report.log, transient=True, disable=not report.log.is_terminal) as progress:
            for batch in progress.track(self.batches):
                self.plain_runs.append(self._run_plain(batch, self.plain))
        self._compare()

    def _checkpoints(self, number: int) -> Checkpoints | None:
        """Return the folder of a batch; that of a finished batch contains its text."""
        if self.more.checkpoint is None:
            return None
        return Checkpoints(f"{self.more.checkpoint.rstrip('/')}/batch-{number:05d}", self.more.checkpoint_every)

    def _run_plain(self, batch: Sequence[Encoded], plain: Drafter) -> report_of.MeasuredRun:
        """Decode a batch plainly, up to the same stop strings."""
        streams = self._text_streams(batch)

        def on_step(step):
            for row, stream in enumerate(streams):
                stream.push_step(step, row)
            return _have_stopped(streams)

        watch: Callable[[Any], bool | None] = on_step if self.more.stop else lambda step: None
        return cut(measure.run_stream(self._plain_task(batch, plain), watch, programs=self.more.programs), streams)

    def _text_streams(self, batch: Sequence[Encoded]) -> list[TextStream]:
        tokenizer = self.session.tokenizer
        return [TextStream(tokenizer, tokenizer.eos, self.more.stop) for _ in batch]

    def _task(self, batch: Sequence[Encoded]) -> measure.DecodeTask:
        return self.task(self.session.target, self.drafter, batch, self.settings)

    def _plain_task(self, batch: Sequence[Encoded], plain: Drafter) -> measure.DecodeTask:
        return self.task(self.session.target, plain, batch, without_draft(self.settings))

    @property
    def _is_compared(self) -> bool:
        """Return True if plain decoding has finished."""
        return self.plain is not None and len(self.plain_runs) == len(self.batches)

    @property
    def is_comparable(self) -> bool:
        """Return True if plain decoding must give the same text."""
        return self.decoding.is_comparable(self.method.name, self.draws)

    @property
    def draws(self) -> Draws:
        """Return the form of the method's drafts."""
        return self.drafter.traits.draws

    def widths(self, batch: int) -> Sequence[int]:
        """Return the tokens per row of the target passes over `batch` rows."""
        return self.drafter.pass_widths(batch, self.session.target)

    @property
    def identical(self) -> bool | None:
        """Return True if the texts equal those of plain decoding; None: not compared, or not promised by the method."""
        if not self._is_compared or not (self.is_comparable or self.guarantee == "lossy"):
            return None
        return report_of.merge(self.runs).tokens == report_of.merge(self.plain_runs).tokens

    def _compare(self) -> None:
        """Find the first difference of each pair of texts."""
        if self.identical is not False:
            return
        tokens, plain_tokens = report_of.merge(self.runs).tokens, report_of.merge(self.plain_runs).tokens
        for number, (row, text, plain) in enumerate(zip(self.rows, tokens, plain_tokens, strict=True)):
            batch = len(self.batches[number // self.batch_size])
            origin = self.origin_of(row, self.settings, self.widths(batch), batch)
            difference = near_ties.find_difference(self.session.target, row.ids, text, plain, origin)
            if difference is not None:
                position = {"prompt": number, "line": row.prompt.line}
                self.differences.append(near_ties.difference_record(difference, self.session.tokenizer, **position))

    def record(self) -> dict[str, Any]:
        """Return the totals over all finished prompts as JSON."""
        compressed = self.more.compressed
        return report_of.record(
            self.method.name,
            self.guarantee,
            self._total(self.runs),
            self._total(self.plain_runs) if self._is_compared else None,
            identical=self.identical,
            compile_seconds=self.compile_seconds + (0 if compressed is None else compressed.compile_seconds),
            peak_memory_bytes=peak_memory_bytes(),
        )

    def _total(self, runs: Sequence[report_of.MeasuredRun]) -> report_of.MeasuredRun:
        """Return the rows of several runs. Both methods of a comparison wait for the compression of the prompts."""
        run, compressed = report_of.merge(runs), self.more.compressed
        return run if compressed is None else compressed.add_time(run)

    def document(self, bad) -> dict[str, Any]:
        """Return the JSON document. If a part is lossy, the method's guarantee has its own name."""
        compressed, part = self.more.compressed, self.more.lossy_part
        document = super().document(bad) | {
            "adapt": self.more.adapt,
            "compress": compressed and compressed.text,
            "compress_seconds": compressed and compressed.seconds,
        }
        if part is None:
            return document
        return document | {"guarantee": "lossy", f"guarantee_to_{part[0]}": document["guarantee"]}

    def results(self) -> list[dict[str, Any]]:
        """Return the results per finished prompt as JSON."""
        run = report_of.merge(self.runs)
        passes = run.stats.target_passes
        return [
            {
                "line": row.prompt.line,
                "question_id": row.prompt.question_id,
                "text": text.plain,
                "token_ids": ids,
                "finish_reason": "stop" if text.is_stopped else "eos" if eos else "length",
                "prompt_tokens": len(row.source or row.ids),
                **({} if self.more.compressed is None else self.more.compressed.record(row.ordinal)),
                "tokens": len(ids),
                "target_passes": int(count),
                "block_efficiency": len(ids) / max(int(count), 1),
            }
            for row, text, ids, eos, count in zip(
                self.rows[: len(self.texts)], self.texts, run.tokens, run.hit_eos, passes, strict=True
            )
        ]

    def table(self) -> dict[str, str]:
        """Return the totals as lines of a table."""
        record = self.record()
        rates = [f"{x:.2f}" if x is not None else "-" for x in record["acceptance_by_depth"]]
        first, resumed = record["time_to_first_token"], report_of.merge(self.runs).resumed
        lines = {
            "method": f"{record['method']} (guarantee: {self._guarantee()})",
            "tokens": f"{record['tokens'] - resumed} in {record['seconds']:.2f} s"
            + (f", {resumed} before the restart" if resumed else ""),
            "tokens/s": f"{record['tokens_per_second']:.1f}",
            "tokens per target pass": f"{record['block_efficiency']:.2f} with the bonus token, "
            f"{record['mean_accepted']:.2f} drafted",
            "acceptance by depth": " ".join(rates) or "-",
            "target passes": str(record["target_passes"]),
            "time to first token": "-" if first is None else f"{first:.3f} s",
            "compilation": f"{record['compile_seconds']:.1f} s",
            "peak memory": describe_memory(record["peak_memory_bytes"]),
        }
        if self.more.compressed is not None:
            lines["prompt tokens"] = self.more.compressed.describe(row.ordinal for row in self.rows)
        if self._is_compared:
            lines["plain decoding"] = f"{record['baseline_tokens_per_second']:.1f} tokens/s"
            lines["speed ratio"] = f"{record['speedup']:.2f}"
        return lines

    def _guarantee(self) -> str:
        """Return the guarantee in words, with the loss of a lossy rule, of --adapt, --compress and the cache."""
        rule = self.decoding.rule
        has_distance = rule is not None and rule.distance is not None and self.decoding.remark is None
        distance = f", TV {rule.distance:g} on a toy pair" if rule is not None and has_distance else ""
        words = self.guarantee + distance
        part = self.more.lossy_part
        return words if part is None else f"lossy; {words} relative to {part[1]}"

    def verdict(self) -> list[str]:
        """Return the result of the comparison in words."""
        if self.plain is None:
            return []
        if self.identical is None:
            return [describe_uncompared(self.guarantee)]
        part = self.more.lossy_part
        plain = self.session.baseline + ("" if part is None else f" of {part[1]}")
        if self.identical:
            return [f"outputs: identical to {plain}"]
        lines = [] if self.is_comparable else [f"outputs: differ from {plain}; this method is lossy"]
        for d in self.differences:
            where = f"line {d['line']}: " if d["line"] else ""
            lines.append(
                f"outputs differ: {where}first at new token {d['position']}: {d['text']!r} instead of "
                f"{d['plain_text']!r}; {near_ties.describe_gap(d)}"
            )
        if self.is_refused and self.session.same_bits:
            lines.append(
                "--same-bits promises equal texts, and this device breaks the promise; run specjax check-bits, and "
                "leave --same-bits out"
            )
        return lines

    @property
    def is_refused(self) -> bool:
        """Return True if a text differs that must be equal, by more than rounding."""
        return self.is_comparable and not all(entry["near_tie"] for entry in self.differences)

    def report(self, report: Report) -> None:
        """Print the JSON document, or the table and the verdict.

        Raises: typer.Exit(1) if texts differ that must be equal.
        """
        super().report(report)
        if self.is_refused and not report.bad:
            raise typer.Exit(1)


def _have_stopped(streams: list[TextStream]) -> bool:
    """Return True if all texts have ended and a stop string ended one of them."""
    return any(stream.is_stopped for stream in streams) and all(stream.has_ended for stream in streams)


def cut(run: report_of.MeasuredRun, streams: list[TextStream]) -> report_of.MeasuredRun:
    """Remove the tokens after a stop string."""
    tokens = [
        text[: stream.num_tokens] if stream.is_stopped else text
        for text, stream in zip(run.tokens, streams, strict=True)
    ]
    return run._replace(tokens=tokens)
