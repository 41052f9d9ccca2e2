"""Early exit: the target's own first layers, with its final norm and head, draft what the whole of it verifies.

LayerSkip: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (ACL 2024),
arXiv 2404.16710; the decoding part. Any model can be drafted from so, one trained for it (with layer dropout and an
early-exit loss) is worth it.

Rule: q(. | text) = softmax(head(norm(h_E))), h_E the residual stream after layer E. Drafted tokens read the target's
own cache and each other; one pass of E layers per token.
Guarantee: distribution (verified with the q that was sampled).
Deviations: the target's pass runs all layers on the drafted tokens. The authors keep the keys, values and streams of
the first E, which are exact, and run only the others, but for the token drafted last, which the first E have not seen.
So these are read once more there too, 6 / 4 + 1 / 4 + 3 / 4 passes for 6 tokens by a quarter of the layers: that saves
their arithmetic on 6 of 7 tokens, and no time where it goes by weights read.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.catalog import Method, shared
from specjax.errors import UsageError
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
    """A chain of `num_tokens` tokens, or a `tree` from `specjax.trees`, by the first `exit_layer` layers of the target.

    Args:
      exit_layer: how many layers draft; default: a quarter of them, as in the authors' example (8 of 32, 6 tokens).
      stop: ends a row's draft early, such as `trees.stops.confidence(0.6)` (Kangaroo, arXiv 2404.18911).

    State: none; the cache is the target's. Raises: UsageError for an exit that the model does not have.
    """
    exit_layer = chosen_exit(target, exit_layer)
    builder = trees.builder_of(num_tokens, tree, stop)
    return _functions(builder, exit_layer)


@functools.cache
def _functions(builder: Builder, exit_layer: int) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, builder, exit_layer),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        traits=Traits(draws=builder.draws, widths=builder.widths, follows_any_tree=True),
    )


def _propose(builder: Builder, exit_layer: int, params, keys, state, context: Context, limit: Array):
    layers = first_layers(target_of(context).model, jnp.full_like(context.length, exit_layer))
    return self_draft(builder, keys, context, limit, layers), state


def self_draft(builder: Builder, keys: Array | None, context: Context, limit: Array, layers: Sublayers) -> TokenTree:
    """The tree that `builder` grows from the target with only the sublayers `layers` of it.

    The root is fed first, and every pass reads the target's cache and the passes before. A row that drafts no deeper
    runs no layers, and a pass that no row needs is left out.
    """
    model = target_of(context).model
    score = functools.partial(score_below, context, layers)

    def feed(pending, frontier: Frontier):
        logits, new = score(frontier.tokens, frontier.depth, frontier.below, mask=frontier.mask, earlier=pending)
        return model.insert(pending, new, frontier.place), logits

    root = context.root
    logits, pending = score(root, jnp.zeros_like(root), limit[:, None] > 0, mask=jnp.ones((*root.shape, 1), bool))
    pending = model.widen(pending, builder.places)
    grown, _ = trees.grow(builder, feed, pending, root[:, 0], logits[:, 0], keys, context, limit)
    return grown.tree


def score_below(
    context: Context,
    layers: Sublayers,
    tokens: Array | Mixture,
    depth: Array,
    below: Array,
    *,
    mask: Array,
    earlier: PyTree = None,
) -> tuple[Array, PyTree]:
    """Logits [B, F, V] below F nodes at `depth` int32[B, F] of a draft, by a part of the model, and what is pending.

    Of rows that draft `below` bool[B, F] no node, no layers run; the logits of such a row are meaningless. Zeros, and
    nothing runs, if there is no other.
    """
    target = target_of(context)
    drafting = jnp.any(below, 1)

    def run():
        earlier_too = {} if earlier is None else {"earlier": earlier}
        output, pending = target.model.forward(
            target.params, tokens, context.cache, positions=context.length[:, None] - 1 + depth, mask=mask,
            layers=jax.tree.map(lambda runs: runs & drafting[:, None], layers), **earlier_too,
        )  # fmt: skip
        return output.logits, pending

    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
    return jax.lax.cond(jnp.any(drafting), run, zeros)


def first_layers(model: Model, count: Array) -> Sublayers:
    """Per row the first `count` int32[B] layers."""
    runs = jnp.arange(model.capabilities.num_layers) < count[:, None]
    return Sublayers(runs, runs)


def chosen_exit(target: Target, exit_layer: int | None) -> int:
    """The exit layer, by default after a quarter of the layers. Raises: UsageError if the model does not have it."""
    most = layers_of(target)
    exit_layer = max(1, most // 4) if exit_layer is None else exit_layer
    if not 1 <= exit_layer <= most:
        raise UsageError(f"exit_layer must be from 1 to {most}, the number of layers of the model, not {exit_layer}")
    return exit_layer


def layers_of(target: Target) -> int:
    """How many layers the model has. Raises: UsageError if it cannot skip any."""
    able = target.model.capabilities
    if able.num_layers < 1 or not able.layer_skipping:
        raise UsageError(
            f"the model {target.model.name} cannot run a part of its layers; say in Model.capabilities how many it has "
            "(num_layers) and that it can (layer_skipping), or choose a drafter without layers"
        )
    return able.num_layers


def target_of(context: Context) -> Target:
    """The target whose layers draft."""
    assert context.target is not None, "the engine gives every drafter its target"
    return context.target
