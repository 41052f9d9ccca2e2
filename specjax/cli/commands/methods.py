"""`specjax methods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion as words
from specjax.cli.options.common import parsed

HELP = """List the methods, what each promises about its text, and its paper.

distribution: the exact distribution of the target at any temperature, hence
equal text at temperature 0. greedy: equal text at temperature 0 only. lossy:
neither; TV: how far three tokens of its text are from the target's
distribution (total variation) on a toy pair, where keeping every draft gives
0.33. Of diffusion models - definition: how the
model is meant to be decoded. identical: the text of the definition it speeds
up. valid: every finished text is one of those that are allowed.

With a METHOD, its options, for --set.
"""


def methods(
    method: Annotated[
        str | None,
        typer.Argument(
            help="Show the options of this one.",
            show_default=False,
            autocompletion=words.of("drafters", "diffusion", "collaborations", "adaptive"),
        ),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the acceptance rules, for --verifier.")] = False,
    trees: Annotated[bool, typer.Option("--trees", help="List the trees, for --tree, and --draft-stop.")] = False,
    controllers: Annotated[bool, typer.Option("--controllers", help="List them, for --controller.")] = False,
    sampling: Annotated[bool, typer.Option("--sampling", help="List the ways to draw, for --sampling.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List all of these.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    from specjax.cli.output.console import Console, print_json

    out = Console()
    wanted = {"rules": rules, "trees": trees, "controllers": controllers, "sampling": sampling}
    if method is not None:
        extra = [f"--{name}" for name, asked in (wanted | {"all": everything}).items() if asked]
        o.require(not extra, f"{' and '.join(extra)} list what all methods share; leave METHOD {method} out")
        _show_one(method, as_json, out)
        return
    names = [name for name, asked in wanted.items() if asked or everything]
    if everything or not names:
        names = ["methods", *names]
    if "trees" in names:
        names.insert(names.index("trees") + 1, "stops")
    sections = {name: _rows(name) for name in names}
    if as_json:
        print_json(sections if len(names) > 1 else sections[names[0]])
        return
    for name, rows in sections.items():
        {"methods": _show_methods, "rules": _show_rules}.get(name, _show_forms)(rows, out, name)


methods.__doc__ = HELP


def _rows(section: str) -> list[dict[str, Any]]:
    """What there is of a section, as JSON."""
    from specjax import controllers, trees
    from specjax.catalog import METHODS, OF_FILES, PARAMETERS, SAMPLING
    from specjax.verifiers import VERIFIERS, rules_with_arrays

    if section == "methods":
        return [_described(row) for row in METHODS.values()]
    if section == "rules":
        fields = ("name", "guarantee", "draws", "summary", "paper", "distance", "setting")
        others, told = rules_with_arrays(), PARAMETERS | OF_FILES
        return [
            {field: getattr(rule, field) for field in fields}
            | {
                "options": _options(told[name][1] if name in told else ()),
                "takes_arrays": name in others.keys() - OF_FILES,
            }
            for name, rule in {**VERIFIERS, **others}.items()
        ]
    forms = {"trees": trees.FORMS, "stops": trees.stops.FORMS, "controllers": controllers.FORMS, "sampling": SAMPLING}
    return [{"form": form, "summary": summary} for form, summary in forms[section].items()]


def _described(row) -> dict[str, Any]:
    words = {field: getattr(row, field) for field in ("name", "kind", "guarantee", "summary", "paper")}
    return words | {"needs": sorted(row.needs), "takes": sorted(row.takes), "options": _options(row.options)}


def _options(options) -> list[dict[str, Any]]:
    from specjax.catalog import REQUIRED

    return [
        {
            "name": option.name,
            "form": option.form,
            "required": option.default is REQUIRED,
            "default": None if option.default is REQUIRED else option.default,
            "help": option.help,
        }
        for option in options
    ]


def _show_one(name: str, as_json: bool, out) -> None:
    from rich.table import Table

    from specjax.catalog import METHODS, find_drafter
    from specjax.cli.output.console import print_json

    row = METHODS.get(name) or parsed("METHOD", find_drafter, name)
    described = _described(row)
    if as_json:
        print_json(described)
        return
    say = lambda text: out.print(text, soft_wrap=True)
    say(f"{name}: {row.summary} (guarantee: {row.guarantee})")
    if row.paper:
        say(row.paper)
    if row.kind == "diffusion":
        say(f"of diffusion models; in Python, specjax.denoise(denoiser, {name!r}, ...)")
    if row.kind == "decoder":
        say(f"a loop of its own; in Python, specjax.decoders.{row.make.__name__}")
    if row.kind == "collaboration":
        say(f"a text of several models or samples: specjax generate --method {name}")
        say(f"in Python, specjax.collaborate.methods.{row.make.__name__}")
    if row.kind == "adaptive":
        say(f"of a target: specjax generate --adapt {name}; in Python, specjax.adaptive.{name}")
    for word in ("needs", "takes"):
        if described[word]:
            say(f"{word}: {', '.join(described[word])}")
    if row.cpu_options:
        say(f"on CPU: {', '.join(f'{option}={value}' for option, value in row.cpu_options.items())}")
    if not row.options:
        return
    table = Table("option", "value", "default", "what it is")
    for option in described["options"]:
        default = "required" if option["required"] else _text(option["default"])
        table.add_row(option["name"], option["form"], default, option["help"])
    out.print(table)


WIDE = 110
"""Columns of a terminal in which papers stand beside what a method does; `specjax methods METHOD` always has them."""


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _text(value: Any) -> str:
    """A default as it would be written."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...], out, lossy: int | None = None) -> None:
    """A table whose first two columns do not wrap; lossy rows, by the column that says so, are yellow."""
    from rich.table import Table

    table = Table(*heads)
    for column in table.columns[: 2 if len(heads) > 2 else 0]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"
    for row in rows:
        table.add_row(*row, style="yellow" if lossy is not None and row[lossy].startswith("lossy") else "")
    out.print(table)


