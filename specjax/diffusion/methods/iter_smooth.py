"""IterSmooth: the model reads a masked column as the mask token mixed with the prediction of the previous pass.

Ma et al.: dInfer: An Efficient Inference Framework for Diffusion Language Models (2025), arXiv 2510.08666, after its
release.

Rule: in pass i over a block (from 0) a masked column has the embedding E[mask] + w sum_v p(v) E[v]. p is the previous
pass's distribution and w = min(`first` + `step` i, `max_share`), with w = 0 in pass 0. Columns with a confidence of at
least max(1 - `step` i, tau) are decided.
Guarantee: lossy; first = step = max_share = 0 and tau = 1 is one column a pass.
Deviations: the sum is over the `words` most likely tokens. Full attention only.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.diffusion import forward, measures
from specjax.diffusion.caches import WHOLE
from specjax.diffusion.rules.threshold import enough_of
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import (
    Canvas,
    CanvasCache,
    ColumnRule,
    Denoiser,
    Procedure,
    Proposal,
    View,
    Window,
    WindowOutput,
)
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, Mixture, PyTree

METHOD = Method(
    name="iter_smooth",
    kind="diffusion",
    guarantee="lossy",
    summary="reads masked columns as mixtures of the mask and the tokens predicted in the previous pass",
    paper="Ma et al. 2025, arXiv 2510.08666",
    options=(
        shared.BLOCK,
        shared.tau(0.9),
        Option("first", "float", 0.15, "share of the predicted tokens in the first mixture"),
        Option("step", "float", 0.02, "increase of the share, and decrease of the threshold, per pass"),
        Option("max_share", "float", 0.3, "maximum share"),
        Option("words", "int", 8, "predicted tokens per mixture"),
    ),
)


@checked
def iter_smooth(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    tau: float = 0.9,
    first: float = 0.15,
    step: float = 0.02,
    max_share: float = 0.3,
    words: int = 8,
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block; None: all new ones. tau: lowest threshold.
      first, step, max_share: first weight of the previous prediction, its increase per pass, and its maximum.
      words: mixed tokens per column.

    Raises: UsageError for a model without token mixtures or with block-causal attention, or for invalid words.
    """
    if denoiser.is_causal:
        raise UsageError("iter_smooth needs a model with full attention, and this one is block-causal")
    if not denoiser.model.capabilities.mixtures:
        raise UsageError(f"iter_smooth needs a model that reads mixtures of tokens, and {denoiser.model.name} does not")
    if not 1 <= words < denoiser.model.vocab_size:
        raise UsageError(f"words must be from 1 to {denoiser.model.vocab_size - 1}, not {words}")
    return Procedure(blocks(block), falling(tau, step), smooth(first, step, max_share, words))


@functools.cache
def falling(tau: float, step: float) -> ColumnRule:
    """Return the threshold rule with a threshold that falls with each pass over a block."""

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> Array:
        return jnp.zeros_like(canvas.start)

    def select(params: PyTree, passed: Array, proposal: Proposal, view: View, quota: Array):
        passed = jnp.where(view.entered, 0, passed)
        fallen = jnp.maximum(1 - step * passed, tau)[:, None]
        sure = measures.confidence(proposal)
        return enough_of(sure >= fallen, sure, view, jnp.ones_like(quota)), proposal.token, passed + 1

    return ColumnRule(select, init)


class State(NamedTuple):
    cache: PyTree
    passed: Array  # int32[B], passes over this block
    ids: Array  # int32[B, W, K], most likely tokens of the window's columns in the previous pass
    share: Array  # float32[B, W, K], their probabilities


@functools.cache
def smooth(first: float, step: float, max_share: float, words: int) -> CanvasCache:
    """Return a cache that stores only the predictions of the previous pass."""

    def init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
        shape = len(canvas.start), width, words
        nothing = jnp.zeros_like(canvas.start)
        return State(WHOLE.init(denoiser, canvas, width), nothing, jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    def look(denoiser: Denoiser, state: State, canvas: Canvas, window: Window) -> tuple[WindowOutput, State]:
        passed = jnp.where(window.entered, 0, state.passed)
        weight = jnp.where(passed > 0, jnp.minimum(first + step * passed, max_share), 0.0)
        mixed = denoiser.replace(
            model=denoiser.model._replace(forward=_showing(denoiser, state, canvas, window, weight))
        )
        output, cache = WHOLE.look(mixed, state.cache, canvas, window)
        share, ids = jax.lax.top_k(jax.nn.softmax(forward.compute_logits(denoiser, output.hidden), -1), words)
        return output, State(cache, passed + 1, ids, share)

    def axes(denoiser: Denoiser, state: State) -> State:
        assert WHOLE.axes is not None
        return State(WHOLE.axes(denoiser, state.cache), 0, 0, 0)  # type: ignore[arg-type]

    return CanvasCache(look, "full", False, init, "smooth", axes)


def _showing(denoiser: Denoiser, state: State, canvas: Canvas, window: Window, weight: Array) -> Any:
    """Return the model's `forward` with mixtures in the window's masked columns."""

    def forward(params: PyTree, tokens: Array, cache: PyTree, **more: Any):
        inside = jnp.arange(tokens.shape[1]) - window.start[:, None]
        columns_shown = canvas.open & (inside >= 0) & (inside < window.width)
        place = jnp.clip(inside, 0, window.width - 1)[..., None]
        share = jnp.where(columns_shown[..., None], weight[:, None, None] * take_along(state.share, place, 1), 0.0)
        ids = jnp.concatenate([tokens[..., None], take_along(state.ids, place, 1)], -1)
        weights = jnp.concatenate([jnp.ones_like(share[..., :1]), share], -1)
        return denoiser.model.forward(params, Mixture(ids, weights), cache, **more)

    return forward
