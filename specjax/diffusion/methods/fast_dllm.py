"""Fast-dLLM's two rules: decide all columns above a confidence threshold, or as many as are jointly confident.

Wu et al.: Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025),
arXiv 2505.22618.

Rule: `threshold` is `specjax.diffusion.rules.threshold`. `factor` f sorts the confidences of the eligible columns,
c_1 >= c_2 >= ..., and takes the first n columns with n = max{n : (n + 1)(1 - c_n) < f}, at least one.
If all taken confidences exceed 1 - e and (n + 1) e <= 1, the taken tokens are also the most likely ones jointly.
Guarantee: lossy; tau > 1, or f = 0, is one column a pass.
Deviations: the approximate caches are an option, and the default is exact. If only the least confident masked column
violates the bound of `factor`, the released rule takes all columns; this one leaves that column masked. In all other
cases both rules take the same columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.caches.dual import dual
from specjax.diffusion.caches.prefix import prefix
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import CanvasCache, ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked, only_with
from specjax.types import Array

METHOD = Method(
    name="fast_dllm",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all columns above a confidence threshold, or as many as are jointly confident",
    paper="Wu et al. 2025, arXiv 2505.22618",
    options=(
        shared.BLOCK,
        Option("rule", ("threshold", "factor"), "threshold", "rule for confident columns"),
        shared.tau(0.9),
        Option("factor", "float", 0.75, "factor of the rule `factor`"),
        Option("memory", ("exact", "dual", "prefix"), "exact", "activations that are cached between passes"),
    ),
)


CACHES: dict[str, Callable[[], CanvasCache]] = {"dual": dual, "prefix": prefix}


@only_with("rule", tau=("threshold",), factor=("factor",))
@checked
def fast_dllm(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    rule: Literal["threshold", "factor"] = "threshold",
    tau: float = 0.9,
    factor: float = 0.75,
    memory: Literal["exact", "dual", "prefix"] = "exact",
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block; None: all new ones. rule: `threshold` with `tau`, or `factor` with `factor`.
      memory: `dual` or `prefix`: caches of `specjax.diffusion.caches` for models with full attention.
    """
    column_rule = threshold(tau) if rule == "threshold" else by_factor(factor)
    return Procedure(blocks(denoiser.block or block), column_rule, CACHES[memory]() if memory in CACHES else None)


@functools.cache
def by_factor(factor: float) -> ColumnRule:
    """Return the rule `factor`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        falling = measures.sort_descending(sure, view.eligible, behind=-1.0)
        # The left side rises, so the columns that fit come first.
        fits = (jnp.arange(falling.shape[1]) + 2) * (1 - falling) < factor
        count = jnp.maximum(jnp.sum(fits, 1, dtype=jnp.int32), 1)
        return measures.top(sure, view.eligible, count), proposal.token, state

    return ColumnRule(select)
