"""Collection of the rows from the files of the methods, without importing these files.

A method's file has its row as the constant METHOD. Importing all of these files would import JAX, which takes seconds;
parsing them takes a fraction of one. A row may use literals and the names in `NAMESPACE` only.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specjax.catalog import shared
from specjax.catalog.method import Method, TypicalAcceptance
from specjax.catalog.options import REQUIRED, Option


class Place(NamedTuple):
    """A folder or file with modules that have rows."""

    package: str  # a package directly below specjax
    path: str  # relative to the package
    factories: str  # the package of the factories


PLACES = (
    Place("drafters", "combined", "specjax.drafters.combined"),
    Place("trees", "autoregressive.py", "specjax.trees"),
    Place("drafters", "model", "specjax.drafters.model"),
    Place("diffusion", "drafters", "specjax.diffusion.drafters"),
    Place("drafters", "lookup", "specjax.drafters.lookup"),
    Place("drafters", "tables", "specjax.drafters.tables"),
    Place("drafters", "layers", "specjax.drafters.layers"),
    Place("models", "heads", "specjax.drafters.heads"),  # a head's row is in the file of its mathematics
    Place("decoders", "", "specjax.decoders"),
    Place("diffusion", "methods", "specjax.diffusion.methods"),
    Place("collaborate", "methods", "specjax.collaborate.methods"),
    Place("adaptive", "", "specjax.adaptive"),
    Place("compression", "", "specjax.compression"),
)
"""The places of all rows, in the order of the catalogue."""

NAMESPACE: dict[str, Any] = {
    "TypicalAcceptance": TypicalAcceptance, "Method": Method, "Option": Option, "REQUIRED": REQUIRED, "shared": shared,
}  # fmt: skip
"""The names that the expression of a row may use; a method's file imports them from `specjax.catalog`."""


def collect_methods() -> Iterator[Method]:
    """Read the rows of all places."""
    for place in PLACES:
        root = find_package(place.package) / place.path
        for file in [root] if root.suffix == ".py" else sorted(root.glob("*.py")):
            for row in read_rows(file):
                yield row._replace(module=f"{place.factories}.{row.module or file.stem}")


def read_rows(file: Path) -> list[Method]:
    """Evaluate the constant METHOD of a file, or METHODS, a tuple of rows; return no rows if it has neither."""
    source = file.read_text(encoding="utf-8")
    if "\nMETHOD" not in source:
        return []
    value = read_constant(source, ("METHOD", "METHODS"), NAMESPACE)
    return [value] if isinstance(value, Method) else list(value or ())


def read_constant(source: str, names: tuple[str, ...], namespace: dict[str, Any]) -> Any:
    """Evaluate the first assignment to one of these names at the top level of a module; return None without one."""
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in names for target in targets):
            expression = ast.Expression(statement.value)  # type: ignore[attr-defined]
            return eval(compile(expression, "<constant>", "eval"), dict(namespace))
    return None


def find_package(name: str) -> Path:
    """Return the folder of a package directly below specjax, without importing it."""
    spec = importlib.util.find_spec(f"specjax.{name}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
