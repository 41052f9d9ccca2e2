"""Learn2PD: a tiny learned filter says which columns are right already; nothing behind the end of the text is decided.

Bao, Chen, Xu, Ren: Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive Parallel Decoding
(2025), arXiv 2509.25188.

Rule: with c the largest probability at every column of a block, decided ones too, and 0 behind the canvas, z =
W2 relu(W1 c + b1) + b2 and sigma(z) the filter's opinion, take the open columns with sigma(z) > theta, and the surest
one. `eotp`, end-of-text prediction: once a column holds a token that ends the text, the text ends with the leftmost
such column, and what is behind it is neither computed nor decided.
Guarantee: lossy; theta >= 1 is one column a pass. A filter with z = K (c - tau), K large, is the threshold rule.
Deviations: a filter is of blocks of its own size. The release also ends a text where an open column would by its
likeliest token; here only where one does. Which tokens end a text is what `denoise` is told by `eos`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.catalog import Method, Option
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import (
    Canvas,
    CanvasOutput,
    ColumnRule,
    Control,
    ControlAction,
    Denoiser,
    Procedure,
    Proposal,
    View,
)
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="learn2pd",
    kind="diffusion",
    guarantee="lossy",
    summary="decides the columns that a small trained filter accepts, and stops at the end of the text",
    paper="Bao et al. 2025, arXiv 2509.25188",
    needs=frozenset({"filter"}),
    options=(
        Option("theta", "float", 0.96, "filter output above which a column is decided"),
        Option("eotp", "yes_or_no", True, "end the text at the first end-of-text token"),
    ),
)


class Filter(NamedTuple):
    """Two linear layers over the columns of a block of W, with a hidden layer of H: H = W as published."""

    weight1: Array  # float32[W, H], columns first
    bias1: Array  # float32[H]
    weight2: Array  # float32[H, W]
    bias2: Array  # float32[W]

    def __call__(self, confidence: Array) -> Array:
        """float32[..., W], the logit of each column's being right, of the confidences [..., W]."""
        return jax.nn.relu(confidence @ self.weight1 + self.bias1) @ self.weight2 + self.bias2


def above(tau: float, width: int, *, sharpness: float = 1e4) -> Filter:
    """The filter of blocks of `width` that is the threshold rule."""
    eye = jnp.eye(width)
    return Filter(sharpness * eye, jnp.zeros(width), eye, jnp.full(width, -sharpness * tau))


@checked
def learn2pd(
    denoiser: Denoiser,
    *,
    filter: Filter | None = None,
    theta: float = 0.96,
    eotp: bool = True,
) -> Procedure:
    """filter: what was trained for this model, for blocks of its width. theta: opinion above which a column is taken.
    eotp: end the text with the first column that ends it.

    Raises: UsageError without a filter, or for one of other shapes than a block's.
    """
    if filter is None:
        raise UsageError("learn2pd needs a filter that was trained for this model; give filter=")
    own = Filter(*filter)
    width, hidden = own.weight1.shape if own.weight1.ndim == 2 else (-1, -1)
    shapes = tuple(array.shape for array in own)
    if shapes != ((width, hidden), (hidden,), (hidden, width), (width,)):
        raise UsageError(f"a filter has the shapes [W, H], [H], [H, W] and [W], not {', '.join(map(str, shapes))}")
    if denoiser.block not in (None, width):
        raise UsageError(f"the filter is of blocks of {width}, and the model has blocks of {denoiser.block}")
    return Procedure(blocks(width), filtered(theta).replace(params=own), control=ends_the_text() if eotp else None)


@functools.cache
def filtered(theta: float) -> ColumnRule:
    """The rule, whose parameters are a filter."""

    def select(params: Filter, state: PyTree, proposal: Proposal, view: View, quota: Array):
        largest = jnp.exp(jnp.max(proposal.logits, -1) - jax.nn.logsumexp(proposal.logits, -1))
        right = view.eligible & (jax.nn.sigmoid(params(jnp.where(view.exists, largest, 0.0))) > theta)
        return right | measures.most_confident(measures.confidence(proposal), view.eligible), proposal.token, state

    return ColumnRule(select)


@functools.cache
def ends_the_text() -> Control:
    """The control `eotp`."""

    def act(params: PyTree, state: PyTree, canvas: Canvas, proposal: Proposal, view: View, wide: CanvasOutput | None):
        columns = jnp.arange(canvas.tokens.shape[1])
        ends = (canvas.decided_at >= 0) & ~canvas.open & view.ends(canvas.tokens)
        return ControlAction(end=jnp.min(jnp.where(ends, columns + 1, canvas.end[:, None]), 1)), state

    return Control(act)
