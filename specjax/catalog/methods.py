"""The catalogue of methods by name, and lookups in it.

The command line, the planner, the site and the conformance tests read it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping

from specjax.catalog.collection import collect_methods
from specjax.catalog.inputs import missing_inputs
from specjax.catalog.method import Kind, Method
from specjax.catalog.options import read_call
from specjax.errors import UsageError


class Catalogue(Mapping[str, Method]):
    """All methods by name. It is read from the files of the methods when it is first used."""

    def __getitem__(self, name: str) -> Method:
        return _rows()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_rows())

    def __len__(self) -> int:
        return len(_rows())

    def __repr__(self) -> str:
        return f"Catalogue({', '.join(self)})"


@functools.cache
def _rows() -> dict[str, Method]:
    return {row.name: row for row in collect_methods()}


METHODS: Mapping[str, Method] = Catalogue()
"""Every method of every kind by name."""


def of_kind(kind: Kind) -> dict[str, Method]:
    """Return the rows of one kind."""
    return {name: method for name, method in METHODS.items() if method.kind == kind}


def find_drafter(name: str) -> Method:
    """Return the row of a drafter. Raises: UsageError for an unknown name or a method of another kind."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(of_kind('drafter'))}"
        raise UsageError(f'unknown method "{name}"; {fix}')
    method = METHODS[name]
    if method.kind == "diffusion":
        raise UsageError(
            f"method {name} is for diffusion models; call specjax.denoise, or use a diffusion model as --target"
        )
    if method.kind == "adaptive" and missing_inputs(method):
        raise UsageError(
            f"method {name} selects layers of the target and is not a drafter; the command line cannot provide its "
            f"{' and '.join(missing_inputs(method))}, so call {method.path} in Python"
        )
    if method.kind == "adaptive":
        raise UsageError(
            f"method {name} selects layers of the target and is not a drafter; use --adapt {name}, or --method thinned "
            f"--set depth={name} (specjax.adaptive in Python)"
        )
    if method.kind == "compression":
        raise UsageError(
            f"method {name} compresses prompts and is not a drafter; use --compress {name} ({method.path} in Python)"
        )
    if method.kind == "cache":
        raise UsageError(
            f"method {name} compresses the cache and is not a drafter; use --cache-dtype {name} ({method.path} in "
            "Python)"
        )
    if method.kind != "drafter":
        raise UsageError(
            f"method {name} has its own decoding loop and is not a drafter; call {method.path}(...) in Python"
            + ("" if missing_inputs(method) else f", or run specjax generate --method {name}")
        )
    return method


def find_inner_drafter(spec: str) -> Method:
    """Return the row of a drafter that another drafter contains, such as `suffix:7,bias=2`.

    Raises: UsageError for a name that is not a drafter, or a drafter with other needs than a datastore.
    """
    rows = {name: method for name, method in of_kind("drafter").items() if method.needs <= {"datastore"}}
    name = spec.partition(":")[0]
    if name not in rows:
        raise UsageError(f'"{name}" cannot be used inside another drafter; choose one of {", ".join(rows)}')
    return rows[name]


def check_inner_drafter(spec: str) -> str:
    """Return the text itself. Raises: UsageError unless it names an inner drafter and options of it."""
    read_call(spec, find_inner_drafter(spec).options)
    return spec


def check_writing_drafter(spec: str) -> str:
    """Return the text itself. Raises: UsageError unless it names two_model, or a drafter that needs no input."""
    rows = [row for row in of_kind("drafter").values() if not row.needs or row.name == "two_model"]
    name = spec.partition(":")[0]
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        listed = ", ".join(row.name for row in rows)
        raise UsageError(f'"{name}" cannot draft in texts of several models or samples; choose one of {listed}')
    read_call(spec, row.options)
    return spec


def check_inner_drafters(specs: str) -> str:
    """Return the text itself. Raises: UsageError unless its parts, joined by +, name inner drafters."""
    return "+".join(map(check_inner_drafter, specs.split("+")))
