"""Time of a program on a chip, from plain formulas of its bytes, FLOPs, cycles and collectives.

There are two estimates, and reports show both. Neither is a measurement.

- *Roofline*: max(bytes that must move / HBM bandwidth, FLOPs / peak) + collectives. It is a lower bound. Every weight
  is read once per pass and the cached tokens once, at the published figures, without waiting. If the compiled program
  moves fewer bytes, because a small model's weights stay on the chip between passes, the smaller number counts.
- *Schedule*: the compiler's own cycles (`specjax.planning.hlo`) divided by the clock, plus Pallas kernels by their
  authors' estimates, plus collectives. Real chips are faster on programs of many small fusions. The compiler optimises
  this number, so differences between similar programs mean more than its absolute value. It counts no cycles for copies
  that overlap arithmetic. A kernel uses one core of a megacore, so it has half of the peak and, by assumption, half of
  the bandwidth.

docs/tpu.md explains which estimate to trust for which question.

Collectives have no cycles in the program text. Their estimate is the time of the wire bytes over both directions of one
ring, plus the latency of half the ring per collective. The latency dominates for few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.costs.chips import HOP_SECONDS, Chip

CLOCKS = {
    "roofline": "lower bound from bytes, FLOPs and links: shows the cost of more tokens, rows, context or chips",
    "schedule": "the compiler's own cycles, one operation after another: shows the cost of many small operations",
}
"""The two estimates and their uses."""


@dataclass(frozen=True)
class Kernel:
    """Calls of Pallas kernels, for which the compiler reports no cycles.

    The FLOPs and bytes are the kernels' own cost estimates, or 0 for kernels that have none.
    """

    calls: float
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Collective:
    """All executions of one kind of collective."""

    kind: str
    count: float  # executions, including loop iterations
    bytes: float  # of the results of all executions
    wire_bytes: float  # sent by one device on a ring in all executions
    group: int  # number of devices that take part


@dataclass(frozen=True)
class Totals:
    """Sums over a program, per device, including the iterations of loops."""

    cycles: float
    flops: float
    hbm_bytes: float
    instructions: float  # scheduled instructions that are not free
    kernels: Kernel
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Seconds:
    """Both estimates of one program, and the parts of the roofline."""

    memory: float
    compute: float
    collectives: float
    roofline: float
    schedule: float


def estimate(chip: Chip, totals: Totals, must_bytes: float) -> Seconds:
    """Estimate the seconds of one execution.

    Args:
      must_bytes: minimum of the bytes that a device has to move, from `specjax.planning.traffic`.
    """
    memory = min(must_bytes, totals.hbm_bytes) / chip.hbm_bandwidth
    compute = totals.flops / chip.peak_flops
    collectives = sum(collective_seconds(chip, entry) for entry in totals.collectives)
    kernels = chip.cores * max(totals.kernels.flops / chip.peak_flops, totals.kernels.bytes / chip.hbm_bandwidth)
    return Seconds(
        memory, compute, collectives, max(memory, compute) + collectives,
        totals.cycles / chip.clock + kernels + collectives,
    )  # fmt: skip


def collective_seconds(chip: Chip, entry: Collective) -> float:
    """Return the seconds of all executions of one kind of collective, on a ring with links used in both directions."""
    if entry.group < 2:
        return 0.0
    return entry.wire_bytes / (2 * chip.link_bandwidth) + entry.count * (entry.group // 2) * HOP_SECONDS
