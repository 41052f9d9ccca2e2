"""S2D2 as published: a router selects the rounds in which the same model, with blocks of one, verifies the drafts.

Han, Wang, Gao, Xu, Srivastava: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv
2603.25702.

Rule: a pass over the block gives drafts d_i with probabilities p_i. If `specjax.diffusion.routers` selects the round, a
second pass reads two copies of the block. The first copy has d in its first run of masked columns. The second copy has
a mask at each column. Both copies attend to earlier blocks. A column of the first copy attends to that copy up to
itself. A column of the second copy attends to itself and to the first copy before its position, and gives q_i. The
chain verifier goes from left to right and accepts d_i with probability min(1, q_i(d_i) / p_i(d_i)). After the first
rejection it draws one token from norm([q_i - p_i]+). The dynamic rule of SDAR decides by the first pass in two cases:
the round is not verified, or verification gives fewer tokens than the quota.
Guarantee: lossy. `s2d2` is the exact setting. A router that never verifies gives `sdar`, at any temperature.
Deviations: keys and values are those of full blocks (`append`), because the router may change its decision. At
temperature 0 a draft is accepted if it is the most likely token. The kinds of rounds of the bandit are our choice.
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
from specjax.diffusion.methods.linear_spec import causal_block, draft_keys, verify_drafts
from specjax.diffusion.methods.sdar import dynamic_rule, sdar_blocks
from specjax.diffusion.routers import ChanceMeasure, RoundForecast, VerificationRouter
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Verify, View, Window
from specjax.diffusion.validation import checked, only_with
from specjax.errors import UsageError
from specjax.types import Array, DecodeState, PyTree

METHOD = Method(
    name="s2d2_routed",
    kind="diffusion",
    guarantee="lossy",
    summary="decides columns like sdar, and verifies drafts at block size 1 where a router expects a gain",
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
        Option("min_run", "int", 2, "for span: minimum number of adjacent masked columns"),
    ),
)


Kind = Literal["always", "span", "score", "hysteresis", "bandit"]


SCORED = ("score", "hysteresis")
"""Routers that compare a score."""


@only_with("chance", beta=("entropy",))
@only_with(
    "router",
    min_run=("span",),
    above=SCORED,
    below=("hysteresis",),
    cost=SCORED,
    dynamic=SCORED,
    chance=(*SCORED, "bandit"),
    beta=(*SCORED, "bandit"),
)
@checked
def s2d2_routed(
    denoiser: Denoiser,
    *,
    router: Kind = "score",
    tau: float = 0.85,
    steps: int | None = None,
    chance: ChanceMeasure = "entropy",
    beta: float = 1.0,
    dynamic: bool = False,
    cost: float = 1.0,
    above: float = 0.0,
    below: float = -5.0,
    min_run: int = 2,
) -> Procedure:
    """Return the procedure.

    Args:
      router: `span` verifies runs of at least `min_run` columns. `score` verifies at a score above `above`.
        `hysteresis` does too, and continues until the score is below `below`. `bandit` learns when to verify.
      tau: confidence at which a column is decided. steps: passes for a block; None: one for each column.
      chance, beta, dynamic, cost: settings of the score, defined in `specjax.diffusion.routers`.

    Raises: UsageError for a model with full attention, or with shifted logits.
    """
    block = causal_block(denoiser, "s2d2_routed")
    if denoiser.is_shifted or denoiser.mask_token is None:
        raise UsageError(
            "s2d2_routed needs a mask token and unshifted logits, which this model does not have; choose linear_spec"
        )
    kinds: dict[str, Callable[[], VerificationRouter]] = {
        "always": routers.always,
        "span": lambda: routers.span(min_run),
        "score": lambda: routers.score(above, cost, dynamic),
        "hysteresis": lambda: routers.hysteresis(above, below, cost, dynamic),
        "bandit": routers.bandit,
    }
    verify = routed(kinds[router](), tau, chance, beta)
    return Procedure(sdar_blocks(block, steps), dynamic_rule(tau), append(), verify=verify)


@functools.cache
def routed(
    router: VerificationRouter, tau: float = 0.85, chance: ChanceMeasure = "entropy", beta: float = 1.0
) -> Verify:
    """Return a verification in the rounds that the router selects.

    tau: confidence at which the rule decides a column; routers count these columns.
    """
    decide = functools.partial(_decide, router=router, tau=tau, chance=chance, beta=beta)
    return Verify(decide, lambda parts, canvas: router.init(len(canvas.start)), check=_check)


def _decide(
    parts: DenoisingParts, state: DecodeState, canvas: Canvas, window: Window, slots: PartStates, *,
    router: VerificationRouter, tau: float,
    chance: ChanceMeasure, beta: float,
) -> StepOutcome:  # fmt: skip
    """Decide the columns of one round, with one pass or two."""
    output, memory = parts.memory.look(parts.denoiser, state.cache, canvas, window)
    view = make_view(parts, state, canvas, window, output)
    proposal, slots = propose(parts, view, forward.compute_logits(parts.denoiser, output.hidden), slots)
    view, quota, slots = apply_bound(parts, canvas, proposal, view, slots)
    run = first_run(canvas, view)
    forecast = RoundForecast(
        run=jnp.sum(run, 1, dtype=jnp.int32),
        expected=routers.expected_run(routers.acceptance(proposal, chance, beta), run),
        sure=jnp.sum(view.eligible & (measures.drawn_confidence(proposal) > tau), 1, dtype=jnp.int32),
        width=window.width,
    )
    verifies, routing = router.route(slots.verify, forecast)
    verifies &= window.active & (forecast.run > 0)
    # Drafts have separate random keys, because the verifier draws with the keys of the columns.
    drafts = draw_tokens(parts, draft_keys(state, view._replace(start=canvas.start + canvas.decided)), proposal.warped)
    drafted = proposal._replace(token=jnp.where(verifies[:, None], drafts, proposal.token))

    def verify() -> tuple[Canvas, Array, Array | None]:
        return _verified(parts, state, memory.cache, canvas, view, drafted, run, verifies)

    nothing = lambda: (canvas, jnp.ones_like(verifies), state.draft.logprobs)
    any_verifies = jnp.any(verifies)
    verified, finite, logprobs = jax.lax.cond(any_verifies, verify, nothing)

    stood = verified.decided - canvas.decided
    still = take_along(verified.open, jnp.clip(view.columns, 0, verified.open.shape[1] - 1), 1)
    remaining = view._replace(eligible=view.eligible & still & (stood < jnp.maximum(quota, 1))[:, None])
    take, token, slots = select(parts, drafted, remaining, jnp.maximum(quota - stood, 1), slots)
    end = forward.decide_columns(verified, view.columns, take, token)
    logprobs = store_logprobs(
        parts, state._replace(draft=state.draft._replace(logprobs=logprobs)), remaining, take, token, drafted
    )
    routing = router.learn(routing, verifies, end.decided - canvas.decided)
    return StepOutcome(
        canvas=end,
        memory=memory,
        slots=slots._replace(verify=routing),
        columns=output.columns + 2 * window.width * verifies,
        computed=output.computed + 2 * window.width * any_verifies,
        finite=is_finite(proposal, view) & finite,
        passes=window.active.astype(jnp.int32) + verifies,
        logprobs=logprobs,
    )


def first_run(canvas: Canvas, view: View) -> Array:
    """Return bool[B, W]: the contiguous eligible columns from the first masked one on."""
    behind = view.columns >= canvas.first_open[:, None]
    return behind & (jnp.cumprod(view.eligible | ~behind, 1, dtype=jnp.int32) > 0)


def asked_alone(parts: DenoisingParts, cache: PyTree, canvas: Canvas, view: View, drafts: Array, run: Array) -> Array:
    """Return float32[B, W, V]: the logits of the model with blocks of one, given the text before each column.

    The text contains `drafts` at the columns of `run`.
    """
    batch, width = run.shape
    shown = jnp.where(run, drafts, view.tokens)
    tokens = jnp.concatenate([shown, jnp.full_like(shown, parts.denoiser.blank)], 1)
    columns = jnp.concatenate([view.columns] * 2, 1)
    earlier = jnp.arange(width)[:, None] > jnp.arange(width)
    itself, nothing = jnp.eye(width, dtype=bool), jnp.zeros((width, width), bool)
    sees = jnp.block([[earlier | itself, nothing], [earlier, itself]])
    sees = jnp.broadcast_to(sees, (batch, *sees.shape))
    hidden, _ = forward.forward(parts.denoiser, cache, tokens, columns, sees)
    return forward.compute_logits(parts.denoiser, hidden[:, width:])


def _verified(
    parts: DenoisingParts, state: DecodeState, cache: PyTree, canvas: Canvas, view: View, drafted: Proposal, run: Array,
    verifies: Array,
) -> tuple[Canvas, Array, Array | None]:  # fmt: skip
    """Return (canvas, finite bool[B], log-probabilities) after the accepted parts of the verified runs."""
    width = run.shape[1]
    logits = asked_alone(parts, cache, canvas, view, drafted.token, run)
    first = canvas.first_open
    # Indices in the window of the columns from `first` on.
    place = jnp.clip((first - view.start)[:, None] + jnp.arange(width + 1), 0, width - 1)
    tokens = jnp.concatenate([take_along(canvas.tokens, first[:, None] - 1, 1), take_along(drafted.token, place, 1)], 1)
    rows = lambda x, count: take_along(x, place[:, :count, None], 1)
    # The verifier must not decide columns after the run.
    alone = canvas._replace(end=first + jnp.sum(run, 1, dtype=jnp.int32))
    self_proposal = view._replace(start=first, active=verifies)
    verified = verify_drafts(
        parts, state, alone, self_proposal, tokens[:, : width + 1], rows(drafted.warped, width), rows(logits, width + 1)
    )
    return verified.canvas._replace(end=canvas.end), verified.finite | ~verifies, verified.logprobs


def _check(procedure: Procedure) -> None:
    for name in ("score", "control"):
        if getattr(procedure, name) is not None:
            raise UsageError(f"verification of drafts does not support a {name}; leave it out")
