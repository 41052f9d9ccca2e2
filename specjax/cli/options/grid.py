"""--grid: a method with several values of its options, each a run of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.cli.options.common import require
from specjax.cli.options.drafter_flags import read_options, read_setting


class Way(NamedTuple):
    """A method as it is run."""

    method: str
    options: dict[str, Any]


def read_ways(names: Sequence[str], settings: Sequence[str] | None, grid: Sequence[str] | None) -> dict[str, Way]:
    """What is run, by what it is called: each method with all combinations of the values of --grid, beside --set.

    Raises: UsageError for a method or an option that there is not, a value that it does not take, or one given twice.
    """
    from specjax.catalog import METHODS

    rows = {name: METHODS[name] for name in names}
    fixed = read_options(settings, rows)
    axes: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in rows}  # values as they are written, and read
    for text in grid or ():
        name, option, values = read_setting(text, rows, "--grid")
        given = "--set" if option.name in fixed[name] else "--grid"
        require(
            option.name not in fixed[name] | axes[name],
            f"--grid {text}: {given} has set {option.name} already; leave one out",
        )
        axes[name][option.name] = {one: option.parse(one, f"--grid {option.name}") for one in values.split(",")}
    return dict(itertools.chain.from_iterable(_ways(name, fixed[name], own) for name, own in axes.items()))


def _ways(method: str, fixed: dict[str, Any], axes: dict[str, dict[str, Any]]):
    for chosen in itertools.product(*(values.items() for values in axes.values())):
        said = ", ".join(f"{option}={written}" for option, (written, _) in zip(axes, chosen, strict=True))
        own = {option: value for option, (_, value) in zip(axes, chosen, strict=True)}
        yield f"{method} {said}".strip(), Way(method, fixed | own)
