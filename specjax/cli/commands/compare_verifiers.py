"""`specjax compare-verifiers`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.errors import UsageError

HELP = """Compare acceptance rules on the distributions of a real pair.

The target samples a text after each prompt of PROMPTS (as for bench), and the
distributions of both models are recorded at every new position; or the distributions come from
a file of --save-record (--record: no models are loaded then). For each rule
and number of drafts per node, the table shows how often one of them is
accepted, in the mean over positions, next to the best that any rule can do
with drafts drawn the same way: independently, without replacement (distinct),
the likeliest ones (top), or all but one of these. The last two have a rule
that is the best for them, so their gap is 0. The standard rule takes one
draft. +- is the standard error over positions, as if independent.

guarantee: distribution keeps the target's distribution, greedy its greedy text only,
lossy neither. "coupled" draws target and draft with the same noise.

Closed forms, except for recursive_rejection and coupled, which are simulated
where no sum is short enough. A record holds the likeliest 1024 tokens of
either model; the mass of the others is shown as dropped.
"""


DRAFTS = {
    "chain": "one",
    "with_replacement": "independent",
    "without_replacement": "distinct",
    "top_and_sampled": "top + sampled",
    "point_mass": "top",
}
"""Kinds of draws in the table."""


def compare_verifiers(
    prompts: Annotated[
        Path | None, typer.Argument(help="The prompt file, JSONL; not with --record.", show_default=False)
    ] = None,
    target: o.TargetOption = None,
    draft: o.DraftOption = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Compare on the distributions in this file.", show_default=False)
    ] = None,
    save_record: Annotated[
        Path | None,
        typer.Option("--save-record", help="Write the distributions to this file, .npz.", show_default=False),
    ] = None,
    drafts: Annotated[str, typer.Option("--drafts", help="Drafts per node, joined by commas.")] = "2,3,4",
    limit: Annotated[
        int | None, typer.Option("--limit", help="Prompts to take; default: all.", show_default=False)
    ] = None,
    max_new_tokens: o.LengthOption = 32,
    temperature: o.TemperatureOption = 1.0,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    seed: o.SeedOption = 0,
    out: Annotated[Path, typer.Option("--out", help="The JSON to write; the plot goes beside it, as .png.")] = Path(
        "specjax-verifiers.json"
    ),
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    cache_dtype: o.CacheDtypeOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    settings = o.Settings(max_new_tokens, temperature, top_k, top_p, seed)
    sizes = _sizes(drafts)
    o.require(temperature > 0, "--temperature must be above 0: at 0 only one token is possible and all rules are equal")
    o.require(limit is None or limit >= 1, f"--limit must be at least 1, not {limit}")
    _check_sources(prompts, target, draft, record, save_record)

    from specjax import analysis
    from specjax.cli.output import files
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import stage

    o.require(out.suffix != ".png", "--out names the JSON file; the plot goes beside it by itself")
    files.check_writable(out, "--out")
    for flag, path in (("--record", record), ("--save-record", save_record)):
        written = {out.resolve(), out.with_suffix(".png").resolve()}
        o.require(path is None or path.resolve() not in written, f"{flag} and --out name one file; choose two")
    if save_record is not None:
        files.check_writable(save_record, "--save-record")
    log = Console(stderr=True)
    bad: list = []
    if record is not None:
        distributions, about = o.parsed("--record", analysis.load_record, record), {"record": str(record)}
    else:
        assert prompts is not None
        kept = save_record or out.with_suffix(".npz")
        distributions, about, bad = _record(
            log, prompts, target, draft, limit, settings, raw, dtype, no_cache, cache_dtype=cache_dtype, kept=kept
        )
    if save_record is not None:
        files.write_atomically(save_record, lambda file: analysis.save_record(file, distributions))
    with stage(log, "comparing", f"compared on {len(distributions.p)} positions"):
        comparison = analysis.compare(distributions.p, distributions.q, sizes, seed=seed)
    document = _document(distributions, comparison, about)
    picture = analysis.plot(comparison, _title(document))
    files.write_json(out, document)
    files.write_atomically(out.with_suffix(".png"), lambda file: file.write(picture))
    if as_json:
        print_json(document)
    else:
        _show(document, Console())
    log.print(f"wrote {out} and {out.with_suffix('.png')}", style="dim", soft_wrap=True)
    if bad:
        from specjax.cli.options.prompts import describe

        raise UsageError(describe(bad, prompts) + "; mend or remove these lines")


compare_verifiers.__doc__ = HELP


def _sizes(drafts: str) -> list[int]:
    """The numbers of --drafts."""
    try:
        sizes = sorted({int(n) for n in drafts.split(",")})
    except ValueError:
        raise UsageError(f'--drafts must be numbers joined by commas, such as 2,3,4, not "{drafts}"') from None
    o.require(sizes[0] >= 1 and sizes[-1] <= 16, f"--drafts must be from 1 to 16 per node, not {drafts}")
    return sizes


def _check_sources(prompts, target, draft, record, save_record) -> None:
    """Either a record, or prompts and two models."""
    if record is None:
        o.require(prompts is not None, "give PROMPTS, or a file of recorded distributions with --record")
        o.require(draft is not None, "--draft is missing: the distributions of two models are compared")
        return
    given = {"PROMPTS": prompts, "--target": target, "--draft": draft, "--save-record": save_record}
    extra = [name for name, value in given.items() if value is not None]
    o.require(not extra, f"--record brings its own distributions; leave {' and '.join(extra)} out")


def _record(log, path: Path, target, draft, limit, settings: o.Settings, raw, dtype, no_cache, cache_dtype, kept: Path):
    """Load the models and record: (Record, where it is from, bad lines).

    Raises: KeyboardInterrupt that says what of it the file `kept` holds.
    """
    import jax
    from rich.progress import Progress

    from specjax import analysis
    from specjax.cli.options import prompts as p
    from specjax.cli.output import files
    from specjax.cli.runs.session import open_session, provenance

    lines, bad = p.read(path, "PROMPTS", jsonl=True)
    o.require(bool(lines), f"PROMPTS: {p.describe(bad, path)}; no line is good" if bad else "")
    session = open_session(log, o.Models(target, draft, dtype, no_cache, cache_dtype))
    rows, skipped = p.encode(lines[:limit], session.tokenizer, session.capacity, settings.max_new_tokens, raw)
    o.require(bool(rows), f"PROMPTS: {p.describe(skipped, path)}" if skipped else "")
    assert session.draft is not None
    parts: list[analysis.Record] = []
    try:
        with Progress(console=log, disable=not log.is_terminal) as bar:
            task = bar.add_task("recording", total=len(rows))

            def add(part: analysis.Record) -> None:
                parts.append(part)
                bar.advance(task)

            distributions = analysis.record(
                session.target,
                session.draft,
                [row.ids for row in rows],
                key=jax.random.key(settings.seed),
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                eos=session.tokenizer.eos,
                on_prompt=add,
            )
    except KeyboardInterrupt:
        if not parts:
            raise
        files.write_atomically(kept, lambda file: analysis.save_record(file, analysis.join_records(parts)))
        said = f"{kept} has the {len(parts)} of {len(rows)} prompts that were recorded; compare them with --record"
        raise KeyboardInterrupt(said) from None
    for entry in skipped:
        log.print(f"skipped: {p.describe([entry], path)}", soft_wrap=True)
    about = provenance(session) | {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed}
    return distributions, about | {"skipped": [entry._asdict() for entry in skipped]}, bad


def _document(distributions, comparison, about: dict) -> dict:
    """Everything that was found, as JSON."""
    import shlex
    import sys

    from specjax import __version__

    document = {
        "command": shlex.join(["specjax", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "specjax": __version__,
        **about,
        **distributions.about,
        "positions": comparison.rows,
        "prompts": len({int(number) for number in distributions.prompt}),
        "dropped": {name: float(distributions.dropped[:, i].mean()) for i, name in enumerate(("target", "draft"))},
        "bounds": {draws: {str(n): value for n, value in by_n.items()} for draws, by_n in comparison.bounds.items()},
        "rules": [entry._asdict() for entry in comparison.entries],
    }
    return document


def _title(document: dict) -> str:
    warp = [f"temperature {document['temperature']:g}"]
    warp += [f"{name} {document[name]:g}" for name in ("top_k", "top_p") if document.get(name) is not None]
    pair = f"{document['target']}, drafts of {document['draft']}"
    return f"{pair}\n{', '.join(warp)}; {document['positions']} positions of {document['prompts']} prompts"


def _show(document: dict, out) -> None:
    """The table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for heading in ("rule", "guarantee", "drafts"):
        table.add_column(heading, no_wrap=True)
    for heading in ("n", "accepted", "+-", "best", "gap"):
        table.add_column(heading, justify="right")
    last = None
    for entry in document["rules"]:
        new = entry["rule"] != last
        last = entry["rule"]
        table.add_row(
            *((entry["rule"], entry["guarantee"], DRAFTS[entry["draws"]]) if new else ("", "", "")),
            str(entry["n"]),
            f"{entry['acceptance']:.4f}",
            "" if entry["standard_error"] is None else f"{entry['standard_error']:.3f}",
            f"{entry['bound']:.4f}",
            f"{round(entry['gap'], 4) + 0.0:.4f}",  # no minus zero
        )
    out.print(_title(document), soft_wrap=True)
    out.print(table)
    dropped = document["dropped"]
    out.print(f"dropped mass: target {dropped['target']:.1e}, draft {dropped['draft']:.1e}", style="dim")
