"""Names of parts of compiled programs, most of them loops and branches whose iteration count depends on data.

The code wraps such a loop in `jax.named_scope(NAME)`. The planner finds it in the compiled program by that name and
takes its iteration count from `specjax.planning.programs`.
"""

ATTENTION = "tree_attention"
"""The operations of attention, which the planner counts apart from other kernels."""

LEVELS = "draft_levels"
"""The drafter's passes, one per level of a tree after the root's level."""
NARROW = "narrow_pass"
"""One iteration in steps without drafted tokens, else none."""
WIDE = "wide_pass"
"""One iteration in steps with drafted tokens, else none."""
ONCE = "once_or_not"
"""At most one iteration."""
DIGITS = "digits"
"""Passes over the vocabulary that find a threshold of top-k or top-p, after the first one."""
FLAT = "flat"
"""A branch: the search of a threshold starts from its highest bits, because a row has no likely tokens."""
TIES = "ties"
"""A bisection among equal tokens at the threshold of top-k or top-p. It has no iterations if all of them may stay."""
RACES = "races"
"""Races of a draw under top-k or top-p: one, and one more for each winner that the filter does not keep."""
WALK = "walk"
"""A verifier's iterations, one per node that it visits."""
SUBLAYER = "sublayer"
"""A branch: attention or MLP of a target layer that some rows may skip."""
CATCH_UP = "catch_up"
"""A draft model's passes over tokens that were decoded without drafts. It has no iterations if every step drafts."""
WIDE_CHUNKS = "wide_chunks"
"""Passes over wide chunks of the prompts."""
EXPERTS = "experts"
"""Turns of a layer's experts, one per distinct expert of the rows of a pass, or per block of rows."""
CHUNKS = "chunks"
"""Passes over the remaining chunks of the prompts."""
RENEWAL = "renewal"
"""A branch that recomputes part of a canvas before or together with a window, such as a finished block.

If the recomputation is not always the most expensive branch, the code inside that branch has the same name.
"""
