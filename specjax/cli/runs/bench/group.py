"""A batch of prompts of one task in `specjax bench`, and its runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from specjax.bench import records
from specjax.cli.options.prompts import Encoded

PLAIN = "plain decoding"
"""The program that drafters are compared with."""


@dataclass
class Group:
    """Prompts of one task that are decoded together, and their runs."""

    task: str
    rows: list[Encoded]
    runs: dict[str, records.MeasuredRun] = field(default_factory=dict)  # by program: a method or its baseline
    differences: dict[str, list[dict]] = field(default_factory=dict)  # by method

    @property
    def ids(self) -> list[list[int]]:
        return [row.ids for row in self.rows]
