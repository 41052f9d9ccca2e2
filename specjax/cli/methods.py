"""`specjax methods`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from specjax.cli import options as o


def methods(
    as_json: o.JsonOption = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the acceptance rules instead, for --verifier.")] = False,
) -> None:
    """List the methods, what each promises about its text, and its paper.

    distribution: the exact law of the target at any temperature, hence equal
    text at temperature 0. greedy: equal text at temperature 0 only. lossy:
    neither; TV: how far three tokens of its text are from the target's law
    (total variation) on a toy pair, where keeping every draft gives 0.33.
    """
    from rich.console import Console
    from rich.table import Table

    from specjax.catalog.methods import METHODS
    from specjax.verifiers import ANY, VERIFIERS, rules_with_arrays

    others = rules_with_arrays() if rules else {}
    rows: list[Any] = list({**VERIFIERS, **others}.values() if rules else METHODS.values())
    fields: tuple[str, ...] = ("name", "guarantee", "draws" if rules else "needs_draft", "summary", "paper")
    if as_json:
        fields += ("distance", "setting") if rules else ("needs_datastore",)
        print(json.dumps([{name: getattr(row, name) for name in fields} for row in rows]))
        return
    heads = ("rule", "guarantee", "for drafts drawn") if rules else ("method", "guarantee", "needs")
    table = Table(*heads, "what it does", "paper")
    for column in table.columns[:2]:
        column.no_wrap = True
    table.columns[4].overflow = "fold"
    for row in rows:
        if rules:
            third = "any way" if set(row.draws) == set(ANY) else ", ".join(row.draws)
        else:
            third = "draft" if row.needs_draft else "datastore" if row.needs_datastore else ""
        style = "yellow" if row.guarantee == "lossy" else ""
        promise, summary = row.guarantee, row.summary
        if rules and row.distance is not None:
            promise, summary = f"{promise} (TV {row.distance:g})", f"{summary}; TV at {row.setting}"
        table.add_row(row.name, promise, third, summary, row.paper, style=style)
    out = Console()
    out.print(table)
    if others:
        out.print(
            f"Not for --verifier, since they take arrays: {', '.join(others)}. See specjax.verifiers.", style="dim"
        )
