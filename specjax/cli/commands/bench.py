"""`specjax bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, diffusion
from specjax.cli.options.groups import (
    DraftOptions,
    ModelOptions,
    SamplingOptions,
    refuse_flags,
    with_groups,
)
from specjax.errors import require

if TYPE_CHECKING:
    from specjax.cli.options.prompts import Encoded, Lines, Prompt
    from specjax.cli.runs.bench.comparison import BenchOptions
    from specjax.cli.runs.session import Session

HELP = """Compare methods with plain decoding on a prompt file.

PROMPTS is JSONL in the format of Spec-Bench: {"question_id": 1, "category":
"qa", "turns": ["..."]}. The first turn is used, in the chat template. The
categories of MT-bench are one task, mt_bench. --limit counts per task.

Each prompt is decoded plainly and with each method in turn, in one process,
--repeats times; its time is the median. Before that, an untimed run per size
of the prompt buffer compiles each program (compile_seconds is the difference
from the timed runs). With fewer than three repeats, each prompt also has an
untimed run. The speedup of a task is the ratio of tokens per second over all
its prompts, prefill included. Block efficiency is tokens per target pass,
bonus token included; mean_accepted excludes it.

If texts that must equal plain decoding differ, no speedup of the method is
reported, and the exit code is 1. Near-ties are an exception, because rounding
may decide them: the rounding of both widths of a pass, which is measured,
exceeds the gap of the logits. They are listed, and the speedup is reported.

The JSON file is written after every prompt, so an interrupted run leaves the
finished prompts ("left" counts the others).

The baseline of diffusion models is one column per pass in the same blocks.
The cost of a pass depends on its columns. The report therefore has tokens per
pass, columns of the canvas per token (col/tok), and columns computed per token
with padding. It also has the share of equal tokens. --grid runs several values
of a method's options, such as --grid tau=0.5,0.7,0.9. Some methods guarantee
the text of another procedure: "identical" that of the procedure without
drafts, and "distribution" at temperature 0 that of the model's autoregressive
mode. In float32, such a method gets no speedup if its text differs.

