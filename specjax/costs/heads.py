"""Cost of drafting with a head, in target passes over one token, estimated from the weights that both models read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from specjax.costs.accelerators import current_chip, equivalent_bytes
from specjax.models.heads.contract import DraftedNodes, DraftHead
from specjax.types import Context, PyTree, Target

TEXT = 128
"""Assumed length of the text in tokens. Attention costs grow with it in the head as in the target."""


def of_head(target: Target, head: DraftHead, passes: int, platform: str | None = None) -> float:
    """Estimate the cost of drafting a tree with `passes` passes of the head, including that of the root.

    The estimate is a rule of thumb: a pass over few tokens takes the time to read the weights of its products once. On
    a GPU, a pass of the head also takes the time of a layer's kernels. The parameters may be arrays or shapes.

    Args:
      platform: as in `estimated`.
    """
    platform = platform or current_chip()
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    target, params = jax.tree.map(shape, (target, head.params))
    one = lambda value: jnp.full((1, 1), value, jnp.int32)

    def first_level(target: Target, params: PyTree) -> Any:
        cache = target.model.init_cache(target.params, None, 1, TEXT)
        context = Context(jnp.zeros((1, TEXT), jnp.int32), jnp.full((1,), 2), cache=cache, target=target)
        return head.head.start(params, head.head.init_memory(params, context, 1, TEXT), context, passes), context

    def level(target: Target, params: PyTree) -> Any:
        ((scratch, logits), context) = first_level(target, params)
        drafted = DraftedNodes(one(0), one(1), jnp.int32(1), one(0), jnp.zeros((1, 1, passes), bool))
        return head.head.follow(params, scratch, drafted, context), logits

    def count(function: Callable[..., Any]) -> float:
        """Count the weights that a function reads, except for unused outputs such as logits."""
        jaxpr = jax.make_jaxpr(function)(target, params).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        # A head that runs some target layers skips the other layers with conditionals: count the smaller branch.
        return _of_equations(jaxpr, min if num_layers_run else max)

    layers = target.model.capabilities.num_layers
    num_layers_run = sum(last - first for first, last in head.head.target_layers(layers))
    of_first = count(first_level)
    of_level = count(level) - of_first if passes > 1 else 0.0
    of_target = num_layers_run * (1 if head.head.is_single_pass else passes)
    sizes = [(x.size, x.size * x.dtype.itemsize) for x in jax.tree.leaves(target.params)]
    weights, size = (sum(column) for column in zip(*sizes, strict=True))
    read = (of_first + (passes - 1) * of_level) * size / weights  # bytes
    drafting = equivalent_bytes(platform, read, 1 if head.head.is_single_pass else passes)
    return of_target / layers + drafting / equivalent_bytes(platform, size, layers)


def _of_equations(jaxpr: Any, choose: Callable[[list[float]], float]) -> float:
    """Count the weights that the matrix products of a program read. `choose` combines the branches of a conditional."""
    total = 0.0
    for equation in jaxpr.eqns:
        parameters = equation.params
        if equation.primitive.name == "dot_general":
            _, (batched, _) = parameters["dimension_numbers"]
            if not batched:  # batched products read keys and values
                total += max(operand.aval.size for operand in equation.invars)
            continue
        parts = [part for value in parameters.values() for part in (value if isinstance(value, tuple) else (value,))]
        inner = [_of_equations(getattr(part, "jaxpr", part), choose) for part in parts if _is_jaxpr(part)]
        if parameters.get("branches_platforms") is not None:  # all do the same work, but some platforms pad the rows
            total += min(inner)
        elif equation.primitive.name == "cond":
            total += choose(inner)
        else:
            total += sum(inner) * parameters.get("length", 1)  # the iterations of a scan
    return total


def _is_jaxpr(part: Any) -> bool:
    return hasattr(getattr(part, "jaxpr", part), "eqns")
