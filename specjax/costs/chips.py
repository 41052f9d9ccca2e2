"""Published figures of TPU and GPU chips, each with its source.

All figures are per JAX device. A v4, v5e, v5p or v6e chip or a GPU is one device, and a tpu7x chip is two.

Products count at the bfloat16 peak, and those of float32 numbers at `Chip.float32_flops`. The peak of int8 products
(`Chip.int8_speed`) is twice as high on v5e and v6e (their pages), v5p (How to Scale Your Model) and Hopper GPUs (their
pages). It is equal on v4, and not published for tpu7x. The rule of thumb for wide passes uses it, and plans do not.

Megacore: v4 and v5p chips have two cores that JAX presents as one device. XLA splits its own operations over both
cores, so peak and bandwidth count in full. A Pallas kernel with a sequential grid, such as tree attention, runs on one
core (`specjax.costs.roofline`). Two facts are not modelled. The two devices of a tpu7x chip share its links, and an
axis of a small slice is a line instead of a ring.

GPUs: no compiler estimates their times. `Launches` has the measured costs from which `specjax.costs.roofline` estimates
them. The GPUs of a machine are connected by switches, so a ring uses all links of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specjax.files.sizes import GIB, MIB

FLOAT32_PASSES = 6
"""Passes of a TPU's matrix units over bfloat16 parts of float32 numbers, for a product of the precision "highest"."""
HOP_SECONDS = 1e-6
"""Latency of one hop between neighbours, "typically around 1us" (jax-ml.github.io/scaling-book/sharding)."""


@dataclass(frozen=True)
class Launches:
    """Measured costs of running a program on a GPU."""

    bandwidth_share: float  # of the published bandwidth, in products of one row
    kernel_seconds: float  # added by a kernel, beside the bytes that it moves
    read_seconds: float  # in which the host reads whether a loop goes on, or which branch runs


@dataclass(frozen=True)
class Chip:
    """A device of one TPU or GPU generation."""

    name: str  # as in the name of a topology, such as v5e:2x2
    hbm_bytes: int  # available to a program
    hbm_bandwidth: float  # bytes/s
    peak_flops: float  # bfloat16 FLOPs/s
    flops_per_cycle: int  # bfloat16, all matrix units together
    link_bandwidth: float  # bytes/s of one link in one direction
    vmem_bytes: int  # on-chip memory of one core, the limit of a kernel
    dimensions: int  # of the torus of links; 1: a switch
    host: tuple[int, ...]  # shape of the chips of one host
    sources: dict[str, str] = field(hash=False)  # figure -> its publication, or the way it was determined
    cores: int = 1  # cores per device; 2: megacore
    chip_config: str | None = None  # libtpu's name, if JAX's default differs from the compiler's
    devices_per_chip: int = 1
    platform: str = "tpu"  # JAX's backend, "tpu" or "gpu"
    ring_links: int = 2  # links of a device that a ring of collectives uses
    start_seconds: float = 0.0  # latency of a collective without its hops
    hop_seconds: float = HOP_SECONDS  # latency of a hop
    launches: Launches | None = None  # None: the compiler estimates times
    int8_speed: int = 1  # int8 operations in the time of a bfloat16 FLOP
    float32_units: float | None = None  # float32 FLOPs/s beside the matrix units, which have no float32 on a GPU

    @property
    def float32_flops(self) -> float:
        """FLOPs per second of products of float32 numbers with the precision "highest"."""
        return self.float32_units or self.peak_flops / FLOAT32_PASSES

    @property
    def clock(self) -> float:
        """Cycles per second: the published peak divided by the FLOPs of the matrix units per cycle.

        The compiler counts in these cycles. It schedules a bfloat16 product of 8192 x 8192 matrices at 70 to 93 % of
        the peak on every generation listed.
        """
        return self.peak_flops / self.flops_per_cycle


