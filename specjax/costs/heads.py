"""Cost of drafting with a head, in target passes over one token, estimated from the weights that both models read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from specjax.costs.accelerators import current_chip, equivalent_bytes
from specjax.costs.experts import active_bytes, launched_layers
from specjax.costs.row_bytes import row_bytes
from specjax.costs.weights_read import bytes_read
from specjax.models.heads.contract import DraftedNodes, DraftHead
from specjax.types import Context, PyTree, Target

TEXT = 128
"""Assumed length of the text in tokens. Attention costs grow with it in the head as in the target."""


def of_head(
    target: Target, head: DraftHead, passes: int, platform: str | None = None, at: Context | None = None
) -> float:
    """Estimate the cost of drafting a tree with `passes` passes of the head, including that of the root.

    The estimate is a rule of thumb: a pass over few tokens takes the time to read the weights of its products once. On
    a GPU, a pass of the head also takes the time of a layer's kernels. The parameters may be arrays or shapes.

    Args:
      platform: as in `estimated`.
      at: a context with the cache of a target that has none without inputs; other targets do not need it.
    """
    platform = platform or current_chip()
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    has_inputs = at is not None and target.model.capabilities.requires_inputs
    rows, cache = (len(at.length), at.cache) if at is not None and has_inputs else (1, None)
    target, params, target_cache = jax.tree.map(shape, (target, head.params, cache))
    one = lambda value: jnp.full((rows, 1), value, jnp.int32)

    def first_level(target: Target, params: PyTree, target_cache: PyTree) -> Any:
        cache = target.model.init_cache(target.params, None, rows, TEXT) if target_cache is None else target_cache
        context = Context(jnp.zeros((rows, TEXT), jnp.int32), jnp.full((rows,), 2), cache=cache, target=target)
        return head.head.start(params, head.head.init_memory(params, context, rows, TEXT), context, passes), context

    def level(target: Target, params: PyTree, target_cache: PyTree) -> Any:
        ((scratch, logits), context) = first_level(target, params, target_cache)
        drafted = DraftedNodes(one(0), one(1), jnp.int32(1), one(0), jnp.zeros((rows, 1, passes), bool))
        return head.head.follow(params, scratch, drafted, context), logits

    def count(function: Callable[..., Any]) -> float:
        """Count the bytes of weights that a function reads, except for unused outputs such as logits."""
        jaxpr = jax.make_jaxpr(function)(target, params, target_cache).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        # A head that runs some target layers skips the other layers with conditionals: count the smaller branch.
        return bytes_read(jaxpr, min if num_layers_run else max, num_chosen)

    mixture = getattr(getattr(head.head.config, "layer", None), "experts", None)
    num_chosen = 1.0 if mixture is None else float(mixture.routing.num_chosen)
    layers = target.model.capabilities.num_layers
    num_layers_run = sum(last - first for first, last in head.head.target_layers(layers))
    of_first = count(first_level)
    of_level = count(level) - of_first if passes > 1 else 0.0
    of_target = num_layers_run * (1 if head.head.is_single_pass else passes)
    read = of_first + (passes - 1) * of_level
    drafting = equivalent_bytes(platform, read, 1 if head.head.is_single_pass else passes)
    of_pass = equivalent_bytes(platform, active_bytes(target), launched_layers(target)) + row_bytes(target).moved()
    return of_target / layers + drafting / of_pass
