"""The texts that describe trees, stop conditions and controllers, with one line about each."""

from __future__ import annotations

from typing import Any

from specjax.catalog.collection import find_package, read_constant


def tree_forms() -> dict[str, str]:
    """Return `specjax.trees.FORMS` without importing JAX."""
    return _read_forms("trees", "parsing.py")


def stop_forms() -> dict[str, str]:
    """Return `specjax.trees.stops.FORMS` without importing JAX."""
    return _read_forms("trees", "stops.py")


def controller_forms() -> dict[str, str]:
    """Return `specjax.controllers.FORMS` without importing JAX."""
    return _read_forms("controllers", "parsing.py")


def _read_forms(package: str, file: str) -> dict[str, str]:
    source = (find_package(package) / file).read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"SHAPES": read_constant(source, ("SHAPES",), {})}
    return read_constant(source, ("FORMS",), namespace)
