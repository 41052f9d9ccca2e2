"""Procedures of diffusion methods, built from the names of the methods, and the procedures they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from specjax.catalog.method import Method
from specjax.catalog.methods import of_kind
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.schedules.blocks import blocks
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


ONE = "one column per pass"


class Reference(NamedTuple):
    """The procedure that a method is compared with."""

    name: str  # in words
    denoiser: Denoiser
    procedure: Procedure
    is_promised: bool  # True if the method guarantees the text of this procedure


def reference_of(
    method: Method, denoiser: Denoiser, procedure: Procedure, options: Mapping[str, Any], *, is_greedy: bool
) -> Reference:
    """Return the procedure that a method speeds up, to which its guarantee refers.

    `identical`: the procedure without drafts. `distribution`: the model's autoregressive mode, whose text is equal at
    temperature 0 only. Other guarantees do not name a text, and the quality reference is one column per pass.

    Args:
      procedure: the method's procedure for `denoiser` with `options`. is_greedy: True at temperature 0.
    """
    one = one_column_per_pass(method, denoiser, options)
    if method.guarantee == "distribution" and procedure.verify is not None and procedure.verify.mode is not None:
        single = procedure.verify.mode(denoiser)
        return Reference("the model's autoregressive mode", single, Procedure(blocks(1), quota()), is_greedy)
    if method.guarantee == "identical":
        undrafted = procedure.replace(verify=None)
        name = ONE if are_equal(undrafted, one) else "the procedure without drafts"
        return Reference(name, denoiser, undrafted, True)
    return Reference(ONE, denoiser, one, False)


def one_column_per_pass(method: Method, denoiser: Denoiser, options: Mapping[str, Any]) -> Procedure:
    """Return the quality reference: each pass decides the most confident column, in the blocks of the method.

    A method for models with full attention without an option `block` has one block. A method with a choice of
    remaskings ranks columns by its own confidence.
    """
    if method.option("remasking") is not None:
        return method.make(denoiser, remasking="static")
    option = method.option("block")
    size = options.get("block", None if option is None else option.default)
    return of_kind("diffusion")["llada"].make(denoiser, **({} if denoiser.is_causal else {"block": size}))


def are_equal(procedure: Procedure, other: Procedure) -> bool:
    """Return True if two procedures have equal parts. Procedures with arrays count as different."""
    return not jax.tree.leaves(procedure) and not jax.tree.leaves(other) and procedure == other
