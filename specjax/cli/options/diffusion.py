"""Flags of diffusion models: methods, --grid, and flags that do not apply to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.cli.options.drafter_flags import read_options, read_setting
from specjax.errors import require

REASON = "applies to autoregressive models, and this is a diffusion model"
"""The reason of errors about flags that drafts or autoregressive models need."""


def is_diffusion(methods: Sequence[str], target: str | None) -> bool:
    """Return True if the methods or the checkpoint are those of a diffusion model."""
    from specjax.catalog import METHODS

    if any(METHODS[name].kind == "diffusion" for name in methods if name in METHODS):
        return True
    if target is None:
        return False
    from specjax.models import loading

    return loading.is_diffusion(target)


def check_method(method: str, target: str | None) -> str:
    """Return the name of a diffusion method.

    Raises: UsageError for a method of another kind, or one with inputs that the command line cannot load.
    """
    from specjax.catalog import METHODS, of_kind

    names = ", ".join(of_kind("diffusion"))
    require(method in METHODS, f'--method: unknown method "{method}"; for a diffusion model choose {names}')
    row = METHODS[method]
    require(
        row.kind == "diffusion",
        f"--method {method} is a {row.kind} for autoregressive models, and --target {target} is a diffusion model; "
        f"choose one of {names}",
    )
    require(
        not row.needs,
        f"--method: the command line cannot load the inputs of {method}; call specjax.diffusion.methods.{method} in "
        "Python",
    )
    return method


class Variant(NamedTuple):
    """A method with values of its options."""

    method: str
    options: dict[str, Any]


def read_variants(
    names: Sequence[str], settings: Sequence[str] | None, grid: Sequence[str] | None
) -> dict[str, Variant]:
    """Return the runs of a comparison by label: each method with all combinations of the values of --grid and --set.

    Raises: UsageError for an unknown method or option, a wrong value, or an option that is set twice.
    """
    from specjax.catalog import METHODS

    rows = {name: METHODS[name] for name in names}
    fixed = read_options(settings, rows)
    axes: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in rows}  # values by their text
    for text in grid or ():
        name, option, values = read_setting(text, rows, "--grid")
        flag = "--set" if option.name in fixed[name] else "--grid"
        require(
            option.name not in fixed[name] | axes[name],
            f"--grid {text}: {flag} sets {option.name} already; remove one of them",
        )
        axes[name][option.name] = {value: option.parse(value, f"--grid {option.name}") for value in values.split(",")}
    return dict(itertools.chain.from_iterable(_variants(name, fixed[name], grid) for name, grid in axes.items()))


def _variants(
    method: str, fixed: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Variant]]:
    """Yield the label and the options of each combination of values."""
    for combination in itertools.product(*(values.items() for values in axes.values())):
        label = ", ".join(f"{option}={text}" for option, (text, _) in zip(axes, combination, strict=True))
        options = {option: value for option, (_, value) in zip(axes, combination, strict=True)}
        yield f"{method} {label}".strip(), Variant(method, {**fixed, **options})
