"""What drafting with a learned head costs, in passes of its target over one token: by the weights that both read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from specjax.models.heads.contract import Drafted, DraftHead
from specjax.types import Context, PyTree, Target

TEXT = 128
"""Tokens of the text that is supposed. What attention costs grows with it in the head as in the target."""


def of_head(target: Target, head: DraftHead, passes: int) -> float:
    """A tree that takes `passes` of the head, the root's included.

    A rule of thumb: a pass takes as long as it takes to read the weights that it multiplies with, once, whatever few
    tokens it is over. Parameters may be shapes.
    """
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    whole, params = jax.tree.map(shape, (target, head.params))
    one = lambda value: jnp.full((1, 1), value, jnp.int32)

    def first(whole: Target, params: PyTree) -> Any:
        cache = whole.model.begin(whole.params, None, 1, TEXT)
        context = Context(jnp.zeros((1, TEXT), jnp.int32), jnp.full((1,), 2), cache=cache, target=whole)
        return head.head.start(params, head.head.begin(params, context, 1, TEXT), context, passes), context

    def level(whole: Target, params: PyTree) -> Any:
        ((scratch, logits), context) = first(whole, params)
        drafted = Drafted(one(0), one(1), jnp.int32(1), one(0), jnp.zeros((1, 1, passes), bool))
        return head.head.follow(params, scratch, drafted, context), logits

    def count(function: Callable[..., Any]) -> float:
        """Without what nobody reads, such as the logits of a pass of which the stream is wanted."""
        jaxpr = jax.make_jaxpr(function)(whole, params).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        # A pass of a part of the target is one in which the program chooses not to run the other layers.
        return _of_equations(jaxpr, min if run else max)

    layers = whole.model.capabilities.num_layers
    run = sum(last - first for first, last in head.head.runs(layers))
    of_first = count(first)
    of_level = count(level) - of_first if passes > 1 else 0.0
    of_target = run * (1 if head.head.at_once else passes)
    weights = sum(x.size for x in jax.tree.leaves(whole.params))
    return of_target / layers + (of_first + (passes - 1) * of_level) / weights


def _of_equations(jaxpr: Any, choose: Callable[[list[float]], float]) -> float:
    """How many weights a program reads for its matrix products, `choose` of those of several branches."""
    total = 0.0
    for equation in jaxpr.eqns:
        parameters = equation.params
        if equation.primitive.name == "dot_general":
            _, (batched, _) = parameters["dimension_numbers"]
            if not batched:  # else keys and values
                total += max(operand.aval.size for operand in equation.invars)
            continue
        parts = [part for value in parameters.values() for part in (value if isinstance(value, tuple) else (value,))]
        inner = [_of_equations(getattr(part, "jaxpr", part), choose) for part in parts if _is_jaxpr(part)]
        if parameters.get("branches_platforms") is not None:  # the same, some with rows that only fill a kernel
            total += min(inner)
        elif equation.primitive.name == "cond":
            total += choose(inner)
        else:
            total += sum(inner) * parameters.get("length", 1)  # of a scan
    return total


def _is_jaxpr(part: Any) -> bool:
    return hasattr(getattr(part, "jaxpr", part), "eqns")
