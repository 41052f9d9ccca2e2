"""`specjax methods`."""

from __future__ import annotations

import json

from specjax.cli import options as o


def methods(as_json: o.JsonOption = False) -> None:
    """List the methods, what each promises about its text, and its paper.

    distribution: the exact law of the target at any temperature, hence equal
    text at temperature 0. greedy: equal text at temperature 0 only. lossy:
    neither.
    """
    from rich.console import Console
    from rich.table import Table

    from specjax.methods import METHODS

    fields = ("name", "guarantee", "needs_draft", "summary", "paper")
    if as_json:
        print(json.dumps([{name: getattr(method, name) for name in fields} for method in METHODS.values()]))
        return
    table = Table("method", "guarantee", "draft", "what it does", "paper")
    for column in table.columns[:3]:
        column.no_wrap = True
    table.columns[4].overflow = "fold"
    for method in METHODS.values():
        style = "yellow" if method.guarantee == "lossy" else ""
        needs = "needed" if method.needs_draft else ""
        table.add_row(method.name, method.guarantee, needs, method.summary, method.paper, style=style)
    Console().print(table)
