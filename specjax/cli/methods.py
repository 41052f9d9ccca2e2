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
    neither; TV: how far its text is from the target's law, on a toy pair.
    """
    from rich.console import Console
    from rich.table import Table

    from specjax.methods import METHODS
    from specjax.verifiers import ANY, VERIFIERS

    rows: list[Any] = list(VERIFIERS.values() if rules else METHODS.values())
    fields = ("name", "guarantee", "draws" if rules else "needs_draft", "summary", "paper")
    if as_json:
        print(json.dumps([{name: getattr(row, name) for name in fields} for row in rows]))
        return
    heads = ("rule", "guarantee", "for drafts drawn") if rules else ("method", "guarantee", "draft")
    table = Table(*heads, "what it does", "paper")
    for column in table.columns[:2]:
        column.no_wrap = True
    table.columns[4].overflow = "fold"
    for row in rows:
        if rules:
            third = "any way" if set(row.draws) == set(ANY) else ", ".join(row.draws)
        else:
            third = "needed" if row.needs_draft else ""
        style = "yellow" if row.guarantee == "lossy" else ""
        distance = f" (TV {row.distance:g})" if rules and row.distance is not None else ""
        table.add_row(row.name, row.guarantee + distance, third, row.summary, row.paper, style=style)
    Console().print(table)
