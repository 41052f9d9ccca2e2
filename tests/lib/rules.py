"""The modules of acceptance rules: the package `specjax.verifiers` names the objects."""

import importlib
import importlib.util
import types


def module(name: str) -> types.ModuleType:
    """`specjax.verifiers.exact.<name>`, that of `lossy`, or what both use."""
    for folder in ("exact.", "lossy.", ""):
        full = f"specjax.verifiers.{folder}{name}"
        if importlib.util.find_spec(full):
            return importlib.import_module(full)
    raise ModuleNotFoundError(name)