Prompts that do not fit the model are skipped and listed. Bad lines are listed
with their numbers, the other lines run, and the exit code is 2.
"""


@dataclass(frozen=True)
class BenchFlags:
    """Prompts, repeats and output of a bench."""

    limit: Annotated[
        int | None, typer.Option("--limit", help="Maximum prompts per task. Default: all.", show_default=False)
    ] = None
    offset: Annotated[int, typer.Option("--offset", help="Prompts of each task to skip.")] = 0
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs of each prompt; the median counts.")] = 3
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; the plot has the same name, .png.")] = Path(
        "specjax-bench.json"
    )
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="NAME=VALUE,VALUE,... runs a diffusion method once per value of an option. With several methods, "
            "write METHOD.NAME=... Repeated flags run all combinations.",
            show_default=False,
        ),
    ] = None
    batch_size: o.BatchOption = 1
    raw: o.RawOption = False
    as_json: o.JsonOption = False

    def __post_init__(self):
        for flag, value, minimum in (
            ("--limit", self.limit, 1), ("--offset", self.offset, 0), ("--repeats", self.repeats, 1),
            ("--batch-size", self.batch_size, 1),
        ):  # fmt: skip
            o.check_minimum(flag, value, minimum)


class BenchRequest(NamedTuple):
    """The flags of `bench`."""

    prompts: Path
    methods: list[str]
    models: ModelOptions
    draft: DraftOptions
    sampling: SamplingOptions
    bench: BenchFlags


@with_groups
def bench(
    prompts: Annotated[Path, typer.Argument(help="The prompt file, JSONL.", show_default=False)],
    models: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    options: BenchFlags,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="A method of `specjax methods`; repeatable. Default: that of generate; fast_dllm for a diffusion "
            "model.",
            show_default=False,
            autocompletion=completion.words("drafters", "decoders", "diffusion"),
        ),
    ] = None,
) -> None:
    models.check_raw(options.raw)
    flags = BenchRequest(prompts, list(method or ()), models, draft, sampling, options)
    if diffusion.is_diffusion(flags.methods, models.target):
        _bench_denoiser(flags)
        return
    require(not options.grid, "--grid needs a diffusion model; remove it, or run bench once per value")
    _bench_drafters(flags)


bench.__doc__ = HELP


def _bench_drafters(flags: BenchRequest) -> None:
    """Compare drafters with plain decoding."""
    from specjax.catalog import METHODS
    from specjax.cli.output.console import Console
    from specjax.cli.runs.bench.drafters import DrafterComparison
    from specjax.cli.runs.loops import checks
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.session import with_costs

    options, log = flags.bench, Console(stderr=True)
    selection = select(
        flags.methods, flags.models, flags.draft, flags.sampling, batch_size=options.batch_size,
        kinds=("drafter", "decoder"),
    )  # fmt: skip
    explicit = flags.sampling.different
    for name in checks.only_loops(selection.methods):
        require(
            "any_order" not in METHODS[name].needs,
            f"--method {name} fills in missing tokens, which the prompts of bench do not have; use specjax generate",
        )
        checks.refuse_other_flags(flags.draft)
        checks.check_loop(name, selection.options, explicit)
    lines = _read(flags)
    session, method = selection.open(log)
    rows, run_options = _encode(lines, session, flags)
    session = with_costs(session, selection.costs, min(options.batch_size, len(rows)), log, selection.decoding.settings)
    methods = [method] if selection.is_default else selection.methods
    run = DrafterComparison(session, selection.decoding, methods, selection.options, rows, run_options, explicit)
    execute(run, Report(log, Console(), options.as_json, bad=lines[1], path=flags.prompts))


def _bench_denoiser(flags: BenchRequest) -> None:
    """Compare methods of a diffusion model with one column per pass."""
    from specjax.cli.output.console import Console
    from specjax.cli.runs.bench.denoisers import DenoiserComparison
    from specjax.cli.runs.decoding import build_decoding
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.session import open_denoiser

    allowed = frozenset(vars(flags.models).keys() - {"draft", "same_bits", "head_set"} | {"settings"})
    refuse_flags((flags.models, flags.draft), allowed, diffusion.REASON)
    decoding = build_decoding(flags.sampling)
    names = [diffusion.check_method(name, flags.models.target) for name in flags.methods or ["fast_dllm"]]
    variants = diffusion.read_variants(names, flags.draft.settings, flags.bench.grid)
    lines = _read(flags)
    log = Console(stderr=True)
    session, denoiser = open_denoiser(log, flags.models)
    rows, run_options = _encode(lines, session, flags)
    run = DenoiserComparison(session, denoiser, decoding, variants, rows, run_options)
    execute(run, Report(log, Console(), flags.bench.as_json, bad=lines[1], path=flags.prompts))


def _read(flags: BenchRequest) -> Lines:
    """Return the selected lines of the prompt file, and the bad ones."""
    from specjax.cli.options import prompts as p
    from specjax.cli.output import files

    out, path = flags.bench.out, flags.prompts
    require(out.suffix != ".png", f"--out must be the JSON file, not {out}; the plot has the same name")
    files.check_writable(out, "--out")
    lines, bad = p.read(path, "PROMPTS", jsonl=True)
    require(bool(lines), f"PROMPTS: {p.describe(bad, path)}; no line is good" if bad else "")
    lines = first_per_task(lines, flags.bench.offset, flags.bench.limit)
    require(bool(lines), f"--offset {flags.bench.offset} skips all prompts; lower it")
    return lines, bad


def _encode(lines: Lines, session: Session, flags: BenchRequest) -> tuple[list[Encoded], BenchOptions]:
    """Return the prompts that fit the models, and the options of the run with the skipped prompts."""
    from specjax.cli.options import prompts as p
    from specjax.cli.runs.bench.comparison import BenchOptions

    options = flags.bench
    rows, skipped = p.encode(
        lines[0], session.tokenizer, session.capacity, flags.sampling.max_new_tokens, raw=options.raw,
        owner=session.capacity_owner,
    )  # fmt: skip
    require(bool(rows), f"PROMPTS: {p.describe(skipped, flags.prompts)}" if skipped else "")
    return rows, BenchOptions(options.out, options.batch_size, options.repeats, skipped)


def first_per_task(lines: Sequence[Prompt], offset: int, limit: int | None) -> list[Prompt]:
    """Return the lines from `offset` to `offset + limit` of every task, in the order of the file."""
    counts: dict[str, int] = {}
    selected = []
    for line in lines:
        index = counts[line.task] = counts.get(line.task, -1) + 1
        if index >= offset and (limit is None or index < offset + limit):
            selected.append(line)
    return selected
