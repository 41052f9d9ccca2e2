"""Entropy-bounded decoding: each pass decides the columns of lowest entropy whose sum of entropies is below a bound.

Cheng et al.: SDAR (2025), arXiv 2510.06303, `entropy_bounded`; DiffusionGemma's sampler accepts by the same rule with
`include_own=False`; Ben-Hamu et al.: Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking
(2025), arXiv 2505.24857.

Rule: sort the entropies of the eligible columns, H_1 <= H_2 <= ... Take the first n columns with
n = max{n : H_1 + ... + H_n < gamma}, at least one. With `include_own=False`, n = max{n : H_1 + ... + H_{n-1} <= gamma}.
Reason: the joint entropy of columns is at most the sum of their entropies. Deciding them independently loses the sum
minus the joint entropy, which is below gamma.
Guarantee: lossy; a gamma of 0 is one column a pass, if no entropy is 0.
Deviations: the entropy is that of the full distribution at temperature 1. SDAR's released script sums only the terms of
the drawn tokens over the block, and does not run. DiffusionGemma's other columns restart with random tokens; here they
stay masked.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.types import Array

METHOD = Method(
    name="entropy_bound",
    kind="diffusion",
    guarantee="lossy",
    summary="decides the columns of lowest entropy, as many as an entropy budget allows",
    paper="Cheng et al. 2025, arXiv 2510.06303",
    options=(
        shared.BLOCK,
        Option("gamma", "float", 0.35, "entropy budget per pass, in nats"),
        Option(
            "include_own",
            "yes_or_no",
            True,
            "include a column's own entropy in the sum, not only earlier ones",
        ),
    ),
)


@checked
def entropy_bound(
    denoiser: Denoiser, *, block: int | None = 32, gamma: float = 0.35, include_own: bool = True
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. gamma: entropy budget of a pass, in nats.

    include_own: True if the sum includes a column's own entropy, not only the entropies ranked before it.
    """
    return Procedure(blocks(denoiser.block or block), within(gamma, include_own))


@functools.cache
def within(gamma: float, include_own: bool = True) -> ColumnRule:
    """Return a rule that takes columns of lowest entropy up to a total of `gamma`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        certain = -measures.entropy(proposal.logits)
        total = jnp.cumsum(-measures.sort_descending(certain, view.eligible, behind=-jnp.inf), 1)
        fits = total < gamma if include_own else jnp.pad(total[:, :-1], ((0, 0), (1, 0))) <= gamma
        count = jnp.maximum(jnp.sum(fits, 1, dtype=jnp.int32), 1)
        return measures.top(certain, view.eligible, count), proposal.token, state

    return ColumnRule(select)
