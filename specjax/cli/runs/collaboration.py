"""`specjax generate` of texts that several models or samples write: who wrote what, and what it cost each of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.cli.options.common import Settings, require
from specjax.cli.runs.batch_checkpoint import Finished
from specjax.files.untrusted import guarded_read

if TYPE_CHECKING:
    from specjax.catalog import Method
    from specjax.cli.options.prompts import Encoded
    from specjax.cli.output.console import Console
    from specjax.cli.runs.session import Session
    from specjax.collaborate import TextResult

GIVEN = {"draft", "safe", "segmenter", "judging", "cues"}
"""What the command line can give: --draft, as the safe model too, and words of its own."""

OF_DRAFTS = (
    "datastore", "num_draft_tokens", "tree", "draft_stop", "stop", "exit_layer", "source", "controller", "costs",
    "verifier", "adapt", "coordinator", "num_processes", "process_id", "data", "model",
    "speculative_config", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_token_map", "stop_string",
)  # fmt: skip
ELSEWHERE = {"sampling": "speculative", "distributed": False, "show_what": "text"}

STEPS = {
    "spec_reason": ["\n\n"],
    "speculative_thinking": ["\n\n"],
    "foreal": [". ", "? ", "! ", "\n"],
    "cntp": list(".,;:?!\n)]}"),
}
"""Where steps end; of cntp trials."""
JUDGING = "\nFrom 0 (wrong) to 9 (right), the last step above is worth "
CUES = {
    "positive": ("yeah", "yes", "final answer", "confident"),
    "negative": ("wait", "alternatively", "hold on", "another"),
    "verify": ("verify", "think again", "recap", "check"),
}
CHECK = "Let me check whether there are some wrong steps:"


def is_collaboration(method: str | None) -> bool:
    from specjax.catalog import METHODS

    return method is not None and method in METHODS and METHODS[method].kind == "collaboration"


def lacking(row: Method) -> list[str]:
    """What a method needs and only Python can give it; one that takes a router cannot do without some judge."""
    return sorted((row.needs | (row.takes & {"router"})) - GIVEN)


def check_flags(arguments: Mapping[str, Any]) -> None:
    """Raises: UsageError for a method that the command line cannot serve, and for flags that are of drafts."""
    from specjax.catalog import METHODS

    name, draft = arguments["method"], arguments["draft"]
    row = METHODS[name]
    missing = lacking(row)
    require(
        not missing,
        f"--method: the command line cannot give {name} its {' and '.join(missing)}; call "
        f"specjax.collaborate.methods.{name} in Python",
    )
    wants = bool(row.needs & {"draft", "safe"})
    what = "safe" if "safe" in row.needs else "smaller"
    require(draft is not None or not wants, f"method {name} needs a {what} model beside the target; give --draft")
    require(draft is None or wants, f"method {name} has no use for a second model; leave --draft out")
    for flag, default in ({flag: None for flag in OF_DRAFTS} | ELSEWHERE).items():
        require(
            arguments.get(flag, default) in (default, [], ()),
            f"--{flag.replace('_', '-')} is not of texts that several models or samples write; leave it out",
        )


def words(name: str, tokenizer, vocab_size: int) -> dict[str, Any]:
    """What a method is told in words, as tokens."""
    from specjax.collaborate import after_strings

    ids = lambda text: list(tokenizer.encode(text, special=False))
    found: dict[str, Any] = {}
    if name in STEPS:
        where = "punctuation" if name == "cntp" else "segmenter"
        found[where] = after_strings(STEPS[name], tokenizer, vocab_size)
    if name == "spec_reason":
        found |= {"judging": ids(JUDGING), "digits": [ids(str(digit))[-1] for digit in range(10)]}
    if name == "speculative_thinking":
        forms = lambda cue: (cue, f" {cue}", cue.capitalize(), f" {cue.capitalize()}")
        found |= {side: [ids(form) for cue in cues for form in forms(cue)] for side, cues in CUES.items()}
        found["check"] = ids(CHECK)
    return found


class Row(NamedTuple):
    """A text that is done, of M models."""

    tokens: list[int]
    authors: list[int]
    hit_eos: bool
    passes: list[int]  # [M]
    read: list[int]  # [M]


class Batch(NamedTuple):
    """What is kept of one."""

    rows: list[Row]
    seconds: float
    plain_seconds: float = 0.0
    plain_tokens: int = 0


class Collaboration:
    """One method over some prompts, and the target alone beside it if asked for."""

    def __init__(
        self, session: Session, settings: Settings, method: str, options: Mapping[str, Any], rows: list[Encoded],
        batch_size: int, compare: bool, processors: tuple = (), checkpoint: str | None = None,
    ):  # fmt: skip
        """checkpoint: a folder for the batches that are done, of which an earlier run may have left some there."""
        from specjax.catalog import METHODS

        self.session, self.settings, self.batch_size = session, settings, batch_size
        self.method, self.options, self.rows, self.compare = METHODS[method], dict(options), rows, compare
        self.groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        self.models = [session.target] if session.draft is None else [session.draft, session.target]
        self.told = words(method, session.tokenizer, session.target.model.vocab_size)
        names = "top_k", "top_p", "min_p"
        self.sampling: dict[str, Any] = {name: getattr(settings, name) for name in names if getattr(settings, name)}
        if settings.temperature:  # 0 is what methods say themselves: some want samples
            self.sampling["temperature"] = settings.temperature
        if processors:
            self.sampling["processors"] = processors
        self.batches: list[Batch] = []
        self.kept = None if checkpoint is None else Finished(checkpoint, self._run())

    def _run(self) -> dict[str, str]:
        """Digests of what decides the texts, by which a checkpoint is known again."""
        import jax
        import numpy as np

        from specjax.persistence.fingerprint import describe, digest, of_model

        settings = [self.method.name, self.settings, self.options, self.sampling, self.told, self.compare]
        settings += [np.asarray(x) for x in jax.tree.leaves((self.sampling, self.told)) if isinstance(x, jax.Array)]
        prompts = [[(list(row.ids), row.ordinal) for row in group] for group in self.groups]
        names = ["target"] if len(self.models) == 1 else ["draft model", "target"]
        models = {name: of_model(model) for name, model in zip(names, self.models, strict=True)}
        return {"prompts": digest(prompts), "settings": digest(describe(settings)), **models}

    def _keywords(self, group: Sequence[Encoded]) -> dict[str, Any]:
        from specjax.bench import measure

        keys = measure.row_keys(self.settings.seed, [row.ordinal for row in group])
        return {"key": keys, "max_new_tokens": self.settings.max_new_tokens, "eos": self.session.tokenizer.eos}

    def _written(self, group: Sequence[Encoded]) -> TextResult:
        prompts = [list(row.ids) for row in group]
        return self.method.make(
            *self.models, prompts, **self._keywords(group), **self.told, **self.options, **self.sampling
        )

    def _alone(self, group: Sequence[Encoded]):
        import specjax

        prompts = [list(row.ids) for row in group]
        return specjax.decode(self.session.target, "autoregressive", prompts, **self._keywords(group), **self.sampling)

    def run(self, log: Console, out: Console) -> None:
        """Decode everything, printing texts to `out`. With a comparison each program has run before it is timed."""
        for number, group in enumerate(self.groups):
            found = None if self.kept is None else self._found(self.kept, number)
            if found is not None:
                log.print(f"batch {number + 1} was done before", style="dim")
            batch = found or self._decoded(group, log)
            self.batches.append(batch)
            for prompt, row in zip(group, batch.rows, strict=True):
                self._print(prompt, row, out)
            if found is not None:
                continue
            if self.compare:
                batch = self.batches[-1] = self._compared(group, batch, log)
            if self.kept is not None:
                self.kept.write(number, batch)

    def _found(self, kept: Finished, number: int) -> Batch | None:
        """A batch that was done before. Raises: UsageError for what is none."""
        found, size = kept.read(number), self.session.target.model.vocab_size
        if found is None:
            return None
        with guarded_read(f"batch {number} in {kept.folder}"):
            rows, seconds, plain_seconds, plain_tokens = found
            batch = Batch([Row(*row) for row in rows], float(seconds), float(plain_seconds), int(plain_tokens))
            assert len(rows) == len(self.groups[number]), "texts are missing"
            for row in batch.rows:
                assert len(row.tokens) == len(row.authors), "authors are missing"
                assert all(type(token) is int and 0 <= token < size for token in row.tokens), "no tokens of this model"
                assert len(row.passes) == len(row.read) == len(self.models), "passes are missing"
                assert sum(row.authors) + sum(row.passes) + sum(row.read) >= 0, "counts are negative"
        return batch

    def _decoded(self, group: Sequence[Encoded], log: Console) -> Batch:
        import jax

        from specjax.cli.runs.session import stage

        with stage(log, "writing", "wrote"):
            if self.compare:
                jax.block_until_ready(self._written(group))
            begin = time.perf_counter()
            result = jax.block_until_ready(self._written(group))
            seconds = time.perf_counter() - begin
        return Batch([_row(result, place) for place in range(len(group))], seconds)

    def _compared(self, group: Sequence[Encoded], batch: Batch, log: Console) -> Batch:
        import jax

        from specjax.cli.runs.session import stage

        with stage(log, "decoding with the target alone", "decoded with the target alone"):
            jax.block_until_ready(self._alone(group))
            begin = time.perf_counter()
            alone = jax.block_until_ready(self._alone(group))
            seconds = time.perf_counter() - begin
        return batch._replace(plain_seconds=seconds, plain_tokens=int(alone.lengths.sum()))

    def _print(self, prompt: Encoded, row: Row, out: Console) -> None:
        from rich.text import Text

        from specjax.cli.output.text import DRAFTED_STYLE, TextStream
        from specjax.cli.runs.generation import heading

        heading(prompt, out)
        tokenizer = self.session.tokenizer
        stream = TextStream(tokenizer, tokenizer.eos)
        small = len(self.models) > 1
        pieces = [
            stream.push(token, small and author == 0) for token, author in zip(row.tokens, row.authors, strict=True)
        ]
        out.print(Text.assemble(*pieces, stream.flush()), soft_wrap=True)
        if small and out.color_system and not out.quiet:
            out.print(Text.assemble((f"by {self.models[0].model.name}", DRAFTED_STYLE), ", plain: by the target"))

    @property
    def finished(self) -> list[Row]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def left(self) -> int:
        """Prompts that are not done."""
        return len(self.rows) - len(self.finished)

    def record(self) -> dict[str, Any]:
        """The JSON record over all prompts that are done."""
        rows, tokens = self.finished, sum(len(row.tokens) for row in self.finished)
        of = lambda what: [sum(getattr(row, what)[who] for row in rows) for who in range(len(self.models))]
        by_target = sum(row.authors.count(len(self.models) - 1) for row in rows)
        seconds, plain_seconds, plain_tokens = (
            sum(getattr(batch, name) for batch in self.batches) for name in ("seconds", "plain_seconds", "plain_tokens")
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
            "passes": of("passes"),
            "tokens_read": of("read"),
            "baseline_tokens_per_second": plain,
            "speedup": speed and plain and speed / plain,
        }

    def results(self) -> list[dict[str, Any]]:
        """Per prompt that is done."""
        return [
            {
                "line": asked.prompt.line,
                "question_id": asked.prompt.question_id,
                "text": self.session.tokenizer.decode(row.tokens),
                "token_ids": row.tokens,
                "authors": row.authors,
                "finish_reason": "eos" if row.hit_eos else "length",
                "prompt_tokens": len(asked.ids),
                "tokens": len(row.tokens),
                "passes": row.passes,
            }
            for asked, row in zip(self.rows, self.finished, strict=False)
        ]


def _row(result: TextResult, place: int) -> Row:
    count = int(result.lengths[place])
    text = result.tokens[place, :count].tolist(), result.authors[place, :count].tolist()
    return Row(*text, bool(result.hit_eos[place]), result.passes[place].tolist(), result.read[place].tolist())


def show(run: Collaboration, out: Console) -> None:
    """The table."""
    from rich.table import Table

    record = run.record()
    several = len(record["models"]) > 1
    lines = {
        "method": f"{record['method']} (guarantee: {record['guarantee']})",
        "tokens": f"{record['tokens']} in {record['seconds']:.2f} s"
        + (", compilation included" if record["seconds_include_compilation"] else ""),
    }
    if several and record["share_of_target"] is not None:
        lines["written by the target"] = f"{record['share_of_target']:.0%}"
    for name, passes, read in zip(record["models"], record["passes"], record["tokens_read"], strict=True):
        lines[f"passes of {name}"] = f"{passes}, reading {read} tokens"
    if record["baseline_tokens_per_second"] is not None:
        lines["tokens/s"] = f"{record['tokens_per_second']:.1f}"
        lines["the target alone"] = f"{record['baseline_tokens_per_second']:.1f} tokens/s"
        lines["speed ratio"] = f"{record['speedup']:.2f}"
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, value)
    out.print(table)
