"""What a draft must be for its verifier to be exact, checked on values. For debugging: `decode(..., debug=True)`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Draws, Output, Processor, Target, TokenTree

VIOLATIONS = (
    "tree.parents is not topological: every node needs a valid parent of a lower number, and the root has parent -1",
    "tree.tokens does not start with the last token of the text, context.root",
    "tree.valid has nodes deeper than the limit that propose was given",
    "tree.tokens repeats a token among siblings, which {draws} never draws",
    "tree.logits gives a drafted token no mass (q = 0): it was not drawn from its parent's row",
    "tree.logits holds NaN",
    "target_logits holds NaN: check the target's parameters",
)
"""One sentence per bit of what `of_draft` and `of_target` find."""


def of_draft(tree: TokenTree, draws: Draws, root: Array | None = None, limit: Array | None = None) -> Array:
    """int32[B]: which of `VIOLATIONS` a tree shows, before any pass. Pure; invalid nodes do not count.

    root: int32[B, 1], what its first token must be. limit: int32[B], how deep it may be. None: anything.
    """
    n = tree.tokens.shape[1]
    node = jnp.arange(n)
    above = jnp.maximum(tree.parents, 0)
    drafted = tree.valid & (node > 0)
    none = jnp.zeros(tree.tokens.shape[0], bool)
    orphan = drafted & ~((tree.parents >= 0) & (tree.parents < node) & take_along(tree.valid, above, 1))
    misplaced = jnp.any(orphan, 1) | (tree.parents[:, 0] != -1) | ~tree.valid[:, 0]
    other_root = none if root is None else tree.tokens[:, 0] != root[:, 0]
    # Of a tree that is none, depths mean nothing, but are found in bounded time.
    depth = jnp.where(tree.valid, operations.depths(jnp.minimum(tree.parents, node - 1)), 0)
    too_deep = none if limit is None else jnp.max(depth, 1) > limit

    both = drafted[:, :, None] & drafted[:, None, :] & (node[:, None] < node)
    twins = both & (tree.parents[:, :, None] == tree.parents[:, None, :])
    if draws == "point_mass" or draws.startswith("with_replacement"):  # a repeated child is wasted there, not wrong
        repeated = none
    elif draws == "chain":
        repeated = jnp.any(twins, (1, 2))
    else:
        repeated = jnp.any(twins & (tree.tokens[:, :, None] == tree.tokens[:, None, :]), (1, 2))

    no_mass = nan = none
    if tree.logits is not None:
        q = tree.logits[jnp.arange(tree.tokens.shape[0])[:, None], above, tree.tokens]
        if draws not in ("top_and_sampled", "without_replacement_then_uniform"):  # some siblings there have none
            no_mass = jnp.any(drafted & (q == -jnp.inf), 1)
        nan = jnp.any(drafted & jnp.isnan(q), 1)
    return _bits(misplaced, other_root, too_deep, repeated, no_mass, nan, none)


def of_target(valid: Array, target_logits: Array) -> Array:
    """int32[B]: which of `VIOLATIONS` the target's logits [B, N, V] show at the nodes that are `valid` [B, N]."""
    nan = jnp.any(valid & jnp.any(jnp.isnan(target_logits), -1), 1)
    return _bits(*[jnp.zeros_like(nan)] * (len(VIOLATIONS) - 1), nan)


def _bits(*found: Array) -> Array:
    return jnp.sum(jnp.stack(found, 1) * (1 << jnp.arange(len(found))), 1, dtype=jnp.int32)


def refuse(bits: Array | np.ndarray, draws: Draws) -> None:
    """Raises: UsageError that names the first violation and its row, if `bits` int32[B] holds one."""
    for row, value in enumerate(np.asarray(bits)):
        for bit, sentence in enumerate(VIOLATIONS):
            if value >> bit & 1:
                raise UsageError(f"row {row}: {sentence.format(draws=f'draws={draws!r}')}")


def is_finite(output: Output) -> Array:
    """bool[B]: whether what a pass said of its first token are numbers; logits of -inf are.

    What a NaN in the weights or an impossible constant in the config does to one token, it does to all.
    """
    return jnp.all(jnp.isfinite(output.hidden[:, 0]), 1) & jnp.all(output.logits[:, 0] < jnp.inf, 1)  # not so NaN


def first_bad_parameter(target: Target) -> str | None:
    """The name of one that holds NaN or Inf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(leaf))):
            return jax.tree_util.keystr(path, simple=True, separator=".")
    return None


def explain(target: Target, processors: Sequence[Processor] = ()) -> str:
    """A sentence on why there is nothing to draw from: the first of a model's parameters that holds NaN or Inf, the
    processors, or its config."""
    name = first_bad_parameter(target)
    if name is not None:
        return f"the model {target.model.name} gives NaN or Inf, since its parameter {name} holds some"
    if processors:
        return "the processors leave no token to draw; leave one of them out"
    return (
        f"the model {target.model.name} gives NaN or Inf, though its parameters hold none; look at the constants of "
        "its config, such as the norms' eps and the base of its rotary positions"
    )


def check_draft(tree: TokenTree, draws: Draws, target_logits: Array) -> None:
    """Check one draft outside of `jit`. Raises: UsageError as `refuse` does."""
    refuse(of_draft(tree, draws) | of_target(tree.valid, target_logits), draws)
