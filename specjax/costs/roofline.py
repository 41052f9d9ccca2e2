"""From a program's bytes, FLOPs, cycles and collectives to seconds on a chip. Plain formulas.

Two estimates, from two sides, both printed; neither is a measurement.

- *Roofline*: max(bytes that must move / HBM bandwidth, FLOPs / peak) + collectives. A lower bound: every weight is
  read once per pass and the cached tokens once, at the published figures, and nothing waits. Where the compiled program
  moves less, because it keeps a small model's weights on the chip between two passes, that counts.
- *Schedule*: the compiler's own cycles (`specjax.planning.hlo`) over the clock, + Pallas kernels by their authors'
  estimates, + collectives. It is more than real chips take for programs of many small fusions, and it is what the
  compiler optimises; differences between two programs of one kind are worth more than its absolute value. It has no
  cycles for copies that run beside the arithmetic. A kernel has one core of a megacore, and with it half of the peak
  and, by assumption, of the bandwidth.

Which to believe for what: docs/tpu.md.

Collectives have no cycles in the text: wire bytes over both directions of one ring, and the latency of half the ring
per collective, which is what decides at few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.costs.chips import HOP_SECONDS, Chip

CLOCKS = {
    "roofline": "the least a step can take, by bytes, FLOPs and links: what more tokens, rows, context or chips cost",
    "schedule": "the compiler's own cycles, one operation after another: what many small operations cost",
}
"""What each of the two estimates is good for."""


@dataclass(frozen=True)
class Kernel:
    """Calls of a Pallas kernel, which the compiler gives no cycles; its author's own estimate, if there is one."""

    calls: float
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Collective:
    """All runs of one kind of collective."""

    kind: str
    count: float  # trips included
    bytes: float  # of their results, all runs together
    wire_bytes: float  # that a device sends, on a ring
    group: int  # devices that take part


@dataclass(frozen=True)
class Totals:
    """Sums over a program, per device, trip counts included."""

    cycles: float
    flops: float
    hbm_bytes: float
    instructions: float  # scheduled ones, that do something
    kernels: Kernel
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Seconds:
    """Both estimates of one program, and what the first consists of."""

    memory: float
    compute: float
    collectives: float
    roofline: float
    schedule: float


def estimate(chip: Chip, totals: Totals, must_bytes: float) -> Seconds:
    """Seconds of one run. `must_bytes`: what a device has to move at least, as `specjax.planning.traffic` counts it."""
    memory = min(must_bytes, totals.hbm_bytes) / chip.hbm_bandwidth
    compute = totals.flops / chip.peak_flops
    collectives = sum(collective_seconds(chip, entry) for entry in totals.collectives)
    kernels = chip.cores * max(totals.kernels.flops / chip.peak_flops, totals.kernels.bytes / chip.hbm_bandwidth)
    return Seconds(
        memory, compute, collectives, max(memory, compute) + collectives,
        totals.cycles / chip.clock + kernels + collectives,
    )  # fmt: skip


def collective_seconds(chip: Chip, entry: Collective) -> float:
    """All runs of a kind: a ring that uses both directions of its links."""
    if entry.group < 2:
        return 0.0
    return entry.wire_bytes / (2 * chip.link_bandwidth) + entry.count * (entry.group // 2) * HOP_SECONDS
