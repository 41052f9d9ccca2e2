"""This module counts the experts that a pass reads, and keeps the places of its rows, from layer to layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import platforms
from specjax.models.experts.routing import ExpertChoice
from specjax.models.experts.running import distinct_experts
from specjax.models.experts.shuffling import RowHistory
from specjax.models.experts.sizes import MixtureSizes
from specjax.types import Array


class PassHistory(NamedTuple):
    """Values that each layer of a mixture hands to the next one."""

    rows: RowHistory | None = None  # inputs of the tables that predict devices; None: there are no tables
    read: Array | None = None  # float32[], distinct experts of all rows, summed over layers; None: not counted

    def after(self, choice: ExpertChoice, num_experts: int) -> PassHistory:
        """Return the history after a layer that computed the chosen experts."""
        if self.read is None:
            return self
        return self._replace(read=self.read + distinct_experts(choice, num_experts)[1].astype(jnp.float32))


def start_history(sizes: MixtureSizes | None, tokens: Any) -> PassHistory | None:
    """Return the history before the first layer; None for a model without experts.

    Tables read token ids. A mixture with tables chooses experts device by device, so its experts are not counted.
    """
    if sizes is None:
        return None
    if sizes.shuffling is None:
        # GPUs read the experts of each pair or all of them, so distinct ones say nothing about the cost
        return None if platforms.of_program() == "gpu" else PassHistory(read=jnp.float32(0))
    return PassHistory(RowHistory.start(tokens)) if isinstance(tokens, jax.Array | np.ndarray) else None


def mean_experts(history: PassHistory | None, config: Any) -> Array | None:
    """Return the mean number of distinct experts that a layer with experts read, or None if it was not counted."""
    return None if history is None or history.read is None else history.read / len(mixture_layers(config))


def mixture_layers(config: Any) -> list[int]:
    """Return the numbers of the layers with a mixture of experts."""
    kinds = getattr(config, "kinds", None)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if kind.feed == "moe"]
    return [layer for layer in range(config.num_layers) if layer not in config.experts.dense_layers]
