"""`specjax methods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options.common import parse_flag

if TYPE_CHECKING:
    from specjax.catalog import Method, Option
    from specjax.cli.output.console import Console

HELP = """List the methods, the guarantee of each, and its paper.

With the guarantee "distribution", the text has the exact distribution of the
target at any temperature. At temperature 0 it is the target's greedy text.
"greedy" guarantees only the latter, and "lossy" neither.

Three guarantees exist for diffusion models only. A "definition" is the
decoding procedure that was published with a model. An "identical" method
writes the text of such a procedure in fewer passes. The text of a "valid"
method always belongs to a given language. A column is a position of the text,
and a method decides its token.

--rules lists the acceptance rules. For a lossy rule, TV is the total
variation distance between its distribution of three tokens and the target's.
It was computed for two toy models, where a rule that accepts every draft has
0.33.

With a METHOD, the command lists the options of this method, for --set.
"""


def methods(
    method: Annotated[
        str | None,
        typer.Argument(
            help="Show the options of this method.",
            show_default=False,
            autocompletion=completion.words(*completion.KINDS),
        ),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the acceptance rules, for --verifier.")] = False,
    trees: Annotated[bool, typer.Option("--trees", help="List the trees, for --tree, and --draft-stop.")] = False,
    controllers: Annotated[bool, typer.Option("--controllers", help="List the controllers, for --controller.")] = False,
    sampling: Annotated[bool, typer.Option("--sampling", help="List the ways to sample, for --sampling.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List all of these.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    from specjax.cli.output.console import Console, print_json

    out = Console()
    flags = {"rules": rules, "trees": trees, "controllers": controllers, "sampling": sampling}
    if method is not None:
        extra = [f"--{name}" for name, is_set in (flags | {"all": everything}).items() if is_set]
        o.require(not extra, f"{' and '.join(extra)} list values that apply to all methods; leave METHOD {method} out")
        _show_one(method, as_json, out)
        return
    names = [name for name, is_set in flags.items() if is_set or everything]
    if everything or not names:
        names = ["methods", *names]
    if "trees" in names:
        names.insert(names.index("trees") + 1, "stops")
    sections = {name: _section(name) for name in names}
    if as_json:
        print_json(sections if len(names) > 1 else sections[names[0]])
        return
    for name, rows in sections.items():
        {"methods": _show_methods, "rules": _show_rules}.get(name, _show_forms)(rows, out, name)


methods.__doc__ = HELP


def _section(name: str) -> list[dict[str, Any]]:
    """Return the rows of a section as JSON values."""
    if name == "methods":
        from specjax.catalog import METHODS

        return [_describe(row) for row in METHODS.values()]
    if name == "rules":
        return _rules()
    from specjax.catalog import SAMPLING
    from specjax.catalog.forms import controller_forms, stop_forms, tree_forms

    forms = {"trees": tree_forms, "stops": stop_forms, "controllers": controller_forms, "sampling": lambda: SAMPLING}
    return [{"form": form, "summary": summary} for form, summary in forms[name]().items()]


def _rules() -> list[dict[str, Any]]:
    from specjax.catalog import OF_FILES, PARAMETERS, PRESETS
    from specjax.verifiers import VERIFIERS, rules_with_arrays

    fields = ("name", "guarantee", "draws", "summary", "paper", "distance", "setting")
    with_arrays, options = rules_with_arrays(), PARAMETERS | OF_FILES
    return [
        {field: getattr(rule, field) for field in fields}
        | {"options": _options(options.get(name, ())), "takes_arrays": name in with_arrays.keys() - OF_FILES}
        | {"presets": list(PRESETS.get(name, ()))}
        for name, rule in {**VERIFIERS, **with_arrays}.items()
    ]


def _describe(row: Method) -> dict[str, Any]:
    from specjax.catalog.inputs import command_of

    fields = {field: getattr(row, field) for field in ("name", "kind", "guarantee", "summary", "paper")}
    return fields | {
        "needs": sorted(row.needs), "takes": sorted(row.takes), "options": _options(row.settable),
        "command": command_of(row), "python": row.path,
    }  # fmt: skip


def _options(options: Sequence[Option]) -> list[dict[str, Any]]:
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


def _show_one(name: str, as_json: bool, out: Console) -> None:
    from rich.table import Table

    from specjax.catalog import METHODS, find_drafter
    from specjax.catalog.inputs import missing_inputs
    from specjax.cli.output.console import print_json

    row = METHODS.get(name) or parse_flag("METHOD", find_drafter, name)
    description = _describe(row)
    if as_json:
        print_json(description)
        return
    write = lambda text: out.print(text, soft_wrap=True)
    write(f"{name}: {row.summary} (guarantee: {row.guarantee})")
    if row.paper:
        write(row.paper)
    form = {
        "drafter": "", "decoder": "has its own decoding loop; ", "diffusion": "for diffusion models; ",
        "collaboration": "several models or samples write one text; ",
        "adaptive": "runs a part of the target's layers; ",
        "compression": "shortens prompts or their caches; ",
        "cache": "compresses the cache of keys and values; ",
    }[row.kind]  # fmt: skip
    command, missing = description["command"], " and ".join(missing_inputs(row))
    write(form + (f"run {command}" if command else f"the command line cannot provide its {missing}"))
    write(f"in Python, {row.path}")
    for word in ("needs", "takes"):
        if description[word]:
            write(f"{word}: {', '.join(description[word])}")
    if row.cpu_options:
        write(f"on CPU: {', '.join(f'{option}={value}' for option, value in row.cpu_options.items())}")
    if not row.settable:
        return
    table = Table("option", "value", "default", "meaning")
    for option in description["options"]:
        default = "required" if option["required"] else _text(option["default"])
        table.add_row(option["name"], option["form"], default, option["help"])
    out.print(table)


WIDE = 110
"""Columns of a terminal that shows papers in the table of methods; `specjax methods METHOD` always shows them."""


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _text(value: Any) -> str:
    """Return a default in the form that --set parses."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...], out: Console, lossy: int | None = None) -> None:
    """Print a table; the first two columns do not wrap. `lossy` is the column of the guarantee, yellow if lossy."""
    from rich.table import Table

    table = Table(*heads)
    for column in table.columns[: 2 if len(heads) > 2 else 0]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"
    for row in rows:
        table.add_row(*row, style="yellow" if lossy is not None and row[lossy].startswith("lossy") else "")
    out.print(table)


