"""What a compiled TPU program says about itself: cycles, traffic, FLOPs, collectives. Pure functions of its HLO text.

The compiler schedules every fusion and leaves its own estimate in the text, `"estimated_cycles":"..."`. Those of the
computations that control flow reaches are summed here, a loop's body times its trip count. That is a schedule, not a
clock: it knows the units and the memory, not contention, and it charges about 2,000 cycles for each fusion however
small. `cost_analysis()["optimal_seconds"]` is never used: it does not multiply loop bodies by their trips, counts
prefetch copies twice, and came out negative for unrolled layers.
"""

from specjax.planning.hlo.control_flow import Loop, Taken, Trips, always, dynamic_loops, trip_count, walk
from specjax.planning.hlo.parsing import Module, parse
from specjax.planning.hlo.slow_parts import findings
from specjax.planning.hlo.sums import totals
from specjax.planning.hlo.vocabulary import Logits, largest_logits

__all__ = [
    "Logits",
    "Loop",
    "Module",
    "Taken",
    "Trips",
    "always",
    "dynamic_loops",
    "findings",
    "largest_logits",
    "parse",
    "totals",
    "trip_count",
    "walk",
]
