"""TPU chips: published figures.

All figures are per device as JAX counts them: a v4, v5e, v5p or v6e chip is one device, a tpu7x chip is two.

Sources: bandwidth and peak of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x);
links from the same pages (bidirectional bandwidth per chip over two times its ports) and, for v4, from Jouppi et al.,
TPU v4 (2023), arXiv 2304.01433. `hbm_bytes` is what the compiler itself says is available when a program does not fit;
it is a little less than the published capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def gib(size: float) -> str:
    """Bytes, to be read."""
    return f"{size / GIB:.2f} GiB"