def _show_methods(rows: list[dict[str, Any]], out: Console, section: str) -> None:
    titles = {
        "drafter": "drafter",
        "decoder": "own decoding loop",
        "diffusion": "for diffusion models",
        "collaboration": "several models or samples",
        "adaptive": "adaptive depth",
        "compression": "compression of prompts",
        "cache": "compression of caches",
    }
    heads, fields = ("guarantee", "needs", "description", "paper"), ("guarantee", "needs", "summary", "paper")
    count = len(heads) if out.width >= WIDE else len(heads) - 1
    for kind, title in titles.items():
        lines = [(row["name"], *(_cell(row[field]) for field in fields[:count])) for row in rows if row["kind"] == kind]
        _table(lines, (title, *heads[:count]), out, lossy=1)
    out.print(
        "`specjax methods METHOD` lists the options of a method. More lists: --rules, --trees, --controllers, "
        "--sampling; --all.",
        style="dim",
    )


def _show_rules(rows: list[dict[str, Any]], out: Console, section: str) -> None:
    from specjax.catalog import OF_FILES, PARAMETERS
    from specjax.verifiers import ANY

    lines = []
    for row in rows:
        draws = "any" if set(row["draws"]) == set(ANY) else ", ".join(row["draws"])
        guarantee, summary = row["guarantee"], row["summary"]
        if row["distance"] is not None:
            guarantee, summary = f"{guarantee} (TV {row['distance']:g})", f"{summary}; TV at {row['setting']}"
        lines.append((row["name"], guarantee, draws, summary, row["paper"]))
    _table(lines, ("rule", "guarantee", "sampling of drafts", "description", "paper"), out, lossy=1)
    upper_names = lambda options: ",".join(option.name.upper() for option in options)
    calls = [f"{name}:{upper_names(options)}" for name, options in (PARAMETERS | OF_FILES).items()]
    with_arrays = ", ".join(row["name"] for row in rows if row["takes_arrays"])
    out.print(f"With parameters, in this order or by name (typical:delta=0.4): {', '.join(calls)}.", style="dim")
    out.print(f"In Python only, where they take arrays (specjax.verifiers): {with_arrays}.", style="dim")
    for preset in (preset for row in rows for preset in row["presets"]):
        out.print(preset, style="dim", soft_wrap=True)


def _show_forms(rows: list[dict[str, Any]], out: Console, section: str) -> None:
    titles = {"trees": "--tree", "stops": "--draft-stop", "controllers": "--controller", "sampling": "--sampling"}
    _table([(row["form"], row["summary"]) for row in rows], (titles[section], "description"), out)
