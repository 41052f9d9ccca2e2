"""TPU chips: published figures, and topologies such as `v5e:2x4` as the compiler knows them.

All figures are per device as JAX counts them: a v4, v5e, v5p or v6e chip is one device, a tpu7x chip is two.

Sources: bandwidth and peak of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x);
links from the same pages (bidirectional bandwidth per chip over two times its ports) and, for v4, from Jouppi et al.,
TPU v4 (2023), arXiv 2304.01433. `hbm_bytes` is what the compiler itself says is available when a program does not fit;
it is a little less than the published capacity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from specjax.errors import UsageError
from specjax.libtpu import prepare_environment

GIB = 1 << 30
HOP_SECONDS = 1e-6  # latency of one hop between neighbours: about a microsecond, How to Scale Your Model, part 2


@dataclass(frozen=True)
class Chip:
    """One device of a generation."""

    name: str  # as in a topology
    hbm_bytes: int  # what a program may use
    hbm_bandwidth: float  # bytes/s
    peak_flops: float  # bfloat16, 1/s
    flops_per_cycle: int  # of all its matrix units
    link_bandwidth: float  # bytes/s, one link, one way
    dimensions: int  # of the torus
    host: tuple[int, ...]  # chips of one host
    chip_config: str | None = None  # of libtpu, where JAX's default is not the compiler's
    devices_per_chip: int = 1
    source: str = ""

    @property
    def clock(self) -> float:
        """Cycles per second: the published peak over what the matrix units do in a cycle.

        The compiler counts in these cycles: it schedules a bfloat16 product of 8192 x 8192 matrices at 70 to 93 % of
        the peak on every generation here.
        """
        return self.peak_flops / self.flops_per_cycle


_DOCS = "docs.cloud.google.com/tpu/docs/"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # 2 cores of 4 units of 128 x 128, fused (megacore).
        Chip(
            "v4", int(30.75 * GIB), 1.2288e12, 275e12, 2 * 4 * 128 * 128 * 2, 50e9, 3, (2, 2, 1), "megacore",
            source=_DOCS + "v4 (32 GiB, 1228 GB/s, 275 TFLOP/s); 6 links of 50 GB/s, arXiv 2304.01433",
        ),
        Chip(
            "v5e", int(15.75 * GIB), 8.19e11, 197e12, 4 * 128 * 128 * 2, 50e9, 2, (2, 2),
            source=_DOCS + "v5e (16 GB, 819 GB/s, 197 TFLOP/s, 400 GB/s over 4 ports)",
        ),
        Chip(
            "v5p", int(95.74 * GIB), 2.765e12, 459e12, 2 * 4 * 128 * 128 * 2, 100e9, 3, (2, 2, 1),
            source=_DOCS + "v5p (95 GiB, 2765 GB/s, 459 TFLOP/s, 1200 GB/s over 6 ports)",
        ),
        # 2 units of 256 x 256 at two products per cell and cycle.
        Chip(
            "v6e", int(31.25 * GIB), 1.638e12, 918e12, 2 * 256 * 256 * 4, 100e9, 2, (2, 2),
            source=_DOCS + "v6e (32 GB, 1638 GB/s, 918 TFLOP/s, 800 GB/s over 4 ports)",
        ),
        # A device is one of the chip's two cores and has half of its memory, peak and links.
        Chip(
            "tpu7x", int(94.75 * GIB), 7.38e12 / 2, 2307e12 / 2, 2 * 256 * 256 * 4, 100e9, 3, (2, 2, 1),
            devices_per_chip=2,
            source=_DOCS + "tpu7x (192 GiB, 7380 GB/s, 2307 TFLOP/s, 1200 GB/s over 6 ports)",
        ),
    )
}  # fmt: skip

_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
"""Slices that are offered, the common ones of the 3-D tori; larger multiples of 4 are good too."""


@dataclass(frozen=True)
class Topology:
    """A slice of chips."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip


def known_topologies() -> list[str]:
    """Names that `parse_topology` takes, in the order of the table."""
    return [f"{chip.name}:{shape}" for chip in CHIPS.values() for shape in _SHAPES[chip.dimensions]]


def parse_topology(name: str) -> Topology:
    """From `v5e:2x4`. Raises: UsageError that lists the known ones."""
    kind, _, sizes = name.partition(":")
    shape = tuple(int(n) for n in sizes.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) else ()
    chip = CHIPS.get(kind)
    if chip is None or len(shape) != chip.dimensions or not _is_slice(chip, shape):
        some = [f"{c.name}:{','.join(_SHAPES[c.dimensions])}" for c in CHIPS.values() if chip in (None, c)]
        raise UsageError(f'--topology: "{name}" is not a slice of chips; known are {"; ".join(some)}')
    return Topology(chip, shape)


def one_of(chip: Chip) -> Topology:
    """A single chip."""
    return parse_topology(f"{chip.name}:{'x'.join('1' * chip.dimensions)}")


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
    """One chip, or whole hosts, of at most 16 chips in a direction of a 2-D torus."""
    if math.prod(shape) == 1:
        return True
    most = 16 if chip.dimensions == 2 else 28
    return max(shape) <= most and all(n % h == 0 for n, h in zip(shape, chip.host, strict=True))


def larger(topology: Topology) -> Topology | None:
    """The next larger slice of the table; None: there is none."""
    for shape in _SHAPES[topology.chip.dimensions]:
        sizes = tuple(map(int, shape.split("x")))
        if math.prod(sizes) > math.prod(topology.shape):
            return Topology(topology.chip, sizes)
    return None


def describe_devices(topology: Topology) -> list[Any]:
    """The slice's devices, to compile for; there need be no TPU.

    Raises: UsageError if libtpu, which holds the compiler, is missing or cannot be used.
    """
    import importlib.util

    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "--topology: the TPU compiler is not installed; run pip install 'specjax[tpu-compile]' (it needs no TPU)"
        )
    prepare_environment()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.chip.chip_config:
        options["chip_config_name"] = topology.chip.chip_config
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except Exception as error:  # of several kinds, from libtpu and from jax
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"--topology: libtpu does not give {topology.name} ({reason})") from error
    return list(found.devices)
