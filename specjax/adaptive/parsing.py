"""Parsing of depth policies from text, such as `calm:0.8`."""

from __future__ import annotations

from specjax.catalog.inputs import missing_inputs
from specjax.catalog.methods import METHODS, of_kind
from specjax.catalog.options import read_call
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy


def parse_depth(spec: str, horizon: int | None = None) -> DepthPolicy:
    """Return the depth policy of a text such as `calm` or `calm:0.8,every=5`.

    Args:
      horizon: value of the option `horizon` if the method has it and the text does not set it.

    Raises: UsageError for an unknown method, one with inputs that only Python has, or an invalid option.
    """
    name = spec.partition(":")[0]
    loadable = [row.name for row in of_kind("adaptive").values() if not missing_inputs(row)]
    if name not in loadable:
        is_adaptive = name in METHODS and METHODS[name].kind == "adaptive"
        reason = "needs inputs that only Python has" if is_adaptive else "is not a method of adaptive depth"
        raise UsageError(f'"{name}" {reason}; choose one of {", ".join(loadable)}')
    row = METHODS[name]
    values = read_call(spec, row.options)
    if horizon is not None and row.option("horizon"):
        values = {"horizon": horizon} | values
    return row.make(**values)


def check_depth(spec: str) -> str:
    """Return the text unchanged. Raises: UsageError if `parse_depth` rejects it."""
    parse_depth(spec)
    return spec
