"""What a pass over several tokens costs, in passes over one."""

from specjax.costs.curves import Costs, Curve, at, check, estimated, measured, of_draft, planned, timed

__all__ = ["Costs", "Curve", "at", "check", "estimated", "measured", "of_draft", "planned", "timed"]
