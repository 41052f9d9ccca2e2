"""`specjax bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, diffusion
from specjax.cli.options.drafter_flags import read_costs, read_drafting, recognised, resolve_defaults

if TYPE_CHECKING:
    from specjax.cli.output.console import Console
    from specjax.cli.runs.bench import Runs
    from specjax.cli.runs.session import Session

HELP = """Compare methods with plain decoding on a prompt file.

PROMPTS is JSONL as in Spec-Bench: {"question_id": 1, "category": "qa",
"turns": ["..."]}; the first turn counts, in the chat template. The categories
of MT-bench are one task, mt_bench. --limit is per task.

Every prompt is decoded plainly and with each method in turn, in one process,
--repeats times; its time is the median. Before that, an untimed run per size
of the prompt buffer compiles each program (compile_seconds: how much longer
it takes than the timed ones); with fewer than three repeats each prompt has an
untimed run of its own too. The speed-up of a task is the ratio of tokens
per second over all its prompts, reading them included. Block efficiency is
tokens per target pass, the bonus token included; mean_accepted excludes it.

Texts that should equal those of plain decoding and do not are a refusal: no
speed-up is stated and the exit code is 1. One exception is listed instead: a
near-tie, where both tokens are within 1e-3 of the largest logit (0.25 in
bfloat16, 1 with an int8 cache), which rounding may decide either way; the
text then counts as not identical, but the speed-up is kept.

The JSON is written anew after every prompt, so that a run that is stopped
leaves what it had measured ("left": prompts it did not reach).

Diffusion models are compared with one column a pass in the same blocks.
Tokens per pass is no speed there, as a pass costs by its columns: columns
computed per token are stated beside it, and the share of tokens that are
those of one column a pass; --grid states them over a method's options, such
as --grid tau=0.5,0.7,0.9. A method that promises the text of the procedure
that it speeds up is refused where it has another one.