DOCS = "docs.cloud.google.com/tpu/docs/"
_BOOK = "jax-ml.github.io/scaling-book/tpus"
_JAX = "jax/_src/pallas/mosaic/tpu_info.py of jax 0.10.2"
_COMPILER = "libtpu 0.0.42, error for a program that does not fit: available HBM "
_XLA = "openxla/xla, xla/backends/gpu/target_config/specs/"
_MEASURED = "measured on one H200 with jax 0.11.2 (docs/gpu.md): products at 4.0 TB/s, 0.7 ms for 760 small kernels, "
_UNITS_256 = "2 units of 256 x 256; products per cell and cycle are not published; two of them give the clock of "

NVIDIA = "nvidia.com/en-us/data-center/"
_LAUNCHES = Launches(bandwidth_share=0.83, kernel_seconds=0.92e-6, read_seconds=15e-6)


def _gpu(name: str, hbm_bytes: int, hbm_bandwidth: float, sources: dict[str, str]) -> Chip:
    """Return a GPU of the Hopper generation in its SXM form, eight of them in a machine."""
    common = dict(
        flops_per_cycle=_XLA + f"{name}: 132 cores of 4 units with 512 products per clock of 1.83 GHz",
        vmem_bytes=_XLA + f"{name}: shared_memory_per_block_optin 232448",
        cores="a kernel uses all 132 cores",
        float32_units=NVIDIA + f"{name}: 67 TFLOPS (FP32, SXM)",
        latency="NCCL's own model, src/graph/tuning.cc: 6.6 us and 0.6 us per step of a ring (LL, NVLink)",
    )
    return Chip(
        name, hbm_bytes, hbm_bandwidth, 1979e12 / 2, 132 * 4 * 512 * 2, 25e9, 232_448, 1, (1,), sources | common,
        platform="gpu", int8_speed=2, ring_links=18, start_seconds=6.6e-6, hop_seconds=0.6e-6, launches=_LAUNCHES,
        float32_units=67e12,
    )  # fmt: skip


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", int(30.75 * GIB), 1.2e12, 275e12, 2 * 4 * 128 * 128 * 2, 45e9, 16 * MIB, 3, (2, 2, 1),
            dict(
                hbm_bytes=_COMPILER + "30.75G (" + DOCS + "v4: 32 GiB)",
                hbm_bandwidth=DOCS + "v4: 1200 GBps (1.23e12 in " + _JAX + ")",
                peak_flops=DOCS + "v4: 275 teraflops (bf16 or int8)",
                flops_per_cycle=DOCS + "v4: two TensorCores of four matrix units; 128 x 128, " + _BOOK,
                link_bandwidth=_BOOK + ": 4.5e10 one way; " + DOCS + "v4: all-reduce 1.1 PB/s, 4096 chips, 6 links",
                vmem_bytes=_JAX + ": 16 MiB per core",
                cores=_JAX + ": megacore",
            ),
            cores=2, chip_config="megacore",
        ),
        Chip(
            "v5e", int(15.75 * GIB), 8.19e11, 197e12, 4 * 128 * 128 * 2, 50e9, 128 * MIB, 2, (2, 2),
            dict(
                hbm_bytes=_COMPILER + "15.75G (" + DOCS + "v5e: 16 GB)",
                hbm_bandwidth=DOCS + "v5e: 819 GBps (8.1e11 in " + _BOOK + "; a later version of the page: 800 GiBps)",
                peak_flops=DOCS + "v5e: 197 TFLOPs (bf16)",
                flops_per_cycle=DOCS + "v5e: one TensorCore of four matrix units; 128 x 128, 1.5 GHz, " + _BOOK,
                link_bandwidth=DOCS + "v5e: 400 GBps both ways over 4 ports; " + _BOOK + ": 5e10 one way",
                vmem_bytes=_BOOK + ": 128 MiB; the same in " + _JAX,
                cores=DOCS + "v5e: one TensorCore",
            ),
            int8_speed=2,
        ),
        Chip(
            "v5p", int(95.74 * GIB), 2.765e12, 459e12, 2 * 4 * 128 * 128 * 2, 100e9, 64 * MIB, 3, (2, 2, 1),
            dict(
                hbm_bytes=_COMPILER + "95.74G (" + DOCS + "v5p: 95 GiB; 96 GB in " + _BOOK + ")",
                hbm_bandwidth=DOCS + "v5p: 2765 GBps, in a later version 2575 GiBps (2.46e12 in " + _JAX + ")",
                peak_flops=DOCS + "v5p: 459 TFLOPs (BF16)",
                flops_per_cycle=DOCS + "v5p: two TensorCores of four matrix units; 128 x 128, " + _BOOK,
                link_bandwidth=DOCS + "v5p: 1200 GBps both ways, 6 links of a 3D torus; " + _BOOK + ": 1e11 one way",
                vmem_bytes=_JAX + ": 64 MiB per core",
                cores=_JAX + ": megacore",
            ),
            cores=2, int8_speed=2,
        ),
        Chip(
            "v6e", int(31.25 * GIB), 1.638e12, 918e12, 2 * 256 * 256 * 4, 100e9, 128 * MIB, 2, (2, 2),
            dict(
                hbm_bytes=_COMPILER + "31.25G (" + DOCS + "v6e: 32 GB)",
                hbm_bandwidth=DOCS + "v6e: 1638 GBps",
                peak_flops=DOCS + "v6e: 918 TFLOPs (bf16)",
                flops_per_cycle=DOCS + "v6e: " + _UNITS_256 + "v5p, 1.75 GHz",
                link_bandwidth=DOCS + "v6e: 800 GBps both ways over 4 ports; " + _BOOK + ": 1e11 one way",
                vmem_bytes=_JAX + ": 128 MiB per core",
                cores=DOCS + "v6e: one TensorCore",
            ),
            int8_speed=2,
        ),
        # A device is one of the two cores of a chip, with half of the memory, bandwidth and peak of the chip.
        Chip(
            "tpu7x", int(94.75 * GIB), 7.38e12 / 2, 2307e12 / 2, 2 * 256 * 256 * 4, 100e9, 64 * MIB, 3, (2, 2, 1),
            dict(
                hbm_bytes=_COMPILER + "94.75G (half of " + DOCS + "tpu7x: 192 GiB)",
                hbm_bandwidth="half of " + DOCS + "tpu7x: 7380 GBps",
                peak_flops="half of " + DOCS + "tpu7x: 2307 TFLOPs (BF16)",
                flops_per_cycle=_JAX + ": " + _UNITS_256 + "2.2 GHz",
                link_bandwidth=DOCS + "tpu7x: 1200 GBps both ways, 6 links, as on v5p",
                vmem_bytes=_JAX + ": 64 MiB per core",
                cores=DOCS + "tpu7x: two TensorCores, each a device",
            ),
            devices_per_chip=2,
        ),
        _gpu(
            "h200", 150_109_880_320, 4.8e12,
            dict(
                hbm_bytes="an H200's own target config: device_memory_size 150109880320, of which JAX reserves 75 %",
                hbm_bandwidth=NVIDIA + "h200: 4.8 TB/s (4.814e12 in the target config)",
                peak_flops=NVIDIA + "h200: 1,979 TFLOPS (BFLOAT16 with sparsity), half of it without",
                link_bandwidth=NVIDIA + "h200: NVLink 900 GB/s both ways, 18 links",
                launches=_MEASURED + "0.92 ms for the 60 condition reads of SmolLM2's 30 layers",
            ),
        ),
        _gpu(
            "h100", 84_942_979_072, 3.352e12,
            dict(
                hbm_bytes=_XLA + "h100_sxm.txtpb: device_memory_size 84942979072, of which JAX reserves 75 %",
                hbm_bandwidth=NVIDIA + "h100: 3.35 TB/s (H100 SXM; 3.35232e12 in " + _XLA + "h100_sxm.txtpb)",
                peak_flops=NVIDIA + "h100: 1,979 TFLOPS (H100 SXM, BFLOAT16 with sparsity), half of it without",
                link_bandwidth=NVIDIA + "h100: NVLink 900 GB/s both ways, 18 links",
                launches="not measured on an H100; those of the H200, " + _MEASURED + "0.92 ms for 60 condition reads",
            ),
        ),
    )
}  # fmt: skip
