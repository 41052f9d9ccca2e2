"""Checks of the values of drafts and outputs, for debugging: `decode(..., debug=True)`.

An exact verifier is exact only for valid drafts. These checks find drafts that break the contract of `TokenTree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import scopes
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.trees import operations
from specjax.types import Array, Draws, Processor, Target, TokenTree, Verdict
from specjax.verifiers.node_logits import NodeLogits, all_rows

VIOLATIONS = (
    "tree.parents is not topological: every node needs a valid parent of a lower number, and the root has parent -1",
    "tree.tokens does not start with the last token of the text, context.root",
    "tree.valid has nodes deeper than the argument limit of propose",
    "tree.tokens repeats a token among siblings, which {draws} never draws",
    "tree.logits has no mass (q = 0) on a drafted token: it was not drawn from its parent's row",
    "tree.logits contains NaN",
    "tree.tokens contains a drafted token outside of the vocabulary; mask the node with tree.valid",
    "target_logits contains NaN: check the target's parameters",
)
"""One sentence for each bit of `find_draft_violations` and `find_target_violations`."""


def find_draft_violations(
    tree: TokenTree, draws: Draws, root: Array | None = None, limit: Array | None = None, vocab_size: int | None = None
) -> Array:
    """Return the `VIOLATIONS` of a tree as bits, int32[B], before any target pass. Invalid nodes do not count.

    Args:
      root: int32[B, 1], the required first token; None: any.
      limit: int32[B], the maximum depth; None: any.
      vocab_size: number of tokens of the vocabulary; None: unknown, so token ids are not checked.
    """
    n = tree.tokens.shape[1]
    node = jnp.arange(n)
    parent = jnp.maximum(tree.parents, 0)
    drafted = tree.valid & (node > 0)
    no_row = jnp.zeros(tree.tokens.shape[0], bool)
    orphan = drafted & ~((tree.parents >= 0) & (tree.parents < node) & take_along(tree.valid, parent, 1))
    misplaced = jnp.any(orphan, 1) | (tree.parents[:, 0] != -1) | ~tree.valid[:, 0]
    other_root = no_row if root is None else tree.tokens[:, 0] != root[:, 0]
    # Depths are meaningless if the parents do not form a tree. The minimum keeps the computation finite.
    depth = jnp.where(tree.valid, operations.depths(jnp.minimum(tree.parents, node - 1)), 0)
    too_deep = no_row if limit is None else jnp.max(depth, 1) > limit

    pairs = drafted[:, :, None] & drafted[:, None, :] & (node[:, None] < node)
    siblings = pairs & (tree.parents[:, :, None] == tree.parents[:, None, :])
    if draws == "point_mass" or draws.startswith("with_replacement"):  # a repeated child is wasted, but valid
        repeated = no_row
    elif draws == "chain":
        repeated = jnp.any(siblings, (1, 2))
    else:
        repeated = jnp.any(siblings & (tree.tokens[:, :, None] == tree.tokens[:, None, :]), (1, 2))

    no_mass = nan = outside = no_row
    if vocab_size is not None:
        outside = jnp.any(drafted & ((tree.tokens < 0) | (tree.tokens >= vocab_size)), 1)
    if tree.logits is not None:
        # A gather clamps ids outside of the vocabulary, which `outside` marks.
        q = all_rows(tree.logits)[jnp.arange(tree.tokens.shape[0])[:, None], parent, tree.tokens]
        if draws not in ("top_and_sampled", "without_replacement_then_uniform"):  # their siblings may have no mass
            no_mass = jnp.any(drafted & (q == -jnp.inf), 1)
        nan = jnp.any(drafted & jnp.isnan(q), 1)
    return _pack_bits(misplaced, other_root, too_deep, repeated, no_mass, nan, outside, no_row)


def find_target_violations(valid: Array, target_logits: Array) -> Array:
    """Return the `VIOLATIONS` of the target's logits [B, N, V] at the `valid` nodes bool[B, N] as bits, int32[B]."""
    nan = jnp.any(valid & jnp.any(jnp.isnan(target_logits), -1), 1)
    return _pack_bits(*[jnp.zeros_like(nan)] * (len(VIOLATIONS) - 1), nan)


