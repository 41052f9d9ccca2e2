"""A learned head as a drafter: it reads what the target said of the committed tokens and grows a tree level by level.

Between rounds the state holds the head's memory of the pairs it has read, and those of the last round, which it reads
before it drafts again. How features, tokens and positions belong together: `specjax.models.heads.contract`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import buffers, trees
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.models.heads.contract import Drafted, DraftHead, Head, Pairs
from specjax.trees import Builder, Stop, operations
from specjax.trees.contracts import Frontier
from specjax.types import Array, Context, Drafter, Output, PyTree, TokenTree, Verdict


class State(NamedTuple):
    """The head's memory between two rounds."""

    memory: PyTree  # of the pairs that it has read
    held: Array  # int32[B], how many these are
    new: Pairs  # of the tokens accepted since; as many as fit the deepest tree


def learned(head: DraftHead, builder: Builder, longest: int | None = None) -> Drafter:
    """The drafter of a head whose trees `builder` grows.

    longest: tokens that a round may accept, the root included, where trees are drafted together with others; default:
      one more than the builder's own are deep.

    Raises: UsageError for a tree deeper than the head drafts, or a head that drafts in the target's own pass.
    """
    if head.head.prompts is not None:
        kind = head.head.kind
        raise UsageError(f"a head of {kind} drafts in the target's own pass, in trees of its own; choose method {kind}")
    deepest = head.head.deepest
    if deepest is not None and builder.max_depth > deepest:
        raise UsageError(f"the tree is {builder.max_depth} tokens deep, but the head drafts {deepest}; choose that")
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
    most = head.head.deepest
    assert most is not None
    return learned(head, trees.builder_of(num_tokens or most, tree, stop, keep_logits), longest)


@functools.cache
def _functions(head: Head, builder: Builder, longest: int) -> Drafter:
    """The drafter, without its parameters."""

    def init(params, context: Context) -> State:
        (batch, buffer), target = context.tokens.shape, context.target
        assert target is not None and target.model.embed is not None
        stream = jax.eval_shape(target.model.embed, target.params, context.root)  # [B, 1, D]
        features = jnp.zeros((batch, longest, stream.shape[-1] * max(len(head.taps), 1)), stream.dtype)
        none = jnp.zeros((batch,), jnp.int32)
        new = Pairs(features, jnp.zeros((batch, longest), jnp.int32), none)
        return State(head.begin(params, context, batch, buffer + longest), none, new)

    def read(params, state: State, context: Context, tokens, count, output: Output) -> State:
        index = state.held[:, None] + 1 + jnp.arange(tokens.shape[1])
        following = take_along(context.tokens, jnp.minimum(index, context.tokens.shape[1] - 1), 1)
        pairs = Pairs(head.features_of(output), following, count)
        return state._replace(memory=head.read(params, state.memory, pairs, context), held=state.held + count)

    def propose(params, keys, state: State, context: Context, limit) -> tuple[TokenTree, State]:
        memory, new = head.read(params, state.memory, state.new, context), state.new
        state = State(memory, state.held + new.count, new._replace(count=jnp.zeros_like(new.count)))
        return drafted(params, keys, memory, context, limit), state

    def drafted(params, keys, memory, context: Context, limit) -> TokenTree:
        def grown_tree() -> TokenTree:
            scratch, logits = head.start(params, memory, context, builder.places)

            def feed(scratch, frontier: Frontier):
                return head.follow(params, scratch, as_drafted(frontier), context)

            root = context.root[:, 0]
            return trees.grow(builder, feed, scratch, root, logits, keys, context, limit)[0].tree

        shapes = jax.eval_shape(grown_tree)
        return jax.lax.cond(jnp.any(limit > 0), grown_tree, lambda: operations.root_alone(context.root, shapes))

    def observe(params, state, context: Context, tree: TokenTree, verdict: Verdict, output: Output) -> Pairs:
        fit = lambda x, value: jnp.pad(x, ((0, 0), (0, longest)), constant_values=value)[:, :longest]
        path = jnp.maximum(fit(verdict.path, -1), 0)[:, :, None]
        features = [take_along(x, path, 1) for x in (output.taps if head.taps else (output.hidden,))]
        count = jnp.minimum(verdict.num_nodes, longest)
        return Pairs(jnp.concatenate(features, -1), fit(operations.emitted(tree, verdict), 0), count)

    def update(params, state: State, seen: Pairs, verdict: Verdict) -> State:
        return state._replace(new=seen)

    return Drafter(
        init=init,
        read=read,
        propose=propose,
        observe=observe,
        update=update,
        axes=lambda state: buffers.rows_first(state)._replace(memory=head.axes(state.memory)),
        num_nodes=builder.num_nodes,
        max_depth=builder.max_depth,
        draws=builder.draws,
        widths=builder.widths,
        taps=head.taps,
        rewinds=False,
        follows_any_tree=True,
    )


def as_drafted(frontier: Frontier) -> Drafted:
    """A frontier as heads read it: the root, whose pair they know already, is none of the nodes seen."""
    places = jnp.arange(frontier.seen.shape[2])
    parent = jnp.max(jnp.where(frontier.seen, places, 0), 2)  # nodes are fed after their ancestors
    return Drafted(frontier.tokens, frontier.depth, frontier.place, parent, frontier.seen & (places > 0))
