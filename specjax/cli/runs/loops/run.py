"""The run of `specjax generate` for a method with a loop of its own: texts, and plain decoding for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench import measure
from specjax.bench import records as report_of
from specjax.catalog import METHODS
from specjax.cli.options.drafter_flags import NO_FLAGS, MethodOptions
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import stage
from specjax.cli.runs.generation import Generation, GenerationOptions, cut
from specjax.cli.runs.loops.checks import LOOP_DRAWS, LOOP_WIDTH, loop_settings
from specjax.cli.runs.run import Report, print_heading
from specjax.cli.runs.session import Session
from specjax.types import Draws


class LoopGeneration(Generation):
    """A method with a loop of its own over some prompts and, with --compare, plain decoding after it.

    Its texts are printed when a batch has ended.
    """

    def __init__(
        self, session: Session, decoding: Decoding, method: str, options: MethodOptions, rows: Sequence[Encoded],
        batch_size: int, more: GenerationOptions, explicit: Mapping[str, Any],
    ):  # fmt: skip
        """Create the run.

        decoding: with the settings that the method uses. explicit: the settings that flags set.
        """
        super().__init__(session, decoding, "autoregressive", NO_FLAGS, rows, batch_size, more)
        self.method, self.guarantee = METHODS[method], decoding.guarantee(method)
        self.loop = session.loop(method, options, loop_settings(self.method, explicit))
        self.is_measured = self.method.size is not None and self.method.size not in options.values(method)
        if "temperature" not in self.method.settings or "key" not in self.method.settings:  # the loop is greedy
            self.settings = dataclasses.replace(self.settings, temperature=0.0)

    @property
    def draws(self) -> Draws:
        """Return the form of a loop's drafts."""
        return LOOP_DRAWS

    def widths(self, batch: int) -> Sequence[int]:
        """Return the tokens of a pass that measures rounding."""
        return (LOOP_WIDTH,)

    def compile(self, log: Console) -> None:
        """Run each program once if times are compared; a loop has no shorter run.

        Otherwise the first batch compiles its program, and the time for it is not counted as decoding.
        """
        if self.plain is None:
            return
        shapes = {measure.bucket([row.ids for row in batch]): batch for batch in self.batches}
        with stage(log, "compiling", f"compiled {self.method.name} and plain decoding"):
            for batch in shapes.values():
                run = self._measure(batch)
                self.compile_seconds += run.call_seconds
                self.plain_compile_seconds += measure.warm_stream(self._plain_task(batch, self.plain))

    def run(self, report: Report) -> None:
        """Decode all batches and print their texts, and name a draft length that was measured."""
        super().run(report)
        if self.is_measured and self.runs:
            count = self.runs[0].stats.drafted_by_depth.shape[1]
            report.log.print(
                f"drafts have {count} tokens, by the times of both models; --num-draft-tokens N sets it", style="dim"
            )

    def run_batch(self, number: int, report: Report) -> None:
        """Decode a batch, and print its texts."""
        batch = self.batches[number]
        run, streams = self._measure(batch), self._text_streams(batch)
        self.compile_seconds += run.compile_seconds
        for row, stream, tokens in zip(batch, streams, run.tokens, strict=True):
            print_heading(row, report.out)
            for token in tokens:
                stream.push(token, False)
            stream.flush()
            report.out.print(stream.text, soft_wrap=True)
        self.runs.append(cut(run, streams))
        self.texts += streams

    def _measure(self, batch: Sequence[Encoded]) -> report_of.MeasuredRun:
        keys = measure.row_keys(self.decoding.seed, [row.ordinal for row in batch])
        return measure.run_loop(self.loop, [row.ids for row in batch], keys, self.decoding.max_new_tokens)