def _show_methods(rows: list[dict[str, Any]], out, section: str) -> None:
    titles = {
        "drafter": "method",
        "decoder": "loop of its own",
        "diffusion": "of diffusion models",
        "collaboration": "of several models or samples",
        "adaptive": "of a target that does less",
    }
    heads, fields = ("guarantee", "needs", "what it does", "paper"), ("guarantee", "needs", "summary", "paper")
    count = len(heads) if out.width >= WIDE else len(heads) - 1
    for kind, title in titles.items():
        written = lambda row: (row["name"], *(_word(row[field]) for field in fields[:count]))
        _table([written(row) for row in rows if row["kind"] == kind], (title, *heads[:count]), out, lossy=1)
    out.print(
        "`specjax methods METHOD`: its options. Also: --rules, --trees, --controllers, --sampling; --all.", style="dim"
    )


def _show_rules(rows: list[dict[str, Any]], out, section: str) -> None:
    from specjax.catalog import OF_FILES, PARAMETERS
    from specjax.verifiers import ANY

    lines = []
    for row in rows:
        drawn = "any way" if set(row["draws"]) == set(ANY) else ", ".join(row["draws"])
        promise, summary = row["guarantee"], row["summary"]
        if row["distance"] is not None:
            promise, summary = f"{promise} (TV {row['distance']:g})", f"{summary}; TV at {row['setting']}"
        lines.append((row["name"], promise, drawn, summary, row["paper"]))
    _table(lines, ("rule", "guarantee", "for drafts drawn", "what it does", "paper"), out, lossy=1)
    written = lambda options: ",".join(option.name.upper() for option in options)
    calls = [f"{name}:{written(options)}" for name, (_, options) in (PARAMETERS | OF_FILES).items()]
    arrays = ", ".join(row["name"] for row in rows if row["takes_arrays"])
    out.print(f"With parameters, in this order or by name (typical:delta=0.4): {', '.join(calls)}.", style="dim")
    out.print(f"Not for --verifier, since they take arrays: {arrays}. See specjax.verifiers.", style="dim")


def _show_forms(rows: list[dict[str, Any]], out, section: str) -> None:
    titles = {"trees": "--tree", "stops": "--draft-stop", "controllers": "--controller", "sampling": "--sampling"}
    _table([(row["form"], row["summary"]) for row in rows], (titles[section], "what it is"), out)
