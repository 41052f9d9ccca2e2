"""Names of loops and branches in compiled programs whose iteration count depends on data.

The code wraps such a loop in `jax.named_scope(NAME)`. The planner finds it in the compiled program by that name and
takes its iteration count from `specjax.planning.programs`.
"""

LEVELS = "draft_levels"
"""The drafter's passes, one per level of a tree after the root's level."""
NARROW = "narrow_pass"
"""One iteration in steps without drafted tokens, else none."""
WIDE = "wide_pass"
"""One iteration in steps with drafted tokens, else none."""
ONCE = "once_or_not"
"""At most one iteration."""
SUBLAYER = "sublayer"
"""A branch: attention or MLP of a target layer that some rows may skip."""
CATCH_UP = "catch_up"
"""A draft model's passes over tokens that were decoded without drafts. It has no iterations if every step drafts."""
RENEWAL = "renewal"
"""A branch that recomputes part of a canvas before or together with a window, such as a finished block.

If the recomputation is not always the most expensive branch, the code inside that branch has the same name.
"""
