"""`specjax compare-verifiers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from specjax.cli.options import common as o
from specjax.cli.options.groups import ModelOptions, WarpOptions, with_groups
from specjax.errors import UsageError, require

if TYPE_CHECKING:
    from specjax import analysis
    from specjax.cli.output.console import Console

HELP = """Compare acceptance rules on the distributions of a target and a draft model.

The target samples a text after each prompt of PROMPTS (in the format of
bench), and the distributions of both models are recorded at every new
position. With --record they come from a file of --save-record, and no models
are loaded. For each rule and number of drafted tokens per node, the table has
the mean acceptance probability over all positions. Next to it is the best
value that any rule can reach for drafts that are drawn in the same way:
independently, without replacement (distinct), the most likely tokens (top),
or these and one sampled token. For the last two, the rule is optimal, so its
value is the best one. The standard rule verifies one draft. The number after
+- is the standard error, as if positions were independent.

The column guarantee is explained by `specjax methods --help`. With "coupled",
target and draft are sampled with the same noise.

The values are exact, except for recursive_rejection and coupled, which are
simulated where no short formula exists. A record has the 1024 most likely
tokens of each model; the probability of the other tokens is printed as
dropped.
"""


DRAFTS = {
    "chain": "one",
    "with_replacement": "independent",
    "without_replacement": "distinct",
    "top_and_sampled": "top + sampled",
    "point_mass": "top",
}
"""Kinds of draws in the table."""


@dataclass(frozen=True)
class RecordSampling(WarpOptions):
    """Length, distribution and seed of the recorded texts."""

    max_new_tokens: o.LengthOption = 32
    temperature: o.TemperatureOption = 1.0

    def __post_init__(self):
        super().__post_init__()
        require(
            self.temperature > 0,
            f"--temperature must be above 0, not {self.temperature:g}: at 0 one token has all of the probability, and "
            "all rules are equal",
        )


@dataclass(frozen=True)
class RecordOptions:
    """The recorded distributions, and the output."""

    record: Annotated[
        Path | None, typer.Option("--record", help="Use the distributions in this file.", show_default=False)
    ] = None
    save_record: Annotated[
        Path | None,
        typer.Option("--save-record", help="Write the distributions to this file, .npz.", show_default=False),
    ] = None
    drafts: Annotated[str, typer.Option("--drafts", help="Numbers of drafted tokens per node, joined by commas.")] = (
        "2,3,4"
    )
    limit: Annotated[
        int | None, typer.Option("--limit", help="Maximum number of prompts. Default: all.", show_default=False)
    ] = None
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; the plot has the same name, .png.")] = Path(
        "specjax-verifiers.json"
    )
    raw: o.RawOption = False
    as_json: o.JsonOption = False

    def __post_init__(self):
        o.check_minimum("--limit", self.limit, 1)
        _ = self.sizes
        require(self.out.suffix != ".png", f"--out must be the JSON file, not {self.out}; the plot has the same name")
        written = {self.out.resolve(), self.out.with_suffix(".png").resolve()}
        for flag, path in (("--record", self.record), ("--save-record", self.save_record)):
            require(path is None or path.resolve() not in written, f"{flag} and --out name one file; choose two")

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of --drafts."""
        try:
            sizes = sorted({int(n) for n in self.drafts.split(",")})
        except ValueError:
            raise UsageError(f'--drafts must be numbers joined by commas, such as 2,3,4, not "{self.drafts}"') from None
        require(sizes[0] >= 1 and sizes[-1] <= 16, f"--drafts must be from 1 to 16 per node, not {self.drafts}")
        return sizes


class Recorded(NamedTuple):
    """The distributions of both models, facts about them, and the bad lines of the prompt file."""

    distributions: analysis.Record
    about: dict[str, Any]
    bad: list


@with_groups
def compare_verifiers(
    models: ModelOptions,
    sampling: RecordSampling,
    options: RecordOptions,
    prompts: Annotated[
        Path | None, typer.Argument(help="The prompt file, JSONL; not with --record.", show_default=False)
    ] = None,
) -> None:
    from specjax import analysis
    from specjax.cli.output import files
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.decoding import build_decoding
    from specjax.cli.runs.environment import stage

    build_decoding(sampling)  # checks the values
    models.check_raw(options.raw)
    _check_sources(prompts, models, options)
    out, save_record = options.out, options.save_record
    files.check_writable(out, "--out")
    if save_record is not None:
        files.check_writable(save_record, "--save-record")
    log = Console(stderr=True)
    if options.record is not None:
        distributions = o.parse_flag("--record", analysis.load_record, options.record)
        recorded = Recorded(distributions, {"record": str(options.record)}, [])
    else:
        assert prompts is not None
        recorded = _record(log, prompts, models, options, sampling)
    distributions = recorded.distributions
    if save_record is not None:
        files.write_atomically(save_record, lambda file: analysis.save_record(file, distributions))
    with stage(log, "comparing", f"compared on {len(distributions.p)} positions"):
        comparison = analysis.compare(distributions.p, distributions.q, options.sizes, seed=sampling.seed)
    document = _document(distributions, comparison, recorded.about)
    picture = analysis.plot(comparison, _title(document))
    files.write_json(out, document)
    files.write_atomically(out.with_suffix(".png"), lambda file: file.write(picture))
    if options.as_json:
        print_json(document)
    else:
        _show(document, Console())
    log.print(f"wrote {out} and {out.with_suffix('.png')}", style="dim", soft_wrap=True)
    if recorded.bad:
        from specjax.cli.options.prompts import describe

        raise UsageError(describe(recorded.bad, prompts))