Prompts that do not fit the model are skipped and listed. Bad lines are listed
with their numbers, the good ones run, and the exit code is 2.
"""


def bench(
    prompts: Annotated[Path, typer.Argument(help="The prompt file, JSONL.", show_default=False)],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="May be given several times; default: auto, with a head too; with a draft model two_model; of a "
            "diffusion model fast_dllm.",
            show_default=False,
            autocompletion=completion.words("drafters", "diffusion"),
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Prompts per task; default: all.", show_default=False)
    ] = None,
    offset: Annotated[int, typer.Option("--offset", help="Prompts of each task to pass over.")] = 0,
    max_new_tokens: o.LengthOption = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs of each prompt; the median counts.")] = 3,
    out: Annotated[Path, typer.Option("--out", help="The JSON to write; the plot goes beside it, as .png.")] = Path(
        "specjax-bench.json"
    ),
    target: o.TargetOption = None,
    draft: o.DraftOption = None,
    datastore: o.DatastoreOption = None,
    num_draft_tokens: o.BudgetOption = None,
    tree: o.TreeOption = None,
    draft_stop: o.StopOption = None,
    stop: o.OldStopOption = None,
    exit_layer: o.ExitOption = None,
    settings: o.SetOption = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="NAME=VALUE,VALUE,..., an option of a diffusion method with several values, each of which is run; of "
            "several methods METHOD.NAME=... Given several times, all combinations are.",
            show_default=False,
        ),
    ] = None,
    source: o.SourceOption = None,
    controller: o.ControllerOption = None,
    costs: o.CostsOption = None,
    verifier: o.VerifierOption = None,
    sampling: o.SamplingOption = "speculative",
    batch_size: o.BatchOption = 1,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    cache_dtype: o.CacheDtypeOption = None,
    max_positions: o.PositionsOption = None,
    same_bits: o.SameBitsOption = False,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    arguments = dict(locals())
    decoding = o.Settings(max_new_tokens, temperature, top_k, top_p, seed, sampling, verifier, controller)
    for flag, value, least in (("--limit", limit, 1), ("--offset", offset, 0), ("--repeats", repeats, 1)):
        o.require(value is None or value >= least, f"{flag} must be at least {least}, not {value}")
    o.require(batch_size >= 1, f"--batch-size must be at least 1, not {batch_size}")
    if diffusion.is_diffusion(method, target):
        _denoise(arguments, decoding)
        return
    o.require(not grid, "--grid is of diffusion models; leave it out, or run bench once for each value")
    head = recognised(draft)
    named = {
        "--num-draft-tokens": num_draft_tokens, "--tree": tree, "--draft-stop": draft_stop, "--exit-layer": exit_layer
    }  # fmt: skip
    names = list(dict.fromkeys(method or ()))
    if not names:
        chosen, decoding, named = resolve_defaults(None, draft, head, decoding, named, settings)
        names = [chosen]
    drafting = read_drafting(
        names, draft, datastore, named=named, settings=settings, source=source, batch_size=batch_size, old_stop=stop,
        head=head,
    )  # fmt: skip
    weighed = read_costs(costs, names, decoding.controller)

    from specjax.cli.output.console import Console
    from specjax.cli.runs.bench import Bench
    from specjax.cli.runs.session import open_session, weigh

    lines, bad = _read(prompts, offset, limit, out)
    log = Console(stderr=True)
    if decoding.remark:
        log.print(decoding.remark, markup=False, highlight=False, soft_wrap=True)
    models = o.Models(target, draft, dtype, no_cache, cache_dtype, max_positions, same_bits)
    session = open_session(log, models, datastore, has_head=head is not None)
    rows, skipped = _encode(lines, session, max_new_tokens, raw, prompts)
    session = weigh(session, weighed, min(batch_size, len(rows)), log)
    run = Bench(session, decoding, names, drafting, rows, batch_size, repeats)
    _run(run, bad, skipped, prompts, out, as_json, log)


bench.__doc__ = HELP


def _denoise(given: dict[str, Any], decoding: o.Settings) -> None:
    """Of a diffusion model, with the arguments of `bench`."""
    from specjax.cli.options.grid import read_ways
    from specjax.cli.output.console import Console

    target, prompts = given["target"], given["prompts"]
    diffusion.check_flags(given)
    names = [diffusion.check_method(name, target) for name in given["method"] or ["fast_dllm"]]
    ways = read_ways(names, given["settings"], given["grid"])
    lines, bad = _read(prompts, given["offset"], given["limit"], given["out"])
    log = Console(stderr=True)

    from specjax.cli.runs.bench_denoising import DenoisingBench
    from specjax.cli.runs.session import open_denoiser

    models = o.Models(target, None, given["dtype"], given["no_cache"], given["cache_dtype"], given["max_positions"])
    session, denoiser = open_denoiser(log, models)
    rows, skipped = _encode(lines, session, given["max_new_tokens"], given["raw"], prompts)
    run = DenoisingBench(session, denoiser, decoding, ways, rows, given["batch_size"], given["repeats"])
    _run(run, bad, skipped, prompts, given["out"], given["as_json"], log)


def _read(prompts: Path, offset: int, limit: int | None, out: Path) -> tuple[list, list]:
    """(good lines, bad ones) of the prompt file."""
    from specjax.cli.options import prompts as p
    from specjax.cli.output import files

    o.require(out.suffix != ".png", "--out names the JSON file; the plot goes beside it by itself")
    files.check_writable(out, "--out")
    lines, bad = p.read(prompts, "PROMPTS", jsonl=True)
    o.require(bool(lines), f"PROMPTS: {p.describe(bad, prompts)}; no line is good" if bad else "")
    lines = first_per_task(lines, offset, limit)
    o.require(bool(lines), f"--offset {offset} passes over all prompts; lower it")
    return lines, bad


def _encode(lines: list, session: Session, max_new_tokens: int, raw: bool, prompts: Path) -> tuple[list, list]:
    """(prompts that fit the model, those that do not)."""
    from specjax.cli.options import prompts as p

    rows, skipped = p.encode(lines, session.tokenizer, session.capacity, max_new_tokens, raw, session.shortest)
    o.require(bool(rows), f"PROMPTS: {p.describe(skipped, prompts)}" if skipped else "")
    return rows, skipped


def _run(run: Runs, bad: list, skipped: list, prompts: Path, out: Path, as_json: bool, log: Console) -> None:
    """Run everything, writing as it goes, and say what came out."""
    from specjax.cli.options import prompts as p
    from specjax.cli.output import files
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs import bench_output

    document: dict = {}
    total = sum(len(group.rows) for group in run.groups)
    try:
        for _ in run.run(log):
            document = bench_output.document(run, bad, skipped)
            files.write_json(out, document)
    except KeyboardInterrupt:
        kept = f"{out} has the {total - run.left} of {total} prompts that had run"
        raise KeyboardInterrupt(kept if document else "") from None
    picture = bench_output.plot(document)
    files.write_atomically(out.with_suffix(".png"), lambda file: file.write(picture))
    if as_json:
        print_json(document)
    else:
        bench_output.show(document, Console())
    log.print(f"wrote {out} and {out.with_suffix('.png')}", style="dim", soft_wrap=True)
    for entry in skipped:
        log.print(f"skipped: {p.describe([entry], prompts)}", soft_wrap=True)
    for entry in document["differences"]:
        log.print(bench_output.describe_difference(entry), soft_wrap=True)
    _exit(document, bad, prompts)


def first_per_task(lines: list, offset: int, limit: int | None) -> list:
    """The lines from `offset` to `offset + limit` of every task, in the order of the file."""
    seen: dict[str, int] = {}
    kept = []
    for line in lines:
        place = seen[line.task] = seen.get(line.task, -1) + 1
        if place >= offset and (limit is None or place < offset + limit):
            kept.append(line)
    return kept


def _exit(document: dict, bad: list, path: Path) -> None:
    from specjax.cli.options.prompts import describe
    from specjax.cli.output.console import complain
    from specjax.errors import UsageError

    if bad:
        raise UsageError(describe(bad, path) + "; mend or remove these lines")
    refused = [name for name, entry in document["overall"].items() if entry["refused"]]
    if refused:
        complain(f"refused to state the speed of {', '.join(refused)}: outputs that should match do not")
        raise typer.Exit(1)
