"""Procedures of diffusion methods, built from the names of the methods."""

from __future__ import annotations

from typing import Any

from specjax.catalog.methods import of_kind
from specjax.diffusion.types import Denoiser, Procedure
from specjax.errors import UsageError


def procedure_of(method: str | Procedure, denoiser: Denoiser, **options: Any) -> Procedure:
    """Return the procedure of a diffusion method, given its name. A procedure is returned unchanged.

    Raises: UsageError for an unknown name, or options that the method does not have.
    """
    if isinstance(method, Procedure):
        if options:
            raise UsageError(
                f"{next(iter(options))} needs a method given by name; pass it to the function that built the procedure"
            )
        return method
    rows = of_kind("diffusion")
    if method not in rows:
        raise UsageError(f'unknown diffusion method "{method}"; choose one of {", ".join(rows)}')
    row = rows[method]
    names = [*row.needs, *(option.name for option in row.options)]
    wrong = [name for name in options if name not in names]
    if wrong:
        raise UsageError(f"method {method} has no option {wrong[0]}; it has {', '.join(names) or 'none'}")
    return row.make(denoiser, **options)
