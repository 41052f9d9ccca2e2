"""Figures of a compiled program: cycles, traffic, FLOPs, collectives, launches. Pure functions of its HLO text.

The TPU compiler schedules every fusion and writes its own estimate into the text, `"estimated_cycles":"..."`. This
package sums the estimates of all computations that control flow reaches, with a loop's body times its iterations. The
sum is a schedule, not a clock. It models the units and the memory but no contention, and it charges about 2,000 cycles
for each fusion, however small. `cost_analysis()["optimal_seconds"]` is not used. It does not multiply loop bodies by
their iterations, counts prefetch copies twice, and was negative for unrolled layers.
"""

from specjax.planning.hlo.control_flow import Loop, Taken, Trips, always, dynamic_loops, trip_count, walk
from specjax.planning.hlo.launches import KernelCounts, LoopUse, count_kernels, loop_uses
from specjax.planning.hlo.parsing import Module, parse
from specjax.planning.hlo.slow_parts import findings
from specjax.planning.hlo.sums import totals
from specjax.planning.hlo.vocabulary import Logits, largest_logits

__all__ = [
    "KernelCounts",
    "Logits",
    "Loop",
    "LoopUse",
    "Module",
    "Taken",
    "Trips",
    "always",
    "count_kernels",
    "dynamic_loops",
    "findings",
    "largest_logits",
    "loop_uses",
    "parse",
    "totals",
    "trip_count",
    "walk",
]
