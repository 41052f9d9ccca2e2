"""Imports by name, for functions of modules that import JAX."""

from __future__ import annotations

import importlib
from typing import Any


def import_name(path: str) -> Any:
    """Return the object that a path such as `specjax.trees:parse` names, and import its module if needed."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
