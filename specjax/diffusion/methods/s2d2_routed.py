"""S2D2 as it was published: a router says whether a block's drafts are verified by the model with blocks of one.

Han, Wang, Gao, Xu, Srivastava: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv
2603.25702.

Rule: a pass over the block gives drafts d_i with rows p_i. If `specjax.diffusion.routers` says so, a second pass reads
[the block with d in its first run of open columns | a mask at each column], which sees the blocks before; of itself a
column of the first half sees those up to its own, one of the second half those of the first half before its own, and
gives q_i. From left to right d_i stands with probability min(1, q_i(d_i) / p_i(d_i)), and after the first rejection one
token of norm([q_i - p_i]+): the chain verifier. Where that is fewer than the pass's quota, and where nothing was
verified, the dynamic rule of SDAR decides by the first pass.
Guarantee: lossy. `s2d2` is the setting that is exact. A router that never verifies is `sdar`, at any temperature.
Deviations: keys and values are those of whole blocks (`append`), as the router may change its mind; at temperature 0 a
draft stands if it is the likeliest token; which rounds the bandit tells apart is a choice made here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.diffusion import forward, measures, routers
from specjax.diffusion.caches import append
from specjax.diffusion.loop import (
    DenoisingParts,
    PartStates,
    StepOutcome,
    apply_bound,
    draw_tokens,
    is_finite,
    make_view,
    propose,
    select,
    store_logprobs,
)
from specjax.diffusion.methods.linear_spec import causal_block, draft_keys, judged
from specjax.diffusion.routers import Asked, Chance, Router
from specjax.diffusion.rules import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Verify, View, Window
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, DecodeState, PyTree

METHOD = Method(
    name="s2d2_routed",
    kind="diffusion",
    guarantee="lossy",
    summary="follows sdar, and verifies drafts at block size 1 where a router expects a gain",
    paper="Han et al. 2026, arXiv 2603.25702",
    options=(
        Option(
            "router",
            ("always", "span", "score", "hysteresis", "bandit"),
            "score",
            "router that decides when drafts are verified",
        ),
        shared.tau(0.85),
        shared.STEPS,
        Option("chance", ("entropy", "margin"), "entropy", "estimate of the acceptance probability"),
        Option("beta", "float", 1.0, "exponent of the estimate by entropy"),
        Option("dynamic", "yes_or_no", False, "multiply the cost by the number of confident columns"),
        Option("cost", "float", 1.0, "cost of verification, in expected tokens"),
        Option("above", "float", 0.0, "score above which drafts are verified"),
        Option("below", "float", -5.0, "for hysteresis: score below which verification stops"),
        Option("least", "int", 2, "for span: minimum number of adjacent open columns"),
    ),
)


Kind = Literal["always", "span", "score", "hysteresis", "bandit"]


@checked
def s2d2_routed(
    denoiser: Denoiser,
    *,
    router: Kind = "score",
    tau: float = 0.85,
    steps: int | None = None,
    chance: Chance = "entropy",
    beta: float = 1.0,
    dynamic: bool = False,
    cost: float = 1.0,
    above: float = 0.0,
    below: float = -5.0,
    least: int = 2,
) -> Procedure:
    """router: `span` verifies runs of `least` columns; `score` where the score is above `above`; `hysteresis` from
    there until it is below `below`; `bandit` learns where it pays. chance, beta, dynamic, cost: of the score.

    Raises: UsageError for a model with full attention, or whose logits are shifted.
    """
    block = causal_block(denoiser, "s2d2_routed")
    if denoiser.is_shifted or denoiser.mask_token is None:
        raise UsageError(
            "s2d2_routed asks a mask for its own column, and this model's logits are shifted; choose linear_spec"
        )
    kinds: dict[str, Callable[[], Router]] = {
        "always": routers.always,
        "span": lambda: routers.span(least),
        "score": lambda: routers.score(above, cost, dynamic),
        "hysteresis": lambda: routers.hysteresis(above, below, cost, dynamic),
        "bandit": routers.bandit,
    }
    verify = routed(kinds[router](), tau, chance, beta)
    return Procedure(blocks(block, steps=steps), threshold(tau, least=None), append(), verify=verify)


@functools.cache
def routed(router: Router, tau: float = 0.85, chance: Chance = "entropy", beta: float = 1.0) -> Verify:
    """What verifies where the router says so. tau: of the columns that are sure enough."""
    decide = functools.partial(_decide, router=router, tau=tau, chance=chance, beta=beta)
    return Verify(decide, lambda parts, canvas: router.init(len(canvas.start)), check=_check)


def _decide(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates, *, router: Router, tau: float,
    chance: Chance, beta: float,
) -> StepOutcome:  # fmt: skip
    """A round."""
    seen, memory = parts.memory.look(parts.denoiser, state.cache, canvas, window)
    view = make_view(parts, state, canvas, window, seen)
    proposal, slots = propose(parts, view, forward.compute_logits(parts.denoiser, seen.hidden), slots)
    view, quota, slots = apply_bound(parts, canvas, proposal, view, slots)
    run = first_run(canvas, view)
    asked = Asked(
        run=jnp.sum(run, 1, dtype=jnp.int32),
        expected=routers.expected_run(routers.acceptance(proposal, chance, beta), run),
        sure=jnp.sum(view.eligible & (measures.confidence(proposal) >= tau), 1, dtype=jnp.int32),
        width=window.width,
    )
    verifies, routing = router.route(slots.verify, asked)
    verifies &= window.active & (asked.run > 0)
    # with noise of their own: the verifier draws with that of their columns
    drafts = draw_tokens(parts, draft_keys(state, view._replace(start=canvas.start + canvas.decided)), proposal.warped)
    drafted = proposal._replace(token=jnp.where(verifies[:, None], drafts, proposal.token))

    def verify() -> tuple[Canvas, Array, Array | None]:
        return _verified(parts, state, memory.cache, canvas, view, drafted, run, verifies)

    nothing = lambda: (canvas, jnp.ones_like(verifies), state.draft.logprobs)
    any_verifies = jnp.any(verifies)
    after, finite, logprobs = jax.lax.cond(any_verifies, verify, nothing)

    stood = after.decided - canvas.decided
    still = take_along(after.open, jnp.clip(view.columns, 0, after.open.shape[1] - 1), 1)
    rest = view._replace(eligible=view.eligible & still & (stood < jnp.maximum(quota, 1))[:, None])
    take, token, slots = select(parts, drafted, rest, jnp.maximum(quota - stood, 1), slots)
    end = forward.decide_columns(after, view.columns, take, token)
    logprobs = store_logprobs(
        parts, state._replace(draft=state.draft._replace(logprobs=logprobs)), rest, take, token, drafted
    )
    routing = router.learn(routing, verifies, end.decided - canvas.decided)
    return StepOutcome(
        canvas=end,
        memory=memory,
        slots=slots._replace(verify=routing),
        columns=seen.columns + 2 * window.width * any_verifies,
        finite=is_finite(proposal, view) & finite,
        passes=window.active.astype(jnp.int32) + verifies,
        logprobs=logprobs,
    )


def first_run(canvas: Canvas, view: View) -> Array:
    """bool[B, W]: the eligible columns from the first open one on, up to the first that is not."""
    behind = view.columns >= canvas.first_open[:, None]
    return behind & (jnp.cumprod(view.eligible | ~behind, 1, dtype=jnp.int32) > 0)


def asked_alone(parts: DenoisingParts, cache: PyTree, canvas: Canvas, view: View, drafts: Array, run: Array) -> Array:
    """float32[B, W, V]: what the model with blocks of one says of each column, given the text before it, in which the
    columns of `run` are `drafts`."""
    batch, width = run.shape
    shown = jnp.where(run, drafts, view.tokens)
    tokens = jnp.concatenate([shown, jnp.full_like(shown, parts.denoiser.blank)], 1)
    columns = jnp.concatenate([view.columns] * 2, 1)
    before = jnp.arange(width)[:, None] > jnp.arange(width)
    itself, nothing = jnp.eye(width, dtype=bool), jnp.zeros((width, width), bool)
    sees = jnp.block([[before | itself, nothing], [before, itself]])
    sees = jnp.broadcast_to(sees, (batch, *sees.shape))
    hidden, _ = forward.forward(parts.denoiser, cache, tokens, columns, sees)
    return forward.compute_logits(parts.denoiser, hidden[:, width:])


def _verified(
    parts: DenoisingParts, state: DecodeState, cache: PyTree, canvas: Canvas, view: View, drafted: Proposal, run: Array,
    verifies: Array,
) -> tuple[Canvas, Array, Array | None]:  # fmt: skip
    """(canvas, finite bool[B], log-probabilities) with what stands of the runs of the rows that verify."""
    width = run.shape[1]
    logits = asked_alone(parts, cache, canvas, view, drafted.token, run)
    first = canvas.first_open
    place = jnp.clip(
        (first - view.start)[:, None] + jnp.arange(width + 1), 0, width - 1
    )  # of the columns from there on
    tokens = jnp.concatenate([take_along(canvas.tokens, first[:, None] - 1, 1), take_along(drafted.token, place, 1)], 1)
    rows = lambda x, count: take_along(x, place[:, :count, None], 1)
    alone = canvas._replace(end=first + jnp.sum(run, 1, dtype=jnp.int32))  # nothing behind the run
    own = view._replace(start=first, active=verifies)
    after = judged(
        parts, state, alone, own, tokens[:, : width + 1], rows(drafted.warped, width), rows(logits, width + 1)
    )
    return after.canvas._replace(end=canvas.end), after.finite | ~verifies, after.logprobs


def _check(procedure: Procedure) -> None:
    for name in ("score", "control"):
        if getattr(procedure, name) is not None:
            raise UsageError(f"drafts are judged by the model alone, which hears no {name}; leave it out")
