"""The run of `specjax bench` for diffusion models: methods, and one column per pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from specjax.bench import measure, records
from specjax.bench.near_ties import first_difference
from specjax.catalog import METHODS
from specjax.cli.options.diffusion import Variant
from specjax.cli.options.prompts import Encoded
from specjax.cli.runs.bench.comparison import BenchOptions, BenchRun
from specjax.cli.runs.bench.group import Group
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.denoising import one_column_per_pass
from specjax.cli.runs.environment import peak_memory_bytes
from specjax.cli.runs.session import Session
from specjax.diffusion import Denoiser, Procedure

ONE = "one column per pass"


class DenoiserComparison(BenchRun):
    """Methods and one column per pass in the same blocks.

    A method with the guarantee `identical` is also compared with the procedure that it accelerates.
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
        self.accelerated: dict[str, Procedure] = {}  # the procedures that methods accelerate, if not the baseline
        for label, (method, values) in variants.items():
            procedure: Procedure = METHODS[method].make(denoiser, **values)
            plain = one_column_per_pass(denoiser, values)
            has_block = "block" in values and not denoiser.is_causal
            baseline = f"{ONE}, blocks of {values['block']}" if has_block else ONE
            self.procedures |= {baseline: plain, label: procedure}
            self.plain[label] = baseline
            accelerated = procedure.replace(verify=None)
            if METHODS[method].guarantee == "identical" and not _are_equal(accelerated, plain):
                self.accelerated[label] = accelerated
        self.programs = list(self.procedures)

    def decode(self, program: str, group: Group) -> records.MeasuredRun:
        """Decode a group with a procedure."""
        return self._run(self.procedures[program], group)

    def _run(self, procedure: Procedure, group: Group) -> records.MeasuredRun:
        return measure.run_decode(self.task(self.denoiser, procedure, group.rows, self.settings))

    def find_differences(self, group: Group, method: str) -> Iterator[dict]:
        """Yield the differences from the procedure that the method accelerates."""
        if METHODS[self.variants[method].method].guarantee != "identical":
            return
        accelerated = self.accelerated.get(method)
        reference = group.runs[self.plain[method]] if accelerated is None else self._run(accelerated, group)
        for row, text, plain in zip(group.rows, group.runs[method].tokens, reference.tokens, strict=True):
            position = first_difference(text, plain)
            if position is not None:
                pieces = [self.session.tokenizer.decode(tokens[position : position + 1]) for tokens in (text, plain)]
                yield {
                    "method": method, "task": group.task, "line": row.prompt.line,
                    "question_id": row.prompt.question_id, "position": position, "text": pieces[0],
                    "plain_text": pieces[1],
                }  # fmt: skip

    def record_of(self, method: str, task: str | None = None) -> dict[str, Any]:
        """Return the JSON record of a method on a finished task; None: on all tasks.

        In bfloat16, passes of another width may flip near-ties, so texts that differ are listed and not refused.
        """
        runs = self.runs_of(method, task)
        refused = bool(runs.differences) and self.session.dtype == "float32"
        name, options = self.variants[method]
        record = records.denoising_record(
            name,
            METHODS[name].guarantee,
            runs.run,
            runs.plain,
            refused=refused,
            compile_seconds=runs.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        speedup = None if refused else runs.median_speedup
        return record | {"options": options, "median_speedup": speedup, "refused": refused}


def _are_equal(procedure: Procedure, other: Procedure) -> bool:
    """Return True if two procedures have equal parts. Procedures with arrays count as different."""
    return not jax.tree.leaves(procedure) and not jax.tree.leaves(other) and procedure == other
