"""A learned head as a drafter: it reads what the target said of the committed tokens and grows a tree level by level.

Before it drafts again it reads the pairs of the last round (`specjax.drafters.heads.reading`). How features, tokens and
positions belong together: `specjax.models.heads.contract`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.drafters.heads import reading
from specjax.drafters.heads.reading import State
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftedNodes, DraftHead, Head, FeaturePairs
from specjax.trees import Builder, Stop, operations
from specjax.trees.contracts import Frontier
from specjax.trees.growing import Grown
from specjax.types import Array, Context, Drafter, Hooks, Output, PyTree, TokenTree, Traits, TreeSize, Verdict


def learned(head: DraftHead, builder: Builder, longest: int | None = None) -> Drafter:
    """The drafter of a head whose trees `builder` grows.

    longest: tokens that a round may accept, the root included, where trees are drafted together with others; default:
      one more than the builder's own are deep.

    Raises: UsageError for a tree deeper than the head drafts, or a head that drafts in the target's own pass.
    """
    if head.head.soft_prompts is not None:
        kind = head.head.kind
        raise UsageError(f"a head of {kind} drafts in the target's own pass, in trees of its own; choose method {kind}")
    max_depth = head.head.max_depth
    if max_depth is not None and builder.max_depth > max_depth:
        raise UsageError(f"the tree is {builder.max_depth} tokens deep, but the head drafts {max_depth}; choose that")
    return _functions(head.head, builder, longest or builder.max_depth + 1).replace(params=head.params)


def chain_of(
    head: DraftHead,
    num_tokens: int | None,
    tree: Builder | None,
    stop: Stop | None,
    keep_logits: bool,
    longest: int | None,
) -> Drafter:
    """The drafter of a head with a last token: a chain as far as that, or of `num_tokens`, or a `tree`."""
    most = head.head.max_depth
    assert most is not None
    return learned(head, trees.builder_of(num_tokens or most, tree, stop, keep_logits), longest)


@functools.cache
def _functions(head: Head, builder: Builder, longest: int) -> Drafter:
    """The drafter, without its parameters."""

    def propose(params, keys, state: State, context: Context, limit) -> tuple[TokenTree, State]:
        state = reading.caught_up(head, params, state, context)
        grow = lambda: grown(head, builder, params, state.memory, keys, context, limit).tree
        shapes = jax.eval_shape(grow)
        root_alone = lambda: operations.root_alone(context.root, shapes)
        return jax.lax.cond(jnp.any(limit > 0), grow, root_alone), state

    def observe(params, state, context: Context, tree: TokenTree, verdict: Verdict, output: Output) -> FeaturePairs:
        return reading.seen(head, longest, tree, verdict, output)

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=lambda params, context: reading.begin(head, params, context, longest),
        observe=observe,
        update=lambda params, state, seen, verdict: reading.added(state, seen),
        traits=Traits(
            draws=builder.draws,
            widths=builder.widths,
            taps=head.taps,
            max_accepted=longest,
            rewinds=False,
            follows_any_tree=True,
        ),
        hooks=Hooks(prefill=functools.partial(reading.read_prompt, head), axes=functools.partial(reading.axes, head)),
    )


def grown(
    head: Head, builder: Builder, params: PyTree, memory: PyTree, keys: Array | None, context: Context, limit: Array
) -> Grown:
    """The tree that a head drafts by its `memory` of all pairs."""
    scratch, said = head.start(params, memory, context, builder.places)

    def feed(scratch: PyTree, frontier: Frontier):
        return head.follow(params, scratch, as_drafted(frontier), context)

    return trees.grow(builder, feed, scratch, context.root[:, 0], said, keys, context, limit)[0]


def as_drafted(frontier: Frontier) -> DraftedNodes:
    """A frontier as heads read it: the root, whose pair they know already, is none of the nodes seen."""
    places = jnp.arange(frontier.seen.shape[2])
    parent = jnp.max(jnp.where(frontier.seen, places, 0), 2)  # nodes are fed after their ancestors
    return DraftedNodes(frontier.tokens, frontier.depth, frontier.place, parent, frontier.seen & (places > 0))
