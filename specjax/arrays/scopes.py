"""Names of loops and branches of compiled programs that run as often as the data say, by which the planner knows them.

`with jax.named_scope(NAME)` around a loop; the planner's counts for them are in `specjax.planning.programs`.
"""

LEVELS = "draft_levels"
"""The passes of a drafter, one per level of a tree behind the root's."""
NARROW = "narrow_pass"
"""One turn where nothing was drafted, else none."""
WIDE = "wide_pass"
"""One turn where something was, else none."""
ONCE = "once_or_not"
"""One turn or none."""
SUBLAYER = "sublayer"
"""Not of a loop but of a branch: attention or MLP of a layer of the target, where some may be skipped."""
CATCH_UP = "catch_up"
"""A draft model's passes over what was decoded while nothing was drafted; none where every round drafts."""
RENEWAL = "renewal"
"""Of a branch: what of a canvas is read anew before or beside a window, such as a block that is finished. Where it is
not always the dearest one, the name stands within it, too."""
