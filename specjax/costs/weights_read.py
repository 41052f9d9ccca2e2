"""Bytes of the weights that the matrix products of a program read, in the formats in which they are stored.

A product can multiply by weights that the program expands from few bits. So each value of the program carries the bytes
of the inputs from which it is made without a product. A product reads those of the operand that has more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import Literal

from specjax.arrays import scopes
from specjax.models.storage import bits_of

Choice = Callable[[Sequence[float]], float]
PRODUCTS: Mapping[str, Choice] = MappingProxyType({"dot_general": max, "pallas_call": sum})
"""Operations whose results carry no bytes, and the bytes that they read of those of their operands."""


def bytes_read(jaxpr: Any, choose: Choice, experts: float = 1.0) -> float:
    """Return the bytes of the inputs of a program that its products read.

    `choose` combines the branches of a conditional. `experts` is the number of turns of a loop over experts, which
    depends on data; other loops of unknown length have one turn.
    """
    visit = _Visit(choose, experts)
    return visit.program(jaxpr, [_stored_bytes(variable.aval) for variable in jaxpr.invars])[0]


class _Visit(NamedTuple):
    """A walk through a program."""

    choose: Choice
    experts: float

    def program(self, jaxpr: Any, inputs: Sequence[float]) -> tuple[float, list[float]]:
        """Return the bytes that the products of a program read, and those of which each of its outputs is made."""
        made_of = dict(zip(jaxpr.invars, inputs, strict=True))
        bytes_of = lambda operand: 0.0 if isinstance(operand, Literal) else made_of.get(operand, 0.0)
        total = 0.0
        for equation in jaxpr.eqns:
            carried = [bytes_of(operand) for operand in equation.invars]
            read, outputs = self.equation(equation, carried)
            total += read
            made_of |= dict(zip(equation.outvars, outputs, strict=True))
        return total, [bytes_of(variable) for variable in jaxpr.outvars]

    def equation(self, equation: Any, carried: list[float]) -> tuple[float, list[float]]:
        """Return the same of one operation, whose operands are made of the bytes `carried`."""
        nothing = [0.0] * len(equation.outvars)
        name, parameters = equation.primitive.name, equation.params
        if name in PRODUCTS:
            return PRODUCTS[name](carried), nothing
        if name == "optimization_barrier":
            return 0.0, carried
        inner = [jaxpr for value in parameters.values() for jaxpr in _jaxprs_of(value)]
        if not inner:
            return 0.0, [_parts_of(equation.invars, carried, variable) for variable in equation.outvars]
        results = [self.program(jaxpr, _inner_inputs(equation, carried, jaxpr)) for jaxpr in inner]
        outputs = [max(column) for column in zip(*(outputs for _, outputs in results), strict=False)]
        totals = [total for total, _ in results]
        if parameters.get("branches_platforms") is not None:  # all do the same work, but some platforms pad the rows
            return min(totals), outputs
        if name == "cond":
            return self.choose(totals), outputs
        is_over_experts = name == "while" and scopes.EXPERTS in str(equation.source_info.name_stack).split("/")
        turns = self.experts if is_over_experts else parameters.get("length", 1)  # those of a scan
        return sum(totals) * turns, (outputs + nothing)[: len(nothing)]


def _jaxprs_of(value: Any) -> list[Any]:
    parts = value if isinstance(value, tuple) else (value,)
    inner = [getattr(part, "jaxpr", part) for part in parts]
    return [part for part in inner if hasattr(part, "eqns")]


def _inner_inputs(equation: Any, carried: list[float], jaxpr: Any) -> list[float]:
    """Return the bytes of the inputs of an inner program: the last operands of its equation, or parts of them."""
    count = len(jaxpr.invars)
    operands = list(zip(equation.invars, carried, strict=True))[len(carried) - count :]
    return [_share(operand, size, variable) for (operand, size), variable in zip(operands, jaxpr.invars, strict=True)]


def _parts_of(operands: Sequence[Any], carried: Sequence[float], result: Any) -> float:
    """Return the bytes of which the result of an operation is made, at most those that it takes itself."""
    parts = sum(_share(operand, size, result) for operand, size in zip(operands, carried, strict=True))
    return min(parts, _stored_bytes(result.aval)) if parts else 0.0


def _share(operand: Any, size: float, result: Any) -> float:
    """Return the bytes of the part of an operand that a smaller result, such as a slice, is made of."""
    if not size:
        return 0.0
    return size * min(1.0, result.aval.size / operand.aval.size)


def _stored_bytes(aval: Any) -> float:
    return aval.size * bits_of(aval.dtype) / 8
