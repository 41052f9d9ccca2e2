"""Inputs of methods that the command line can provide. It imports no JAX."""

from __future__ import annotations

from specjax.catalog.method import Method

PROVIDED = {
    "drafter": {"draft", "head", "datastore", "denoiser"},
    "collaboration": {"draft", "safe", "segmenter", "judging", "cues"},
}
"""The inputs that flags provide, by kind of method: models of --draft, a --datastore, and words of --set."""


def missing_inputs(row: Method) -> list[str]:
    """Return the required inputs that only Python can provide. An optional router counts: it replaces the judge."""
    return sorted((row.needs | (row.takes & {"router"})) - PROVIDED.get(row.kind, set()))
