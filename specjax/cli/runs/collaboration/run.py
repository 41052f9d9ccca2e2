"""The run of a collaboration over prompts: texts with their authors, the cost of each model, and the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.text import Text

import specjax
from specjax.bench.measure import row_keys
from specjax.catalog import METHODS
from specjax.cli.options.prompts import BadLine, Encoded
from specjax.cli.output.console import Console
from specjax.cli.output.text import DRAFTED_STYLE, TextStream
from specjax.cli.runs.batch_checkpoint import BatchCheckpoints
from specjax.cli.runs.collaboration.checks import WARPS, CheckedMethod, describe_sampling, uses_second_model
from specjax.cli.runs.collaboration.words import load_rewards, load_writers, make_writing_drafter, word_arguments
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import stage
from specjax.cli.runs.run import PromptRun, Report, print_heading
from specjax.cli.runs.session import Session
from specjax.collaborate import TextResult, readers_of
from specjax.collaborate.results import NO_OUTPUT, RowsFailedError, totals
from specjax.engine.value_checks import explain_failure, find_bad_parameter
from specjax.files.untrusted import guarded_read
from specjax.persistence.fingerprint import describe, digest, digest_model, digest_weights
from specjax.types import Processor, Target


class WrittenText(NamedTuple):
    """A finished text of M models."""

    tokens: list[int]
    authors: list[int]
    hit_eos: bool
    passes: list[int]  # [M]
    read: list[int]  # [M]
    log: dict[str, Any]  # the method's summary of the row
    error: str | None = None  # the reason of a row that failed


class WrittenBatch(NamedTuple):
    """The texts of a batch and their times."""

    rows: list[WrittenText]
    seconds: float
    plain_seconds: float = 0.0
    plain_tokens: int = 0


class Collaboration(PromptRun):
    """A method over some prompts and, with --compare, the target alone after each batch."""

    def __init__(
        self, session: Session, decoding: Decoding, method: CheckedMethod, rows: Sequence[Encoded], batch_size: int,
        *, compare: bool = False, processors: tuple[Processor, ...] = (), checkpoint: str | None = None,
        raw: bool = False,
    ):  # fmt: skip
        """Create the run.

        decoding: with the settings that the method uses. checkpoint: a folder for finished batches; those of an
        earlier run are read. raw: the prompts have no chat template.
        """
        super().__init__(session, decoding, rows, batch_size)
        name, options, explicit = method
        self.method, self.options, self.compare = METHODS[name], dict(options), compare
        second = [session.draft] if session.draft is not None and uses_second_model(self.method) else []
        self.rewards = load_rewards(self.options, session)
        self.writers = [*second, session.target]
        self.others = load_writers(self.method, self.options, session)
        self.models = [*self.writers, *self.others.values(), *readers_of(*self.rewards.values())]
        names = {option.name for option in self.method.words}
        texts = {name: value for name, value in self.options.items() if name in names}
        self.words = word_arguments(name, session.tokenizer, session.target.model.vocab_size, texts, raw=raw)
        self.arguments = {name: value for name, value in self.options.items() if name not in names}
        drafter = make_writing_drafter(self.arguments.pop("drafter", None), session)
        if drafter is not None:
            self.arguments["drafter"] = drafter
        self.processors: dict[str, Any] = {"processors": processors} if processors else {}
        self.sampling = {**explicit, **self.processors}
        self.finished: list[WrittenBatch] = []
        self.checkpoints = None if checkpoint is None else BatchCheckpoints(checkpoint, self._fingerprints())

    def _fingerprints(self) -> dict[str, str]:
        """Return digests of all inputs that determine the texts, which identify a checkpoint."""
        settings = [self.method.name, self.decoding.record(), self.options, self.sampling, self.words, self.compare]
        settings += [np.asarray(x) for x in jax.tree.leaves((self.sampling, self.words)) if isinstance(x, jax.Array)]
        prompts = [[(list(row.ids), row.ordinal) for row in batch] for batch in self.batches]
        models = {"target": digest_model(self.session.target)}
        if self.session.draft is not None:
            models["draft model"] = digest_model(self.session.draft)
        models |= {name: digest_model(model) for name, model in self.others.items()}
        for name, reward in self.rewards.items():
            models[name] = digest((digest_model(reward.target), digest_weights((reward.weight, reward.bias))))
        return {"prompts": digest(prompts), "settings": digest(describe(settings)), **models}

    def run_batch(self, number: int, report: Report) -> None:
        """Decode a batch, or read it from the checkpoint. With --compare each program runs once before it is timed."""
        prompts, log = self.batches[number], report.log
        stored = self._read(number)
        if stored is not None:
            log.print(f"batch {number + 1} was finished before", style="dim")
        batch = stored or self._write(prompts, log)
        self.finished.append(batch)
        for prompt, row in zip(prompts, batch.rows, strict=True):
            self._print(prompt, row, report.out)
        if stored is not None:
            return
        if self.compare:
            batch = self.finished[-1] = self._run_target(prompts, batch, log)
        if self.checkpoints is not None:
            self.checkpoints.write(number, batch)

    def _arguments(self, batch: Sequence[Encoded]) -> dict[str, Any]:
        keys = row_keys(self.decoding.seed, [row.ordinal for row in batch])
        return {"key": keys, "max_new_tokens": self.decoding.max_new_tokens, "eos": self.session.tokenizer.eos}

    def _read(self, number: int) -> WrittenBatch | None:
        """Read a finished batch. Raises: UsageError for a damaged file."""
        stored = None if self.checkpoints is None else self.checkpoints.read(number)
        if stored is None or self.checkpoints is None:
            return None
        size = self.session.target.model.vocab_size
        with guarded_read(f"batch {number} in {self.checkpoints.folder}"):
            rows, seconds, plain_seconds, plain_tokens = stored
            batch = WrittenBatch(
                [WrittenText(*row) for row in rows], float(seconds), float(plain_seconds), int(plain_tokens)
            )
            assert len(rows) == len(self.batches[number]), "texts are missing"
            for row in batch.rows:
                assert len(row.tokens) == len(row.authors), "authors are missing"
                assert all(type(token) is int and 0 <= token < size for token in row.tokens), "no tokens of this model"
                assert len(row.passes) == len(row.read) == len(self.models), "passes are missing"
                assert sum(row.authors) + sum(row.passes) + sum(row.read) >= 0, "counts are negative"
                assert isinstance(row.log, dict) and isinstance(row.error, str | None), "the log is damaged"
        return batch

    def _write(self, batch: Sequence[Encoded], log: Console) -> WrittenBatch:
        """Decode a batch with the method."""
        prompts = [list(row.ids) for row in batch]
        arguments = {
            **self._arguments(batch), **self.words, **self.rewards, **self.others, **self.arguments, **self.sampling
        }  # fmt: skip

        def decode() -> TextResult:
            try:
                return jax.block_until_ready(self.method.make(*self.writers, prompts, **arguments))
            except RowsFailedError as error:  # other batches may have texts
                return error.result

        with stage(log, "writing", "wrote"):
            if self.compare:
                decode()
            start = time.perf_counter()
            result = decode()
            seconds = time.perf_counter() - start
        return WrittenBatch(self._rows(result), seconds)

    def _rows(self, result: TextResult) -> list[WrittenText]:
        """Return the texts of a result, with the name of a parameter that is no number among the reasons."""
        failures = dict(result.failures)
        bad = [row for row, reason in failures.items() if reason == NO_OUTPUT]
        if bad:
            broken = next((model for model in self.models if find_bad_parameter(model)), self.models[-1])
            reason = explain_failure(broken, self.processors.get("processors", ()))
            failures |= dict.fromkeys(bad, reason)
        return [_text_of(result, row, failures.get(row)) for row in range(len(result.lengths))]

    def _run_target(self, batch: Sequence[Encoded], written: WrittenBatch, log: Console) -> WrittenBatch:
        """Decode a batch with the target alone, and add its time."""
        settings = {name: getattr(self.decoding.settings, name) for name in WARPS}
        prompts, arguments = [list(row.ids) for row in batch], {**self._arguments(batch), **settings, **self.processors}
        decode = lambda: jax.block_until_ready(
            specjax.decode(self.session.target, "autoregressive", prompts, **arguments)
        )
        with stage(log, "decoding with the target alone", "decoded with the target alone"):
            decode()
            start = time.perf_counter()
            result = decode()
            seconds = time.perf_counter() - start
        return written._replace(plain_seconds=seconds, plain_tokens=int(result.lengths.sum()))

    def _print(self, prompt: Encoded, row: WrittenText, out: Console) -> None:
        """Print a text; tokens of smaller models are coloured."""
        print_heading(prompt, out)
        tokenizer = self.session.tokenizer
        stream = TextStream(tokenizer, tokenizer.eos)
        has_draft = len(self.writers) > 1
        pieces = [
            stream.push(token, has_draft and author != len(self.writers) - 1)
            for token, author in zip(row.tokens, row.authors, strict=True)
        ]
        out.print(Text.assemble(*pieces, stream.flush()), soft_wrap=True)
        if has_draft and out.color_system and not out.quiet:
            out.print(Text.assemble((f"written by {self._base.model.name}", DRAFTED_STYLE), ", plain: by the target"))

    @property
    def _base(self) -> Target:
        """Return the smaller model that writes: one of --set in place of --draft, if there is one."""
        return next(iter(self.others.values()), self.writers[0])

    @property
    def failures(self) -> list[BadLine]:
        """Return the prompts without a text, and the reason of each."""
        pairs = zip(self.rows, self.texts, strict=False)
        return [BadLine(prompt.prompt.line, row.error) for prompt, row in pairs if row.error is not None]

    @property
    def texts(self) -> list[WrittenText]:
        """Return all finished texts."""
        return [row for batch in self.finished for row in batch.rows]

    def record(self) -> dict[str, Any]:
        """Return the totals over all finished prompts as JSON."""
        rows, tokens = self.texts, sum(len(row.tokens) for row in self.texts)
        per_model = lambda field: [sum(getattr(row, field)[i] for row in rows) for i in range(len(self.models))]
        by_target = sum(row.authors.count(len(self.writers) - 1) for row in rows)
        seconds, plain_seconds, plain_tokens = (
            sum(getattr(batch, name) for batch in self.finished)
            for name in ("seconds", "plain_seconds", "plain_tokens")
        )
        speed = tokens / seconds if seconds else None
        plain = plain_tokens / plain_seconds if plain_seconds else None
        return {
            "method": self.method.name,
            "guarantee": self.method.guarantee,
            "options": self.options,
            "prompts": len(rows),
            "tokens": tokens,
            "seconds": seconds,
            "seconds_include_compilation": not self.compare,
            "tokens_per_second": speed,
            "share_of_target": by_target / tokens if tokens else None,
            "models": [model.model.name for model in self.models],
            "passes": per_model("passes"),
            "tokens_read": per_model("read"),
            "log": totals([row.log for row in rows]),
            "baseline_tokens_per_second": plain,
            "speedup": speed and plain and speed / plain,
        }

    def results(self) -> list[dict[str, Any]]:
        """Return the results per finished prompt as JSON."""
        return [
            {
                "line": prompt.prompt.line,
                "question_id": prompt.prompt.question_id,
                "text": self.session.tokenizer.decode(row.tokens),
                "token_ids": row.tokens,
                "authors": row.authors,
                "finish_reason": "failed" if row.error is not None else "eos" if row.hit_eos else "length",
                "prompt_tokens": len(prompt.ids),
                "tokens": len(row.tokens),
                "passes": row.passes,
                "log": row.log,
            }
            for prompt, row in zip(self.rows, self.texts, strict=False)
        ]

    def table(self) -> dict[str, str]:
        """Return the totals as lines of a table."""
        record = self.record()
        lines = {
            "method": f"{record['method']} (guarantee: {record['guarantee']})",
            "tokens": f"{record['tokens']} in {record['seconds']:.2f} s"
            + (", compilation included" if record["seconds_include_compilation"] else ""),
            "sampling": describe_sampling(self.decoding.settings),
        }
        if len(self.writers) > 1 and record["share_of_target"] is not None:
            lines["written by the target"] = f"{record['share_of_target']:.0%}"
        for name, passes, read in zip(record["models"], record["passes"], record["tokens_read"], strict=True):
            lines[f"passes of {name}"] = f"{passes}, over {read} tokens"
        for name, value in record["log"].items():
            lines[name.replace("_", " ")] = str(value) if isinstance(value, int) else f"{value:.3g} on average"
        if record["baseline_tokens_per_second"] is not None:
            lines["tokens/s"] = f"{record['tokens_per_second']:.1f}"
            lines["the target alone"] = f"{record['baseline_tokens_per_second']:.1f} tokens/s"
            lines["speed ratio"] = f"{record['speedup']:.2f}"
        return lines


def _text_of(result: TextResult, row: int, error: str | None) -> WrittenText:
    """Return one row of a result, without text if it failed."""
    count = 0 if error else int(result.lengths[row])
    text = result.tokens[row, :count].tolist(), result.authors[row, :count].tolist()
    cost = result.passes[row].tolist(), result.read[row].tolist()
    return WrittenText(*text, bool(result.hit_eos[row]), *cost, {} if error else result.summary(row), error)
