"""This module learns how many experts passes really read, relative to rows that choose independently.

Neighbours of a text share experts, and so do the nodes of a tree. The expected number of distinct experts is therefore
an upper bound of what a pass reads. A moving average of its counts (`Output.experts`) corrects the cost of wide passes.
Passes over one token per row have an average of their own, because rows of a batch share less than neighbours do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.models.experts.sizes import MixtureSizes
from specjax.types import Array

RATE = 1 / 16
"""Weight of a pass in the moving average. It follows a change of the text within some dozen passes."""
UNSEEN = -1.0


class ExpertSharing(NamedTuple):
    """Experts beyond those of one row, as a share of the expected number."""

    ratio: Array  # float32[2], of passes over one token per row, and of wider passes


def init_sharing() -> ExpertSharing:
    """Return the state before the first pass, in which rows choose independently."""
    return ExpertSharing(jnp.ones(2))


def observe_sharing(sizes: MixtureSizes, experts: Array, batch: int, width: int | Array) -> Array:
    """Return the ratios float32[2] of a pass over `width` tokens of `batch` rows; UNSEEN for the other kind of pass.

    Args:
      experts: float32[], mean number of distinct experts that a layer read.
    """
    num_chosen = sizes.routing.num_chosen
    expected = sizes.expected_experts(batch * width) - num_chosen
    is_kind = (jnp.arange(2) == (width > 1)) & (batch * width > 1)
    return jnp.where(is_kind, (experts - num_chosen) / jnp.maximum(expected, 1e-6), UNSEEN)


def update_sharing(sharing: ExpertSharing, observed: Array) -> ExpertSharing:
    """Return the moving average after a pass with these ratios float32[2]."""
    step = jnp.where(observed == UNSEEN, 0.0, RATE * (observed - sharing.ratio))
    return ExpertSharing(sharing.ratio + step)


def corrected_costs(
    costs: np.ndarray | Array, added: np.ndarray, widths: tuple[int, ...], sharing: ExpertSharing
) -> Array:
    """Return costs float32[W] of passes with the experts that they really read, in passes of the first width.

    Args:
      costs: float32[W], with the expected number of experts.
      added: float32[W], the part of each cost that the experts beyond those of one row add.
    """
    ratio = sharing.ratio[(np.asarray(widths) > 1).astype(np.int32)]
    read = jnp.asarray(costs) - jnp.asarray(added) * (1 - ratio)
    return read / read[0]
