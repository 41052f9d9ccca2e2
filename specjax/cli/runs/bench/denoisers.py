"""The run of `specjax bench` for diffusion models: methods, and one column per pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.bench import measure, near_ties, records
from specjax.catalog import METHODS, shared
from specjax.cli.options.diffusion import Variant
from specjax.cli.options.prompts import Encoded
from specjax.cli.runs.bench.comparison import BenchOptions, BenchRun
from specjax.cli.runs.bench.group import Group
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import peak_memory_bytes
from specjax.cli.runs.session import Session
from specjax.diffusion import Denoiser, Procedure
from specjax.diffusion.procedures import ONE, Reference, are_equal, one_column_per_pass, reference_of


class DenoiserComparison(BenchRun):
    """Methods and one column per pass in the same blocks.

    A method that guarantees the text of another procedure is also compared with that procedure.
    """

    def __init__(
        self, session: Session, denoiser: Denoiser, decoding: Decoding, variants: Mapping[str, Variant],
        rows: Sequence[Encoded], options: BenchOptions,
    ):  # fmt: skip
        """Create the run. variants: methods with options, by label."""
        super().__init__(session, decoding, list(variants), rows, options)
        self.variants, self.denoiser, self.plain = variants, denoiser, {}
        self.settings = session.settings(decoding, "llada")
        self.procedures: dict[str, Procedure] = {}
        self.references: dict[str, Reference] = {}  # of methods that guarantee the text of their reference
        for label, (name, values) in variants.items():
            method = METHODS[name]
            procedure: Procedure = method.make(denoiser, **values)
            plain = one_column_per_pass(method, denoiser, values)
            baseline = _baseline_name(plain, denoiser)
            self.procedures |= {baseline: plain, label: procedure}
            self.plain[label] = baseline
            reference = reference_of(method, denoiser, procedure, values, is_greedy=self.settings.is_greedy)
            if reference.is_promised:
                self.references[label] = reference
        self.programs = list(self.procedures)

    def decode(self, program: str, group: Group) -> records.MeasuredRun:
        """Decode a group with a procedure."""
        return self._run(self.denoiser, self.procedures[program], group)

    def _run(self, denoiser: Denoiser, procedure: Procedure, group: Group) -> records.MeasuredRun:
        return measure.run_decode(self.task(denoiser, procedure, group.rows, self.settings))

    def find_differences(self, group: Group, method: str) -> Iterator[dict]:
        """Yield the differences from the text that the method guarantees."""
        reference = self.references.get(method)
        if reference is None:
            return
        is_baseline = are_equal(reference.procedure, self.procedures[self.plain[method]])
        run = (
            group.runs[self.plain[method]]
            if is_baseline and reference.denoiser is self.denoiser
            else (self._run(reference.denoiser, reference.procedure, group))
        )
        for row, text, plain in zip(group.rows, group.runs[method].tokens, run.tokens, strict=True):
            position = near_ties.first_difference(text, plain)
            if position is not None:
                pieces = [self.session.tokenizer.decode(tokens[position : position + 1]) for tokens in (text, plain)]
                yield {
                    "method": method, "task": group.task, "line": row.prompt.line,
                    "question_id": row.prompt.question_id, "position": position, "text": pieces[0],
                    "plain_text": pieces[1],
                }  # fmt: skip

    def record_of(self, method: str, task: str | None = None) -> dict[str, Any]:
        """Return the JSON record of a method on a finished task; None: on all tasks.

        Where near-ties are possible, texts that differ are listed and not refused.
        """
        runs = self.runs_of(method, task)
        refused = bool(runs.differences) and near_ties.are_excluded(self.denoiser.target)
        name, options = self.variants[method]
        record = records.denoising_record(
            name,
            METHODS[name].guarantee,
            runs.run,
            runs.plain,
            identical=not runs.differences if method in self.references else None,
            refused=refused,
            compile_seconds=runs.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        speedup = None if refused else runs.median_speedup
        return record | {"options": options, "median_speedup": speedup, "refused": refused}


def _baseline_name(plain: Procedure, denoiser: Denoiser) -> str:
    """Return the name of one column per pass, with its blocks unless these are the model's or those of `llada`."""
    width, usual = plain.schedule.width, denoiser.block or shared.BLOCK.default
    if width == usual:
        return ONE
    return f"{ONE}, without blocks" if width is None else f"{ONE}, blocks of {width}"