compare_verifiers.__doc__ = HELP


def _check_sources(prompts: Path | None, models: ModelOptions, options: RecordOptions) -> None:
    """Raise a UsageError unless the flags name a record, or prompts and two models."""
    if options.record is None:
        require(prompts is not None, "PROMPTS is missing; give a prompt file, or a file of --save-record with --record")
        require(models.draft is not None, "--draft is missing; the comparison needs a target and a draft model")
        return
    unused = {
        "PROMPTS": prompts, "--target": models.target, "--draft": models.draft, "--save-record": options.save_record
    }  # fmt: skip
    extra = [name for name, value in unused.items() if value is not None]
    require(not extra, f"--record has its own distributions; remove {' and '.join(extra)}")


def _record(
    log: Console, path: Path, models: ModelOptions, options: RecordOptions, sampling: RecordSampling
) -> Recorded:
    """Load the models, and record their distributions.

    Raises: KeyboardInterrupt with the file that has the recorded prompts.
    """
    import jax
    from rich.progress import Progress

    from specjax import analysis
    from specjax.cli.options import prompts as p
    from specjax.cli.output import files
    from specjax.cli.runs.session import open_session, provenance

    lines, bad = p.read(path, "PROMPTS", jsonl=True)
    require(bool(lines), f"PROMPTS: {p.describe(bad, path)}; no line is good" if bad else "")
    session = open_session(log, models)
    rows, skipped = p.encode(
        lines[: options.limit], session.tokenizer, session.capacity, sampling.max_new_tokens, raw=options.raw
    )
    require(bool(rows), f"PROMPTS: {p.describe(skipped, path)}" if skipped else "")
    assert session.draft is not None
    parts: list[analysis.Record] = []
    partial = options.save_record or options.out.with_suffix(".npz")
    try:
        with Progress(console=log, disable=not log.is_terminal) as bar:
            task = bar.add_task("recording", total=len(rows))

            def add(part: analysis.Record) -> None:
                parts.append(part)
                bar.advance(task)

            distributions = analysis.record(
                session.target, session.draft, [row.ids for row in rows], key=jax.random.key(sampling.seed),
                max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
                top_p=sampling.top_p, eos=session.tokenizer.eos, on_prompt=add,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not parts:
            raise
        files.write_atomically(partial, lambda file: analysis.save_record(file, analysis.join_records(parts)))
        message = f"{partial} has the {len(parts)} of {len(rows)} prompts that are finished; compare them with --record"
        raise KeyboardInterrupt(message) from None
    for entry in skipped:
        log.print(f"skipped: {p.describe([entry], path)}", soft_wrap=True)
    about = provenance(session) | {"max_new_tokens": sampling.max_new_tokens, "seed": sampling.seed}
    return Recorded(distributions, about | {"skipped": [entry._asdict() for entry in skipped]}, bad)


def _document(distributions: analysis.Record, comparison: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison as JSON."""
    from specjax.cli.runs.environment import describe_command

    return {
        **describe_command(),
        **about,
        **distributions.about,
        "positions": comparison.rows,
        "prompts": len({int(number) for number in distributions.prompt}),
        "dropped": {name: float(distributions.dropped[:, i].mean()) for i, name in enumerate(("target", "draft"))},
        "bounds": {draws: {str(n): value for n, value in by_n.items()} for draws, by_n in comparison.bounds.items()},
        "rules": [entry._asdict() for entry in comparison.entries],
    }


def _title(document: dict[str, Any]) -> str:
    """Return the models, the settings and the sizes in words."""
    warp = [f"temperature {document['temperature']:g}"]
    warp += [f"{name} {document[name]:g}" for name in ("top_k", "top_p") if document.get(name) is not None]
    pair = f"{document['target']}, drafts of {document['draft']}"
    return f"{pair}\n{', '.join(warp)}; {document['positions']} positions of {document['prompts']} prompts"


def _show(document: dict[str, Any], out: Console) -> None:
    """Print the table."""
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
    out.print(f"dropped probability: target {dropped['target']:.1e}, draft {dropped['draft']:.1e}", style="dim")
