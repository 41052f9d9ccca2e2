"""LLaDA2.1: decided columns may change again until their block is finished.

Bie et al.: LLaDA2.1: Speeding Up Text Diffusion via Token Editing (2026), arXiv 2602.08676, after its released sampler.
With tau .5 and edit_tau 0 it is SGLang's `JointThreshold`.

Rule, in each pass over a block:
- Mask to token: every masked column with confidence above `tau` is decided, or the most confident one if there is none.
- Token to token: a decided column of the block changes its token if the proposed token is another one and has a
  probability above `edit_tau`.
A block is finished after a pass that found no masked column and changed nothing, or after `post_steps` passes that
found no masked column.
Guarantee: lossy; edit_tau >= 1 is the threshold rule, pass by pass.
Deviations: the test is > as in the release, while the threshold rule uses >=. The last pass over a block stores
its keys and values. As in all methods, it is fused with the first pass over the next block. SGLang's penalty for
repetition, off by default, is not implemented.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="llada21",
    kind="diffusion",
    guarantee="lossy",
    summary="decides confident columns and may change them again until their block is finished",
    paper="Bie et al. 2026, arXiv 2602.08676",
    options=(
        shared.BLOCK,
        shared.tau(0.95),
        Option("edit_tau", "float", 0.9, "probability of another token above which a decided column changes"),
        Option("post_steps", "int", 16, "maximum number of passes over a block without masked columns"),
    ),
)


@checked
def llada21(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    tau: float = 0.95,
    edit_tau: float = 0.9,
    post_steps: int = 16,
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. tau: confidence above which a column is
    decided. edit_tau: confidence above which it is changed. post_steps: maximum passes over a block without masks.
    """
    return Procedure(blocks(denoiser.block or block), edits(tau, edit_tau, post_steps))


class State(NamedTuple):
    post: Array  # int32[B], passes over this block that found no masked column
    settled: Array  # bool[B], True if the block is finished


@functools.cache
def edits(tau: float, edit_tau: float, post_steps: int) -> ColumnRule:
    """Return the rule. Raises: UsageError for a number of passes below 0."""
    if post_steps < 0:
        raise UsageError(f"post_steps must be at least 0, not {post_steps}")
    max_passes = post_steps if edit_tau < 1 else 0  # with edit_tau >= 1 no column ever changes

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> State:
        return State(jnp.zeros_like(canvas.start), jnp.ones((len(canvas.start),), bool))

    def select(params: PyTree, state: State, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        high = view.eligible & (sure > tau)
        decided = high | measures.most_confident(sure, view.eligible)
        changed = view.revisable & (sure > edit_tau) & (proposal.token != view.tokens) & (max_passes > 0)
        found_full = ~jnp.any(view.open, 1)
        post = jnp.where(view.entered, 0, state.post) + found_full
        still = found_full & ~jnp.any(changed, 1)
        full = ~jnp.any(view.open & ~decided, 1)
        settled = full & (still | (post >= max_passes))
        return decided | changed, proposal.token, State(post, settled)

    return ColumnRule(select, init, lambda params, state: state.settled)
