"""Acceptance rates by rank for a plan, from numbers or from a measurement of specjax."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, read_json

MOST_DRAFTS = 4096  # maximum number of drafts per token in a measurement


def read_acceptance(source: str | Path | Sequence[float]) -> tuple[list[float], str]:
    """Return (probabilities by rank, their source). Raises: UsageError for invalid numbers or an unknown file."""
    if isinstance(source, str | Path):
        path = Path(os.path.expanduser(source))
        if path.suffix == ".json" or os.path.isfile(path):  # unlike path.is_file, it accepts names that are too long
            return _from_file(path)
        try:
            numbers = [float(part) for part in str(source).split(",")]
        except ValueError:
            raise UsageError(
                f'--acceptance must be numbers joined by commas, such as .6,.2,.1, or a JSON file, not "{source}"'
            ) from None
        source = numbers
    curve = [float(x) for x in source]
    if not curve or min(curve) < 0 or sum(curve) > 1 + 1e-9 or not np.isfinite(curve).all():
        raise UsageError(f"--acceptance must be probabilities that sum to at most 1, not {curve}")
    return curve, "given"


def _from_file(path: Path) -> tuple[list[float], str]:
    try:
        with guarded_read(path):
            return _measured(read_json(path), path)
    except UsageError as error:
        raise UsageError(f"--acceptance: {str(error).removeprefix('--acceptance: ')}") from None


def _measured(document: Any, path: Path) -> tuple[list[float], str]:
    if not isinstance(document, dict) or not {"rules", "overall"} & set(document):
        raise UsageError(
            f"--acceptance: {path} was not written by specjax compare-verifiers or specjax bench: it has neither "
            "rules nor overall"
        )
    curve, source = _from_rules(document["rules"]) if "rules" in document else _from_bench(document["overall"])
    if not curve:
        raise UsageError(f"--acceptance: {path} contains no acceptance rate; give numbers such as .6,.2,.1")
    return read_acceptance(curve)[0], f"{path.name}: {source}"


def _from_rules(rules: list[dict]) -> tuple[list[float], str]:
    """Read a result of compare-verifiers, and return the probability that each additional draft adds."""
    by_rule = {name: {e["n"]: e["acceptance"] for e in rules if e.get("rule") == name} for name in
               ("standard", "recursive_rejection", "specinfer")}  # fmt: skip
    name = next((name for name in ("recursive_rejection", "specinfer") if by_rule[name]), "standard")
    total = by_rule["standard"] | by_rule[name]
    curve, previous, previous_count = [], 0.0, 0
    for n in sorted(total):
        if not 0 < n <= MOST_DRAFTS:
            raise UsageError(f"--acceptance: the file has rules with {n} drafts; write it again")
        step = max(total[n] - previous, 0.0) / (n - previous_count)  # drafts between two measured sizes share equally
        curve += [step] * (n - previous_count)
        previous, previous_count = max(total[n], previous), n
    return sorted(curve, reverse=True), name


def _from_bench(overall: dict[str, dict]) -> tuple[list[float], str]:
    """Read a result of bench, and return the mean over depths of the first method that drafted.

    A bench measures no siblings, so the result is for a chain.
    """
    for name, record in overall.items():
        depths = [a for a in record.get("acceptance_by_depth") or [] if a is not None]
        if depths:
            return [sum(depths) / len(depths)], f"{name}, rank 1 only"
    return [], ""
