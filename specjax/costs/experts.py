"""Bytes of the experts that a pass reads. More rows choose more distinct experts, so a pass over them costs more.

n rows that choose k of E experts independently touch E (1 - (1 - k / E)^n) of them. Neighbours of a text share experts,
so the number is an upper bound.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from specjax.models.experts.sizes import MixtureSizes
from specjax.models.storage import is_of_experts, num_bytes
from specjax.types import Target

SIMULATIONS = 500


class ExpertShare(NamedTuple):
    """The experts of a model, and their share in the bytes that a pass over one token reads."""

    sizes: MixtureSizes | None = None  # None: the model has no experts
    share: float = 0.0

    def added(self, rows: float) -> float:
        """Return the bytes of the experts that `rows` rows add to those of one row, in passes over one token."""
        if self.sizes is None:
            return 0.0
        return self.share * (self.sizes.expected_experts(rows) / self.sizes.routing.num_chosen - 1)


def busiest_experts(sizes: MixtureSizes, rows: int, parts: int = 1) -> float:
    """Return the expected number of distinct experts on the busiest of `parts` devices, which the others wait for.

    It is the mean of SIMULATIONS seeded passes over rows that choose independently. One part: it is exact.
    """
    if parts == 1:
        return sizes.expected_experts(rows)
    rng, total = np.random.default_rng(0), 0
    for _ in range(SIMULATIONS):
        experts = np.unique(np.argsort(rng.random((rows, sizes.num_experts)))[:, : sizes.routing.num_chosen])
        total += np.bincount(experts * parts // sizes.num_experts, minlength=parts).max()
    return total / SIMULATIONS


def expert_share(target: Target) -> ExpertShare:
    """Return the experts of a target, and their share in `active_bytes`."""
    sizes = _sizes(target)
    return ExpertShare(sizes, _chosen_bytes(target, sizes) / active_bytes(target)) if sizes else ExpertShare()


def active_bytes(target: Target) -> float:
    """Return the bytes of the parameters that a pass over one token reads: all, but only the chosen experts."""
    sizes = _sizes(target)
    total = num_bytes(target.pass_params)
    return total - _expert_bytes(target) + _chosen_bytes(target, sizes) if sizes else total


def _sizes(target: Target) -> MixtureSizes | None:
    """Return the sizes of the experts; None for models without experts, or without a config of `specjax.models`."""
    return getattr(getattr(target.model, "config", None), "experts", None)


def _chosen_bytes(target: Target, sizes: MixtureSizes) -> float:
    return _expert_bytes(target) * sizes.routing.num_chosen / sizes.num_experts


def _expert_bytes(target: Target) -> int:
    """Return the bytes of the parameters that have an axis of experts."""
    leaves = jax.tree_util.tree_flatten_with_path(target.pass_params)[0]
    names = lambda path: tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    return num_bytes([leaf for path, leaf in leaves if is_of_experts(names(path))])
