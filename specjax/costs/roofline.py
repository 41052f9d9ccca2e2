"""Time of a program on a chip, from plain formulas of its bytes, FLOPs, cycles and collectives.

There are two estimates, and reports show both. Neither is a measurement.

- *Roofline*: max(bytes that must move / HBM bandwidth, FLOPs / peak) + collectives. It is a lower bound. The peak is
  that of bfloat16, or for products of float32 numbers that of the precision "highest". Every weight
  is read once per pass and the cached tokens once, at the published figures, without waiting. If the compiled program
  moves fewer bytes, because a small model's weights stay on the chip between passes, the smaller number counts.
- *Schedule*: the compiler's own cycles (`specjax.planning.hlo`) divided by the clock, plus Pallas kernels by their
  authors' estimates, plus collectives. Real chips are faster on programs of many small fusions. The compiler optimises
  this number, so differences between similar programs mean more than its absolute value. It counts no cycles for copies
  that overlap arithmetic. A kernel uses one core of a megacore, so it has half of the peak and, by assumption, half of
  the bandwidth. No compiler counts the cycles of a GPU program. There, the schedule is the bytes that the program moves
  at the bandwidth that products reach, plus a constant per kernel, plus one per condition that the host reads
  (`specjax.costs.chips.Launches`).

docs/tpu.md explains which estimate to trust for which question.

Collectives have no cycles in the program text. Their estimate is the time of the wire bytes over the links of a ring,
plus a latency per collective. It dominates for few tokens. On a torus, a ring has two links, one per direction, and the
latency is that of half the ring. On a switch, it is that of all steps of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.costs.chips import Chip

CLOCKS = {
    "roofline": "lower bound from bytes, FLOPs and links: shows the cost of more tokens, rows, context or chips",
    "schedule": "the compiler's own cycles, one operation after another: shows the cost of many small operations",
}
"""The two estimates and their uses."""
ON_GPU = {
    "schedule": "moved bytes, and the launches of kernels and loops as measured on an H200, one after another: shows "
    "the cost of copies, small kernels and loops that the host steers",
}
"""The estimates that mean something else on GPUs."""


def clocks_of(chip: Chip) -> dict[str, str]:
    """Return the estimates for a chip and their uses."""
    return CLOCKS | (ON_GPU if chip.launches else {})


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
    float32_flops: float = 0.0  # those of `flops` in products of float32 numbers with the precision "highest"
    condition_reads: float = 0.0  # conditions of loops of unknown length and of branches, which a GPU's host reads


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
    compute = _arithmetic_seconds(chip, totals)
    collectives = sum(collective_seconds(chip, entry) for entry in totals.collectives)
    schedule = _compiled_seconds(chip, totals) + collectives
    return Seconds(memory, compute, collectives, max(memory, compute) + collectives, schedule)


def _arithmetic_seconds(chip: Chip, totals: Totals) -> float:
    """Return the seconds of all operations at the peak of their dtype."""
    return (totals.flops - totals.float32_flops) / chip.peak_flops + totals.float32_flops / chip.float32_flops


def _compiled_seconds(chip: Chip, totals: Totals) -> float:
    """Return the seconds of the compiled instructions one after another, without collectives."""
    launches = chip.launches
    if launches is not None:
        moved = totals.hbm_bytes / (launches.bandwidth_share * chip.hbm_bandwidth)
        waiting = totals.instructions * launches.kernel_seconds + totals.condition_reads * launches.read_seconds
        return max(moved, _arithmetic_seconds(chip, totals)) + waiting
    kernels = chip.cores * max(totals.kernels.flops / chip.peak_flops, totals.kernels.bytes / chip.hbm_bandwidth)
    return totals.cycles / chip.clock + kernels


def collective_seconds(chip: Chip, entry: Collective) -> float:
    """Return the seconds of all executions of one kind of collective, on a ring."""
    if entry.group < 2:
        return 0.0
    latency = chip.start_seconds + _hops(chip, entry) * chip.hop_seconds
    return entry.wire_bytes / (chip.ring_links * chip.link_bandwidth) + entry.count * latency


def _hops(chip: Chip, entry: Collective) -> int:
    """Return the hops of a collective: half of a ring with both directions, or the steps of a ring on a switch."""
    if chip.dimensions > 1:
        return entry.group // 2
    return (entry.group - 1) * (2 if entry.kind == "all-reduce" else 1)
