"""The run of `specjax generate` for any-order models, which fill in missing tokens of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bench import measure
from specjax.bench import records as report_of
from specjax.catalog import METHODS
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import ModelOptions, refuse_flags
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.output.text import TextStream
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import stage, use_compilation_cache
from specjax.cli.runs.generation import Generation, GenerationOptions
from specjax.cli.runs.run import PromptRun, Report, print_heading
from specjax.cli.runs.session import Session
from specjax.decoders import any_subset, blank_prompts, load_any_order
from specjax.engine.step import round_up
from specjax.errors import require
from specjax.types import Array

WHAT = "an any-order model, the folder of an XLNet language model"
"""The models of the method, in words."""


def check_flags(models: ModelOptions, system: str | None, stop: Sequence[str] | None) -> None:
    """Raise a UsageError for a missing model, or flags that any-order models do not have."""
    refuse_flags((models,), frozenset({"target", "no_cache"}), "does not apply to any-order models")
    require(models.target is not None, f"method any_subset needs {WHAT}; add --target MODEL")
    require(system is None, "--system needs a chat template, and any-order models have none; remove it")
    require(not stop, "--stop-string does not apply to filled texts, which end where the prompt ends; remove it")


def open_any_order(log: Console, models: ModelOptions) -> Session:
    """Load the model. Raises: UsageError for a model that cannot be loaded, or is no any-order model."""
    use_compilation_cache(not models.no_cache)
    with stage(log, f"loading {models.target}", "loaded (float32)") as clock:
        model, tokenizer = parse_flag("--target", load_any_order, models.target)
    target: Any = model
    return Session(target, tokenizer, None, "float32", clock.seconds)


class Infilling(Generation):
    """Prompts whose missing tokens are filled in and, with --compare, the same with one token per call."""

    def __init__(
        self, session: Session, decoding: Decoding, window: int | None, rows: Sequence[Encoded], batch_size: int,
        compare: bool,
    ):  # fmt: skip
        """Create the run.

        decoding: with the settings that the method uses. window: drafted tokens per step; None: the method's default.
        """
        tokenizer = session.tokenizer  # prompts have no control tokens of their own
        rows = [row._replace(ids=list(tokenizer.encode(row.prompt.text, special=False))) for row in rows]
        PromptRun.__init__(self, session, decoding, rows, batch_size)
        self.method, self.more = METHODS["any_subset"], GenerationOptions(compare)
        self.options = {} if window is None else {"window": window}
        self.guarantee = decoding.guarantee(self.method.name)
        self.plain: Any = compare or None
        self.runs, self.plain_runs, self.texts, self.differences = [], [], [], []
        self.compile_seconds, self.plain_compile_seconds = 0.0, 0.0

    @property
    def is_comparable(self) -> bool:
        """Return True if the texts of all windows are equal."""
        return self.decoding.settings.is_greedy

    def compile(self, log: Console) -> None:
        """Run each program once if times are compared. Otherwise the first batch compiles its program."""
        if not self.plain:
            return
        shapes = {self._blank(batch)[0].shape: batch for batch in self.batches}
        with stage(log, "compiling", f"compiled {self.method.name}"):
            for batch in shapes.values():
                run, plain = self._fill(batch, **self.options)[0], self._fill(batch, window=1)[0]
                self.compile_seconds += run.call_seconds
                self.plain_compile_seconds += plain.call_seconds

    def run_batch(self, number: int, report: Report) -> None:
        """Fill in the missing tokens of a batch, and print its texts."""
        run, texts = self._fill(self.batches[number], **self.options)
        self.compile_seconds += run.compile_seconds
        for row, tokens in zip(self.batches[number], texts, strict=True):
            stream = TextStream(self.session.tokenizer, ())
            for token in tokens:
                stream.push(token, False)
            stream.flush()
            print_heading(row, report.out)
            report.out.print(stream.text, soft_wrap=True)
            self.texts.append(stream)
        self.runs.append(run)

    def finish(self, report: Report) -> None:
        """Fill in one token per call, for comparison."""
        if self.plain:
            self.plain_runs = [self._fill(batch, window=1)[0] for batch in self.batches]

    def _fill(self, batch: Sequence[Encoded], **options: int) -> tuple[report_of.MeasuredRun, list[list[int]]]:
        """Return the run with the tokens that were missing, and the complete texts."""
        model: Any = self.session.target
        settings, keys = self.decoding.settings, measure.row_keys(self.decoding.seed, [row.ordinal for row in batch])
        tokens, missing, lengths = self._blank(batch)
        names = "temperature", "top_k", "top_p"
        warping: dict[str, Any] = {name: getattr(settings, name) for name in names}
        run, result = measure.run_call(
            lambda: any_subset(model, tokens, missing, lengths=lengths, key=keys, **warping, **options)
        )
        return run, [row[:n].tolist() for row, n in zip(*jax.device_get((result.filled, lengths)), strict=True)]

    def _blank(self, batch: Sequence[Encoded]) -> tuple[Array, Array, Array]:
        """Return the arrays of `blank_prompts`, padded so that prompts of many lengths share few programs."""
        model: Any = self.session.target
        rows = [row.ids for row in batch]
        tokens, missing, lengths = blank_prompts(model, rows, self.decoding.max_new_tokens)
        padding = (0, 0), (0, round_up(tokens.shape[1], 1) - tokens.shape[1])
        return jnp.pad(tokens, padding), jnp.pad(missing, padding), lengths

    def verdict(self) -> list[str]:
        """Return the result of the comparison in words."""
        if not self.plain:
            return []
        if self.identical is None:
            return ["outputs: not compared; sampled texts have the same distribution for any window, not the same text"]
        words = "identical to" if self.identical else "differ, as rounding decides near-ties, from"
        return [f"outputs: {words} those with one token per call"]
