"""Bytes of the experts that a pass reads. More rows choose more distinct experts, so a pass over them costs more.

n rows that choose k of E experts independently touch E (1 - (1 - k / E)^n) of them. Neighbours of a text share experts,
so the number is an upper bound. On a GPU the form of the program decides (`specjax.models.experts.running`): few rows
read an expert for each pair of a row and an expert, and more rows read all experts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.costs.accelerators import current_chip, equivalent_bytes, has_launches, launch_bytes
from specjax.models.experts.blocks import BLOCK_ROWS_GPU, BLOCK_ROWS_TPU
from specjax.models.experts.counting import mixture_layers
from specjax.models.experts.running import MAX_LOOP_ROWS_TPU, form_for
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.storage import is_of_experts, num_bytes
from specjax.numerics.quantized_array import is_quantized
from specjax.types import PyTree, Target

SIMULATIONS = 500
MAX_COUNTED_ROWS = 256
"""Rows of a pass above which practically all experts of a device are chosen."""


ROUTER_LAYERS = 0.22
"""Small kernels of a router and its pairs on a GPU beside those of a dense MLP, in layers: 6 of 0.92 us in 25 us."""
DENSE_KERNELS, TURN_KERNELS = 2.0, 8.3
"""Kernels of a layer's experts in the form "dense" beyond those of "pairs", and those of a block in the form "blocks".

They are those of the programs of the CUDA compiler in docs/devices.md: 10 and 12, and 530 for 64 blocks.
"""
EXPANDED, COPIED = 4.5, 3.0
"""Bytes that move per byte of experts: products of all experts expand groups first, and a block copies its expert."""


class ExpertShare(NamedTuple):
    """The experts of a model, and their share in the bytes that a pass over one token reads."""

    sizes: MixtureSizes | None = None  # None: the model has no experts
    share: float = 0.0  # of the chosen experts; on a GPU of the bytes that it reads in the time of the pass
    is_whole: bool = True  # the weights are arrays of one layer
    has_groups: bool = False  # groups of inputs share a scale
    launch: float | None = None  # of a kernel in each layer with experts, in passes; None: not on a GPU

    def added(self, rows: int) -> float:
        """Return the bytes of the experts that `rows` rows add to those of one row, in passes over one token."""
        if self.sizes is None:
            return 0.0
        if self.launch is not None:
            return max(self._on_gpu(rows) - self._on_gpu(1), 0.0)
        return self.share * (self.sizes.expected_experts(rows) / self.sizes.routing.num_chosen - 1)

    def _on_gpu(self, rows: int) -> float:
        """Return the time of the experts by the form that a GPU runs, in passes over one token."""
        assert self.sizes is not None and self.launch is not None
        count, num_chosen = self.sizes.num_experts, self.sizes.routing.num_chosen
        form = form_for(rows, (num_chosen, count), "gpu", is_whole=self.is_whole, has_groups=self.has_groups)
        if form == "pairs":
            read, kernels = float(rows * num_chosen), 0.0
        elif form == "dense":
            read, kernels = count * (EXPANDED if self.has_groups else 1.0), DENSE_KERNELS
        else:
            turns = min(rows * num_chosen, count + rows * num_chosen // min(rows, BLOCK_ROWS_GPU))
            read, kernels = turns * COPIED, turns * TURN_KERNELS
        return self.share * read / num_chosen + self.launch * kernels


@functools.lru_cache(maxsize=1024)
def busiest_experts(sizes: MixtureSizes, rows: int, parts: int = 1) -> float:
    """Return the expected number of distinct experts on the busiest of `parts` devices, which the others wait for.

    It is the mean of SIMULATIONS seeded passes over rows that choose independently. One part: it is exact.
    """
    if parts == 1:
        return sizes.expected_experts(rows)
    if rows > MAX_COUNTED_ROWS:
        return sizes.num_experts / parts
    rng, total = np.random.default_rng(0), 0
    for _ in range(SIMULATIONS):
        experts = np.unique(np.argsort(rng.random((rows, sizes.num_experts)))[:, : sizes.routing.num_chosen])
        total += np.bincount(experts * parts // sizes.num_experts, minlength=parts).max()
    return float(total) / SIMULATIONS


@functools.lru_cache(maxsize=1024)
def expert_turns(sizes: MixtureSizes, rows: int, parts: int = 1) -> float:
    """Return the expected turns of the loop over experts of a TPU, on the busiest of `parts` devices.

    A turn is a distinct expert for up to `MAX_LOOP_ROWS_TPU` rows, and else a block of rows of one expert. Several
    devices have the mean of SIMULATIONS seeded passes, in which the rows of different experts are independent.
    """
    if rows <= MAX_LOOP_ROWS_TPU:
        return busiest_experts(sizes, rows, parts)
    if parts == 1:
        return expected_blocks(sizes, rows, BLOCK_ROWS_TPU)
    share = sizes.routing.num_chosen / sizes.num_experts
    counts = np.random.default_rng(0).binomial(rows, share, (SIMULATIONS, parts, sizes.num_experts // parts))
    return float(np.ceil(counts / BLOCK_ROWS_TPU).sum(2).max(1).mean())


def expected_blocks(sizes: MixtureSizes, rows: int, block_rows: int) -> float:
    """Return the expected number of blocks of rows of one expert, for rows that choose independently."""
    share, log = sizes.routing.num_chosen / sizes.num_experts, lambda n: math.lgamma(n + 1)
    if share == 1:
        return float(sizes.num_experts * -(-rows // block_rows))
    chance = lambda n: math.exp(  # of n rows with the same expert, a binomial distribution
        log(rows) - log(n) - log(rows - n) + n * math.log(share) + (rows - n) * math.log1p(-share)
    )
    return sizes.num_experts * sum(chance(n) * -(-n // block_rows) for n in range(1, rows + 1))


def expert_share(target: Target, platform: str | None = None) -> ExpertShare:
    """Return the experts of a target, and their share in the bytes that the platform reads in a pass over one token.

    Args:
      platform: as in `estimated`.
    """
    sizes, platform = _sizes(target), platform or current_chip()
    if sizes is None:
        return ExpertShare()
    read = equivalent_bytes(platform, active_bytes(target), launched_layers(target))
    share = _chosen_bytes(target, sizes) / read
    if not has_launches(platform):
        return ExpertShare(sizes, share)
    has_groups = any(is_quantized(leaf) and leaf.scales.shape[-1] > 1 for leaf in expert_leaves(target.pass_params))
    config: Any = target.model.config
    launch = len(mixture_layers(config)) * launch_bytes(platform) / read
    return ExpertShare(sizes, share, not config.stacked, has_groups, launch)


def launched_layers(target: Target) -> float:
    """Return the layers in whose time a GPU runs the small kernels of a target. A router takes part of a layer."""
    layers = target.model.capabilities.num_layers
    return layers if _sizes(target) is None else layers + ROUTER_LAYERS * len(mixture_layers(target.model.config))


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
    return num_bytes(expert_leaves(target.pass_params))


def expert_leaves(params: PyTree) -> list[Any]:
    """Return the arrays and quantised matrices that have an axis of experts, biases included."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    names = lambda path: tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    return [leaf for path, leaf in leaves if is_of_experts(names(path))]
