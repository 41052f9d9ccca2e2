"""Early exit: the target's first layers with its final norm and head draft, and the whole target verifies.

LayerSkip: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (ACL 2024),
arXiv 2404.16710; this file is the decoding part. The method works with any model, but it is fast only with one that
was trained for it (with layer dropout and an early-exit loss).

Rule: q(. | text) = softmax(head(norm(h_E))), where h_E is the residual stream after layer E. Drafted tokens read the
target's own cache and each other; each token costs one pass of E layers.
Guarantee: distribution (verified with the q that was sampled).
Deviations: the target pass runs all layers on the drafted tokens. The authors cache the exact keys, values and streams
of the first E layers, and run only the remaining layers. The last drafted token has not passed the first E layers, so
their weights are read once more anyway: 6 / 4 + 1 / 4 + 3 / 4 passes for 6 tokens and a quarter of the layers. Caching
saves arithmetic on 6 of 7 tokens, and no time if weight reads dominate.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models.requirements import check_partial_passes
from specjax.trees import Builder
from specjax.trees.contracts import Frontier
from specjax.types import (
    Array,
    Context,
    Drafter,
    Mixture,
    Model,
    PyTree,
    Sublayers,
    Target,
    TokenTree,
    Traits,
    TreeSize,
)

METHOD = Method(
    name="early_exit",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a chain with the target's own first layers",
    paper="Elhoushi et al. 2024, arXiv 2404.16710",
    options=(
        shared.EXIT_LAYER,
        shared.num_tokens(6),
        shared.TREE,
        shared.STOP,
    ),
    draft_cost=0.25,
    arguments=("target",),
)


def early_exit(
    target: Target,
    exit_layer: int | None = None,
    *,
    num_tokens: int = 6,
    tree: Builder | None = None,
    stop: trees.Stop | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens, or a `tree` from `specjax.trees`, with the target's first layers.

    Args:
      exit_layer: number of layers that draft; default: a quarter, as in the authors' example (8 of 32, 6 tokens).
      stop: the condition that ends a row's draft, such as `trees.stops.confidence(0.6)` (Kangaroo, arXiv 2404.18911).

    The drafter has no state and uses the target's cache. Raises: UsageError for an exit that the model does not have.
    """
    exit_layer = resolve_exit_layer(target, exit_layer, "early_exit")
    builder = trees.make_builder(num_tokens, tree, stop)
    return _functions(builder, exit_layer)


@functools.cache
def _functions(builder: Builder, exit_layer: int) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, builder, exit_layer),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        traits=Traits(draws=builder.draws, widths=builder.widths, follows_any_tree=True),
    )


def _propose(builder: Builder, exit_layer: int, params, keys, state, context: Context, limit: Array):
    layers = first_layers(context_target(context).model, jnp.full_like(context.length, exit_layer))
    return self_draft(builder, keys, context, limit, layers), state


def self_draft(
    builder: Builder, keys: Array | None, context: Context, limit: Array, layers: Sublayers | None
) -> TokenTree:
    """Grow a tree with `builder` from the sublayers `layers` of the target; None: from all.

    The root is fed first. Every pass reads the target's cache and the earlier passes. A row that has finished its draft
    runs no layers, and a pass that no row needs does not run.
    """
    model = context_target(context).model
    score = functools.partial(score_below, context, layers)

    def feed(pending, frontier: Frontier):
        logits, new = score(frontier.tokens, frontier.depth, frontier.expands, mask=frontier.mask, earlier=pending)
        return model.insert(pending, new, frontier.place), logits

    root = context.root
    logits, pending = score(root, jnp.zeros_like(root), limit[:, None] > 0, mask=jnp.ones((*root.shape, 1), bool))
    pending = model.widen(pending, builder.places)
    grown, _ = trees.grow(builder, feed, pending, root[:, 0], logits[:, 0], keys, context, limit)
    return grown.tree


def score_below(
    context: Context,
    layers: Sublayers | None,
    tokens: Array | Mixture,
    depth: Array,
    below: Array,
    *,
    mask: Array,
    earlier: PyTree = None,
) -> tuple[Array, PyTree]:
    """Run the sublayers `layers` on F nodes at `depth` int32[B, F]; return logits [B, F, V] and pending cache entries.

    Without `layers`, all run.
    No layers run for a row without True in `below` bool[B, F], which marks the nodes to draft below. The logits of such
    a row are meaningless. If no row drafts, the results are zeros and the model does not run.
    """
    target = context_target(context)
    drafting = jnp.any(below, 1)

    def run():
        optional: dict[str, PyTree] = {} if earlier is None else {"earlier": earlier}
        if layers is not None:
            optional["layers"] = jax.tree.map(lambda runs: runs & drafting[:, None], layers)
        output, pending = target.model.forward(
            target.params, tokens, context.cache, positions=context.length[:, None] - 1 + depth, mask=mask,
            **optional,
        )  # fmt: skip
        return output.logits, pending

    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
    return jax.lax.cond(jnp.any(drafting), run, zeros)


def first_layers(model: Model, count: Array) -> Sublayers:
    """Return the first `count` int32[B] layers of each row."""
    runs = jnp.arange(model.capabilities.num_layers) < count[:, None]
    return Sublayers(runs, runs)


def resolve_exit_layer(target: Target, exit_layer: int | None, user: str) -> int:
    """Return the exit layer; default: a quarter of the layers.

    user: the drafter. Raises: UsageError for a layer out of range, and for a model that cannot skip layers.
    """
    num_layers = check_partial_passes(target.model, user)
    exit_layer = max(1, num_layers // 4) if exit_layer is None else exit_layer
    if not 1 <= exit_layer <= num_layers:
        raise UsageError(
            f"exit_layer must be from 1 to {num_layers}, the number of layers of the model, not {exit_layer}"
        )
    return exit_layer


def context_target(context: Context) -> Target:
    """Return the target that the engine put into the context."""
    assert context.target is not None, "the engine sets Context.target for every drafter"
    return context.target
