"""Costs of wide passes on accelerators, by chip.

A pass over n tokens reads the weights once, so it costs little more than a pass over one token until its arithmetic
takes longer than the read. On a GPU, most of a small model's step is the launches of its kernels, which do not
depend on the number of tokens (`equivalent_bytes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import FULL_PRECISION, matmul_precision
from specjax.costs.chips import CHIPS, Chip
from specjax.errors import UsageError

CHIP_OF_KIND = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e", "TPU7x": "tpu7x", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
}  # fmt: skip
"""The chips of `specjax.costs.chips` by `jax.Device.device_kind`."""
GENERIC = {"gpu": "h200", "cuda": "h200", "rocm": "h200", "tpu": "v5e"}
"""The chip whose costs stand for an unknown chip of a backend."""
LAYER_SECONDS = 25e-6
"""Seconds of the small kernels of a layer on a GPU.

On an H200 with jax 0.11.2 they took 0.7 ms in the 32 layers of Llama 3 8B, and 0.82 ms in the 30 layers of SmolLM2.
"""


class WidePasses(NamedTuple):
    """Costs of passes over several tokens while the weights are read, in passes over one token."""

    tokens: tuple[int, ...]
    costs: tuple[float, ...]  # beyond the last one, the last slope continues


OVERLAP = 0.48
"""The share of its arithmetic that a token adds to a pass on a TPU, whose other part is hidden behind the read.

Llama 3 8B on v5e, by the compiler's schedule: each token adds 0.002 passes, and its FLOPs take the time of 0.0042.
"""
HOPPER = WidePasses((1, 8, 16, 32, 64), (1.0, 1.01, 1.04, 1.07, 1.11))
"""Llama 3 8B in bfloat16 on one H200, measured with stacked weights. No H100 was measured."""
WIDE_PASSES = {"h100": HOPPER, "h200": HOPPER}
"""Measured costs by chip. Other chips use OVERLAP."""


def current_chip() -> str:
    """Return the chip of JAX's default device, or its backend for a chip that is not in the table."""
    device = jax.devices()[0]
    backend = device.platform if device.platform in ("cpu", *GENERIC) else "tpu"  # the plugin of another accelerator
    return CHIP_OF_KIND.get(device.device_kind, backend)


def pass_cost(platform: str, tokens: float, dtype: Any = jnp.bfloat16, weight_bytes: float | None = None) -> float:
    """Return the cost of a pass over `tokens` tokens of all rows, relative to the time of reading the weights.

    A product of float32 numbers reads twice the bytes of bfloat16, and takes 6 times its arithmetic on a TPU and 15
    times on an H200, with the precision of the library's programs. Products of int8 numbers have a peak of their own.

    Args:
      platform: a backend or the name of a chip.
      dtype: of the products.
      weight_bytes: bytes that a weight takes in memory; None: those of the dtype.
    """
    chip, products = _chip(platform), jnp.dtype(dtype)
    is_full = products.itemsize >= 4 and matmul_precision() in FULL_PRECISION
    peak = chip.peak_flops * (chip.int8_speed if products == jnp.int8 else 1)
    size = products.itemsize if weight_bytes is None else weight_bytes
    arithmetic = tokens * 2 / (chip.float32_flops if is_full else peak) * chip.hbm_bandwidth / size
    table = WIDE_PASSES.get(chip.name)
    if table is None:
        return max(1 + OVERLAP * arithmetic, arithmetic)
    x, y = np.asarray(table.tokens, float), np.asarray(table.costs, float)
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return max(float(np.interp(tokens, x, y) + max(tokens - x[-1], 0.0) * slope), arithmetic)


def equivalent_bytes(platform: str, weights: float, layers: float) -> float:
    """Return the bytes that a device reads in the time of a pass over one token.

    They are those of the weights, and on a GPU the time of the kernels of `layers` layers.
    """
    if not has_launches(platform):
        return weights
    return weights + layers * LAYER_SECONDS * _read_rate(platform)


def has_launches(platform: str) -> bool:
    """Return True for a GPU, whose kernels take time beside the bytes that they move."""
    return platform != "cpu" and _chip(platform).launches is not None


def launch_bytes(platform: str) -> float:
    """Return the bytes that a GPU reads in the time that a kernel adds."""
    launches = _chip(platform).launches
    assert launches is not None
    return launches.kernel_seconds * _read_rate(platform)


def _read_rate(platform: str) -> float:
    """Return the bytes of weights per second that products on a GPU read."""
    chip = _chip(platform)
    assert chip.launches is not None
    return chip.launches.bandwidth_share * chip.hbm_bandwidth


def _chip(platform: str) -> Chip:
    """Return the chip of a name, or the one that stands for a backend. Raises: UsageError for another name."""
    name = GENERIC.get(platform, platform)
    if name not in CHIPS:
        raise UsageError(f'platform must be cpu, {", ".join(GENERIC)} or a chip ({", ".join(CHIPS)}), not "{platform}"')
    return CHIPS[name]
