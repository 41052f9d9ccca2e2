"""Learn2PD: a small trained filter predicts which proposals are right, and columns after the end are skipped.

Bao, Chen, Xu, Ren: Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive Parallel Decoding
(2025), arXiv 2509.25188.

Rule: c contains the largest probability at each column of a block, decided columns included, and 0 past the end of the
canvas. The filter computes z = W2 relu(W1 c + b1) + b2. Take the masked columns with sigma(z) > theta, and always the
most confident one. `eotp` (end-of-text prediction): the text ends at the leftmost decided end token. Later columns are
neither computed nor decided.
Guarantee: lossy; theta >= 1 is one column a pass. A filter with z = K (c - tau), K large, is the threshold rule.
Deviations: a filter has a fixed block size. The release also ends a text at a masked column whose most likely token is
an end token; here the token must be decided. The argument `eos` of `denoise` gives the end tokens.
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
from specjax.models.loading.trained_arrays import read_arrays
from specjax.types import Array, PyTree

METHOD = Method(
    name="learn2pd",
    kind="diffusion",
    guarantee="lossy",
    summary="decides the columns that a small trained filter accepts, and stops at the end of the text",
    paper="Bao et al. 2025, arXiv 2509.25188",
    options=(
        Option("filter", "filter", None, "file of a trained filter; `specjax train --method learn2pd` writes it"),
        Option("theta", "float", 0.96, "filter output above which a column is decided"),
        Option("eotp", "yes_or_no", True, "end the text at the first end-of-text token"),
    ),
)


class Filter(NamedTuple):
    """Two linear layers over the W columns of a block, with H hidden units. The paper uses H = W."""

    weight1: Array  # float32[W, H], columns first
    bias1: Array  # float32[H]
    weight2: Array  # float32[H, W]
    bias2: Array  # float32[W]

    def __call__(self, confidence: Array) -> Array:
        """Return float32[..., W]: the logit that each column is right, from the confidences [..., W]."""
        return jax.nn.relu(confidence @ self.weight1 + self.bias1) @ self.weight2 + self.bias2


read_filter = functools.partial(read_arrays, kind="filter", fields=Filter)
"""Read the filter of a file. Raises: UsageError."""


def above(tau: float, width: int, *, sharpness: float = 1e4) -> Filter:
    """Return the filter for blocks of `width` that equals the threshold rule with threshold `tau`."""
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
    """Return the procedure.

    Args:
      filter: filter trained for this model and block width. theta: filter output above which a column is taken.
      eotp: end the text at the first decided end token.

    Raises: UsageError if the filter is missing, has inconsistent shapes, or was trained for another block size.
    """
    if filter is None:
        raise UsageError("learn2pd needs a filter that was trained for this model; give filter=")
    weights = Filter(*filter)
    width, hidden = weights.weight1.shape if weights.weight1.ndim == 2 else (-1, -1)
    shapes = tuple(array.shape for array in weights)
    if shapes != ((width, hidden), (hidden,), (hidden, width), (width,)):
        raise UsageError(f"a filter has the shapes [W, H], [H], [H, W] and [W], not {', '.join(map(str, shapes))}")
    if denoiser.block not in (None, width):
        raise UsageError(
            f"the filter has a block size of {width}, and the model one of {denoiser.block}; give a filter of that size"
        )
    return Procedure(blocks(width), filtered(theta).replace(params=weights), control=ends_the_text() if eotp else None)


@functools.cache
def filtered(theta: float) -> ColumnRule:
    """Return the rule that takes columns with a filter output above `theta`. Its parameters are a `Filter`."""

    def select(params: Filter, state: PyTree, proposal: Proposal, view: View, quota: Array):
        largest = jnp.exp(jnp.max(proposal.logits, -1) - jax.nn.logsumexp(proposal.logits, -1))
        right = view.eligible & (jax.nn.sigmoid(params(jnp.where(view.exists, largest, 0.0))) > theta)
        return right | measures.most_confident(measures.confidence(proposal), view.eligible), proposal.token, state

    return ColumnRule(select)


@functools.cache
def ends_the_text() -> Control:
    """Return the control `eotp`, which ends the text at the first decided end token."""

    def act(params: PyTree, state: PyTree, canvas: Canvas, proposal: Proposal, view: View, wide: CanvasOutput | None):
        columns = jnp.arange(canvas.tokens.shape[1])
        ends = (canvas.decided_at >= 0) & ~canvas.open & view.ends(canvas.tokens)
        return ControlAction(end=jnp.min(jnp.where(ends, columns + 1, canvas.end[:, None]), 1)), state

    return Control(act)
