"""EOSER and ASS: end tokens are decided late, and each pass may decide twice as many columns as the previous one.

Yang, Chen, Hu, Shao: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with
Fewer Decoding Step (2025), arXiv 2509.23924. (Its reinforcement learning is not implemented.)

Rule: models that decode a full canvas at once tend to end it everywhere. If a column's proposal ends the text, its
confidence is multiplied in pass i over a block by

    gamma_i = first_factor + (last_factor - first_factor) i / (T - 1),        i = 0, 1, ...

T is the number of passes for all blocks, as in the release, while i restarts in every block. With several blocks the
factor therefore stays below last_factor.

`ascending`: pass i decides 2^i of G new columns, in S = floor(log2 G) passes. The last pass takes all remaining ones.
i does not restart, and the factor is

    gamma_i = first_factor + (last_factor - first_factor) (2^(i+1) - 1) / 2^S.

`parts` = n: each of the last n - 1 passes has its own block. The earlier passes share the first 2^k - 1 columns, with
k = S - n + 1. Pass i decides the columns below 2^(i+1) - 1.
Guarantee: lossy; first_factor = last_factor = 1 has no discount. Without `ascending` this is `llada`.
Deviations: the argument `eos` of `denoise` gives the end tokens. Without any, no confidence is discounted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.schedules.blocks import blocks, num_passes
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Schedule, Score, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="eoser",
    kind="diffusion",
    guarantee="lossy",
    summary="decides columns like llada, but end-of-text tokens late; optionally 1, 2, 4, ... columns per pass",
    paper="Yang et al. 2025, arXiv 2509.23924",
    options=(
        Option("block", "int", None, "columns per block, for models with full attention; default: all new columns"),
        shared.STEPS,
        Option("ascending", "yes_or_no", False, "decide 1, 2, 4, ... columns per pass"),
        Option("parts", "int", 1, "blocks of ascending schedules"),
        Option("first_factor", "float", None, "factor on the confidence of end tokens in the first pass over a block"),
        Option("last_factor", "float", 1.0, "factor on their confidence in the last pass, if there is one block"),
    ),
)


@checked
def eoser(
    denoiser: Denoiser,
    *,
    block: int | None = None,
    steps: int | None = None,
    ascending: bool = False,
    parts: int = 1,
    first_factor: float | None = None,
    last_factor: float = 1.0,
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block; None: all new ones. steps: passes for a block; None: one for each column.
      ascending: take 1, 2, 4 ... columns per pass instead. parts: blocks of an ascending schedule.
      first_factor, last_factor: factors on the confidence of end tokens in the first and the last pass. With several
        blocks, last_factor is not reached. first_factor defaults to 0.4, or 0.01 for ascending passes.

    Raises: UsageError for ascending passes with block or steps or with a block-causal model, or for parts without
    ascending passes.
    """
    size = denoiser.block or block
    first_factor = first_factor if first_factor is not None else 0.01 if ascending else 0.4
    if not ascending:
        if parts != 1:
            raise UsageError("parts needs ascending passes; set ascending=True, or leave parts out")
        return Procedure(blocks(size, steps=steps), quota(), score=late_ends(first_factor, last_factor, size, steps))
    if denoiser.is_causal:
        raise UsageError(
            "ascending passes use all new columns as one block, and a block-causal model has fixed blocks; leave "
            "ascending out"
        )
    if size is not None or steps is not None:
        raise UsageError("ascending passes use all new columns as one block; leave block and steps out, or set parts=")
    return Procedure(powers(parts), quota(), score=late_ends(first_factor, last_factor, None, None, ascending=True))


class Progress(NamedTuple):
    """Progress of a row, by which end tokens are discounted."""

    total: Array  # int32[B], passes for all new columns
    passes: Array  # int32[B], passes over this block that had an eligible column


@functools.cache
def late_ends(
    first_factor: float, last_factor: float, size: int | None, steps: int | None, *, ascending: bool = False
) -> Score:
    """Return a score that discounts end tokens, for blocks of `size` with `steps` passes each."""

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> Progress:
        total = _log2(canvas.end - canvas.start) if ascending else num_passes(canvas, size, steps)
        return Progress(total, jnp.zeros_like(total))

    def weigh(params: PyTree, state: Progress, proposal: Proposal, view: View) -> Array:
        if ascending:
            share = (2.0 ** (view.passes + 1) - 1) / 2.0**state.total
        else:
            share = jnp.where(view.entered, 0, state.passes) / jnp.maximum(state.total - 1, 1)
        share = jnp.where(state.total > 1, jnp.minimum(share, 1.0), 1.0)
        gamma = first_factor + (last_factor - first_factor) * share
        return jnp.where(view.ends(proposal.token), gamma[:, None], 1.0)

    def learn(params: PyTree, state: Progress, view: View, take: Array, token: Array) -> Progress:
        passes = jnp.where(view.entered, 0, state.passes) + jnp.any(view.eligible, 1)
        return state._replace(passes=passes)

    return Score(weigh=weigh, init=init, learn=learn)


class State(NamedTuple):
    columns: Array  # int32[B], G
    passes: Array  # int32[B], passes that had an eligible column


@functools.cache
def powers(parts: int = 1) -> Schedule:
    """Return the schedule of ascending passes. Raises: UsageError for less than one part."""
    if parts < 1:
        raise UsageError(f"parts must be at least 1, not {parts}")

    def init(params: PyTree, canvas: Canvas, width: int) -> State:
        return State(canvas.end - canvas.start, jnp.zeros_like(canvas.start))

    def bound(state: State, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, State]:
        number, i = _log2(state.columns), state.passes
        reach = jnp.maximum(number - parts + 1, i + 1)
        end = view.start + jnp.where(reach >= number, state.columns, (1 << reach) - 1)
        share = jnp.where(i + 1 >= number, state.columns, 1 << i)
        return end, share, State(state.columns, i + jnp.any(view.eligible, 1))

    return Schedule(None, lambda state, canvas: (canvas.start, state), bound, init)


def _log2(count: Array) -> Array:
    """Return int32[B]: the exact floor of the logarithm to base 2."""
    return jnp.sum(count[:, None] >= 1 << jnp.arange(1, 31), 1, dtype=jnp.int32)