def _pack_bits(*flags: Array) -> Array:
    return jnp.sum(jnp.stack(flags, 1) * (1 << jnp.arange(len(flags))), 1, dtype=jnp.int32)


def raise_violation(bits: Array | np.ndarray, draws: Draws) -> None:
    """Raise UsageError for the first violation in `bits` int32[B], with its row, if there is a violation."""
    for row, value in enumerate(np.asarray(bits)):
        for bit, sentence in enumerate(VIOLATIONS):
            if value >> bit & 1:
                raise UsageError(f"row {row}: {sentence.format(draws=f'draws={draws!r}')}")


def count_sound_nodes(hidden: Array, logits: NodeLogits, verdict: Verdict, *, processed: bool) -> Array:
    """Count the leading nodes of the accepted path from whose logits a token can be drawn, int32[B].

    A node is sound if its hidden state is finite, no logit is NaN or Inf, and a token is allowed. Without processors
    the vocabulary is read at the root and at the last node only, because a NaN in the output head affects all nodes.

    Args:
      hidden: [B, W, D]. logits: processed ones of the W nodes.
      processed: True if there are processors, which may forbid all tokens after any node.
    """
    path, index = jnp.maximum(verdict.path, 0), jnp.arange(verdict.path.shape[1])
    last = jnp.maximum(verdict.num_nodes - 1, 0)

    def check(place: Array, along_path: Array) -> Array:
        """Clear the flags of nodes at `place` int32[B] of the path that are not sound."""
        is_sound = logits.is_sound_at(take_along(path, place[:, None], 1)[:, 0])
        return along_path & (is_sound[:, None] | (index != place[:, None]))

    along_path = take_along(jnp.all(jnp.isfinite(hidden), -1), path, 1)
    if processed and len(index) > 1:
        with jax.named_scope(scopes.WALK):
            at = lambda place, along_path: check(jnp.full_like(last, place), along_path)
            along_path = jax.lax.fori_loop(0, jnp.max(verdict.num_nodes), at, along_path)
    else:
        along_path = check(last, check(jnp.zeros_like(last), along_path))
    return jnp.minimum(jnp.sum(jnp.cumprod(along_path, 1, dtype=jnp.int32), 1), verdict.num_nodes)


def are_sound(logits: Array) -> Array:
    """Return True for logits [..., V] from which a token can be drawn, bool[...]: no NaN or Inf, not all forbidden."""
    return jnp.isfinite(jnp.max(logits, -1))  # the maximum is NaN or Inf if any logit is, and -Inf if all are


def find_bad_parameter(target: Any) -> str | None:
    """Return the name of the first parameter that contains NaN or Inf, or None."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(leaf))):
            return jax.tree_util.keystr(path, simple=True, separator=".")
    return None


def raise_failure(finite: Array | np.ndarray | None, target: Any, processors: Sequence[Processor] = ()) -> None:
    """Raise UsageError with the reason if a row of `finite` bool[B] is False. None and traced values pass."""
    if finite is None or isinstance(finite, jax.core.Tracer):
        return
    failed = ~np.asarray(gather(finite))
    if failed.any():
        rows = "" if failed.all() else f"row {int(np.argmax(failed))}: "
        raise UsageError(rows + explain_failure(target, processors))


def explain_failure(target: Any, processors: Sequence[Processor] = ()) -> str:
    """Return the reason why no token can be drawn: a parameter with NaN or Inf, the processors, or the config."""
    name = find_bad_parameter(target)
    subject = f"the model {target.model.name}" if isinstance(target, Target) else f"the {type(target).__name__}"
    if name is not None:
        return f"{subject} returns NaN or Inf, because its parameter {name} contains NaN or Inf"
    if processors:
        return "the processors allow no token; leave one of them out"
    return (
        f"{subject} returns NaN or Inf, although its parameters are finite; check the constants of its config, such as "
        "the norms' eps and the base of its rotary positions"
    )


def check_draft(tree: TokenTree, draws: Draws, target_logits: Array) -> None:
    """Check one draft outside of `jit`. Raises: UsageError for the first violation."""
    draft = find_draft_violations(tree, draws, vocab_size=target_logits.shape[-1])
    raise_violation(draft | find_target_violations(tree.valid, target_logits), draws)
