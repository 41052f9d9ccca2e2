"""The run behind `specjax generate`: compile, stream, compare, tabulate."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specjax.bench import measure, near_ties
from specjax.bench import records as report
from specjax.catalog import METHODS
from specjax.cli.options.common import Settings
from specjax.cli.options.drafter_flags import Drafting
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.output.progress import Pace
from specjax.cli.output.text import DRAFTED_STYLE, TextStream
from specjax.cli.runs.session import Session, peak_memory_bytes, stage
from specjax.engine.carry_over import canonical
from specjax.persistence import Checkpoints
from specjax.persistence.program_cache import ProgramCache
from specjax.types import Drafter, Processor


class Generation:
    """One method over some prompts, and plain decoding beside it if asked for."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        method: str,
        drafting: Drafting,
        rows: list[Encoded],
        batch_size: int,
        compare: bool,
        checkpoint: str | None = None,
        checkpoint_every: int = 64,
        processors: tuple[Processor, ...] = (),
        stop: tuple[str, ...] = (),
        programs: ProgramCache | None = None,
    ):
        self.session, self.settings, self.batch_size = session, settings, batch_size
        self.method = METHODS[method]
        self.guarantee = settings.promise(method)
        self.drafter = session.drafter(method, drafting)
        self.plain = session.drafter("autoregressive") if compare else None
        self.rows = rows
        self.groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        self.processors, self.stop = processors, stop
        self.options = session.keywords(settings, method) | {"processors": processors, "programs": programs}
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        # Each batch goes on from what the one before taught; a checkpoint of one that has ended keeps its text alone.
        self.remembers = len(self.groups) > 1 and self.drafter.hooks.export is not None and checkpoint is None
        if self.remembers:
            self.drafter = session.on_mesh(canonical(session.target, self.drafter))
        self.runs: list[report.Run] = []
        self.plain_runs: list[report.Run] = []
        self.compile_seconds, self.plain_compile_seconds = 0.0, 0.0
        self.texts: list[TextStream] = []
        self.differences: list[dict] = []

    def compile(self, log: Console) -> None:
        """Compile every program that `run` needs."""
        shapes = {measure.bucket([row.ids for row in group]): group for group in self.groups}
        with stage(log, "compiling", f"compiled {self.method.name}{' and plain decoding' if self.plain else ''}"):
            for group in shapes.values():
                rows = [row.ids for row in group]
                self.compile_seconds += measure.warm_stream(
                    self.session.target, self.drafter, rows, self.options, measured=self.plain is not None
                )
                if self.plain:
                    self.plain_compile_seconds += measure.warm_stream(
                        self.session.target, self.plain, rows, self._options(self.plain)
                    )

    def run(self, log: Console, out: Console) -> None:
        """Decode everything, printing text to `out`."""
        if out.color_system and not out.quiet:
            log.print(Text.assemble(("drafted and accepted", DRAFTED_STYLE), ", plain: the target's own"))
        pace = Pace(log, len(self.rows), shown=not out.quiet)
        for number, group in enumerate(self.groups):
            self._run_group(group, out, log, self._checkpoints(number))
            pace.tell(len(self.texts))
        if self.plain:
            columns = (TextColumn("plain decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
                for group in progress.track(self.groups):
                    self.plain_runs.append(self._plain_run(group))
            self._compare()

    def _checkpoints(self, number: int) -> Checkpoints | None:
        """Each batch has a folder; that of a finished one holds its text."""
        if self.checkpoint is None:
            return None
        return Checkpoints(f"{self.checkpoint.rstrip('/')}/batch-{number:05d}", self.checkpoint_every)

    def _run_group(
        self, group: list[Encoded], out: Console, log: Console, checkpoint: Checkpoints | None = None
    ) -> None:
        streams = self._text_streams(group)
        live, memory = len(group) == 1, None

        def on_step(step):
            nonlocal memory
            memory = step.drafter
            if step.earlier is not None:
                found = sum(map(len, step.tokens))
                log.print(f"continuing after {found} tokens", style="dim")
            for row, stream in enumerate(streams):
                new = stream.push_step(step, row)
                if live:
                    out.print(new, end="", soft_wrap=True)
            return self._are_over(streams)

        if live:
            heading(group[0], out)
        self.runs.append(_cut(self._stream(self.drafter, group, on_step, checkpoint), streams))
        for row, stream in zip(group, streams, strict=True):
            rest = stream.flush()
            if live:
                out.print(rest, soft_wrap=True)
            else:
                heading(row, out)
                out.print(stream.text, soft_wrap=True)
        self.texts += streams
        if memory is not None and self.remembers:
            self.drafter = self.session.on_mesh(memory())

    def _plain_run(self, group: list[Encoded]) -> report.Run:
        assert self.plain is not None
        streams = self._text_streams(group)

        def on_step(step):
            for row, stream in enumerate(streams):
                stream.push_step(step, row)
            return self._are_over(streams)

        return _cut(self._stream(self.plain, group, on_step if self.stop else lambda step: None), streams)

    def _text_streams(self, group: list[Encoded]) -> list[TextStream]:
        return [TextStream(self.session.tokenizer, self.options["eos"], self.stop) for _ in group]

    def _are_over(self, streams: list[TextStream]) -> bool:
        """Whether nothing that may come is of the texts: a run that no stop string ended goes to its own end."""
        return any(stream.is_stopped for stream in streams) and all(stream.is_over for stream in streams)

    def _stream(
        self, drafter: Drafter, group: list[Encoded], on_step=lambda step: None, checkpoint: Checkpoints | None = None
    ) -> report.Run:
        keys = measure.row_keys(self.settings.seed, [row.ordinal for row in group])
        rows = [row.ids for row in group]
        options = self._options(drafter) | ({"checkpoint": checkpoint} if checkpoint else {})
        return measure.run_stream(self.session.target, drafter, rows, keys, options, on_step)

    def _options(self, drafter: Drafter) -> dict:
        """Plain decoding has nothing to draft or verify."""
        return self.options | ({"verifier": None, "controller": None} if drafter is self.plain else {})

    @property
    def left(self) -> int:
        """Prompts that are not done."""
        return len(self.rows) - len(self.texts)

    @property
    def _is_compared(self) -> bool:
        """Not if it was asked for, but the run has ended before."""
        return bool(self.plain) and len(self.plain_runs) == len(self.groups)

    @property
    def is_comparable(self) -> bool:
        """Whether plain decoding must give the same text."""
        return self.settings.is_comparable(self.method.name, self.drafter.traits.draws)

    @property
    def identical(self) -> bool | None:
        """None: not compared, or equality is not what the method promises."""
        if not self._is_compared or not (self.is_comparable or self.guarantee == "lossy"):
            return None
        return report.merge(self.runs).tokens == report.merge(self.plain_runs).tokens

    def _compare(self) -> None:
        if self.identical is not False:
            return
        pairs = zip(self.rows, report.merge(self.runs).tokens, report.merge(self.plain_runs).tokens, strict=True)
        for number, (row, ours, plain) in enumerate(pairs):
            found = near_ties.difference(
                self.session.target, row.ids, ours, plain, self.session.coarsest, self.processors
            )
            if found is not None:
                where = {"prompt": number, "line": row.prompt.line}
                self.differences.append(near_ties.difference_record(found, self.session.tokenizer, **where))

    def record(self) -> dict:
        """The JSON record over all prompts that are done."""
        return report.record(
            self.method.name,
            self.guarantee,
            report.merge(self.runs),
            report.merge(self.plain_runs) if self._is_compared else None,
            identical=self.identical,
            compile_seconds=self.compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def results(self) -> list[dict]:
        """Per prompt that is done."""
        run = report.merge(self.runs)
        return [
            {
                "line": row.prompt.line,
                "question_id": row.prompt.question_id,
                "text": text.plain,
                "token_ids": ids,
                "finish_reason": "stop" if text.is_stopped else "eos" if eos else "length",
                "prompt_tokens": len(row.ids),
                "tokens": len(ids),
                "target_passes": int(passes),
                "block_efficiency": len(ids) / max(int(passes), 1),
            }
            for row, text, ids, eos, passes in zip(
                self.rows[: len(self.texts)], self.texts, run.tokens, run.hit_eos, run.stats.target_passes, strict=True
            )
        ]


def _cut(run: report.Run, streams: list[TextStream]) -> report.Run:
    """Without what came after a stop string."""
    tokens = [
        text[: stream.taken] if stream.is_stopped else text for text, stream in zip(run.tokens, streams, strict=True)
    ]
    return run._replace(tokens=tokens)


def heading(row: Encoded, out: Console) -> None:
    """The line of the file that a text's prompt is from, if it is from one."""
    if row.prompt.line is not None:
        out.rule(f"line {row.prompt.line}", align="left", style="dim")


def show(generation: Generation, out: Console, adapt: str | None = None) -> None:
    """The table and, after a comparison, the verdict in words. adapt: what was left out of the target."""
    record = generation.record()
    table = Table(show_header=False)
    depth = [f"{x:.2f}" if x is not None else "-" for x in record["acceptance_by_depth"]]
    memory, first = record["peak_memory_bytes"], record["time_to_first_token"]
    rule, resumed = generation.options["verifier"], report.merge(generation.runs).resumed
    far = (
        f", TV {rule.distance:g} on a toy pair"
        if rule is not None and rule.distance is not None and not generation.settings.remark
        else ""
    )
    lossy = "" if adapt is None else f" of the target by {adapt}, which is lossy"
    lines = {
        "method": f"{record['method']} (guarantee: {record['guarantee']}{far}{lossy})",
        "tokens": f"{record['tokens'] - resumed} in {record['seconds']:.2f} s"
        + (f", {resumed} before the restart" if resumed else ""),
        "tokens/s": f"{record['tokens_per_second']:.1f}",
        "tokens per target pass": f"{record['block_efficiency']:.2f} with the bonus token, "
        f"{record['mean_accepted']:.2f} drafted",
        "acceptance by depth": " ".join(depth) or "-",
        "target passes": str(record["target_passes"]),
        "time to first token": "-" if first is None else f"{first:.3f} s",
        "compilation": f"{record['compile_seconds']:.1f} s",
        "peak memory": f"{memory / 2**20:.0f} MiB" if memory else "unknown",
    }
    if generation.plain:
        lines["plain decoding"] = f"{record['baseline_tokens_per_second']:.1f} tokens/s"
        lines["speed ratio"] = f"{record['speedup']:.2f}"
    for name, value in lines.items():
        table.add_row(name, value)
    out.print(table)
    if generation.plain:
        for line in verdict(generation):
            out.print(line, soft_wrap=True)


def verdict(generation: Generation) -> list[str]:
    """What the comparison found, in words."""
    if generation.identical is None:
        return [
            "outputs: not compared; sampled drafts keep the target's distribution, not its text for a given seed"
            if generation.guarantee == "distribution"
            else "outputs: not compared; this method promises equal text at temperature 0 only"
        ]
    if generation.identical:
        return ["outputs: identical to plain decoding"]
    lines = [] if generation.is_comparable else ["outputs: differ from plain decoding; this method is lossy"]
    for d in generation.differences:
        where = f"line {d['line']}: " if d["line"] else ""
        lines.append(
            f"outputs differ: {where}first at new token {d['position']}: {d['text']!r} instead of {d['plain_text']!r}; "
            f"the two largest logits there are {d['top_two_gap']:.2g} apart"
            + (" (a near-tie, decided by rounding)" if d["near_tie"] else "")
        )
    return lines
