"""Two-model speculative decoding: a smaller model of the same vocabulary drafts a chain or a tree.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), arXiv 2211.17192;
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling (2023), arXiv 2302.01318.

Rule: x_i ~ q(. | text, x_<i) with the target's own temperature, top-k and top-p; a `specjax.trees` builder says how
many of them, and where. One pass of the draft model per level; the nodes share one key/value cache.
Guarantee: distribution (verified with the q that was sampled).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax import cache as kv
from specjax import trees
from specjax.errors import UsageError
from specjax.prefill import prefill
from specjax.trees import Builder
from specjax.types import Array, Context, Drafter, Model, PyTree, Target


class _State(NamedTuple):
    """The draft model's memory: its cache, and what the last round left to commit to it."""

    cache: PyTree
    pending: PyTree  # of the tokens fed: the two before the tree, then its inner nodes
    path: Array  # int32[B, P], the accepted ones among them
    count: Array  # int32[B], of `path`
    places: Array  # int32[B, N], of the tree's nodes, from `trees.Grown`
    alone: Array  # bool[B], the text had one token, so that no token was before the root


def two_model(draft: Target, num_tokens: int = 4, tree: Builder | None = None) -> Drafter:
    """A chain of `num_tokens` tokens of `draft`, or a `tree` from `specjax.trees` (greedy decoding: the likeliest).

    State: the draft's key/value cache, and the keys and values of one tree. Raises: UsageError if num_tokens < 1.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    return _functions(draft.model, tree or trees.chain(num_tokens)).replace(params=draft.params)


@functools.cache
def _functions(model: Model, builder: Builder) -> Drafter:
    # Fed in a round: the token before the root, which the cache lacks after full acceptance (always fed, so that rows
    # stay in step and the work is that of one token), the root, and every node that is drafted below.
    slots = 2 + (builder.levels - 1) * builder.frontier
    longest = builder.max_depth + 1

    def init(params, context: Context):
        batch, buffer = context.tokens.shape
        cache = model.init_cache(batch, buffer + slots)
        cache = prefill(model, params, cache, context.tokens, jnp.maximum(context.length - 2, 0))
        _, pending = feed_pair(params, cache, context)
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        return _State(
            cache, kv.widen(pending, slots), zeros(longest), zeros(), zeros(builder.num_nodes), zeros().astype(bool)
        )

    def feed_pair(params, cache, context: Context):
        """Feed the last two tokens of the text: the root's logits [B, V], and what is pending."""
        before = jnp.maximum(context.length - 2, 0)
        pair = jnp.stack([before, context.length - 1], 1)
        tokens = jnp.take_along_axis(context.tokens, pair, 1)
        alone = context.length == 1  # then the first of the pair is the root itself, seen by nobody
        mask = jnp.tril(jnp.ones((2, 2), bool)) & ~(alone[:, None, None] & jnp.array([[False, False], [True, False]]))
        output, pending = model.forward(params, tokens, cache, positions=pair, mask=mask)
        return output.logits[:, 1], pending

    def propose(params, keys, state: _State, context: Context, limit):
        cache = model.commit(state.cache, state.pending, state.path, state.count)
        cache = cache._replace(length=jnp.maximum(context.length - 2, 0))
        logits, pending = feed_pair(params, cache, context)
        alone = (context.length == 1)[:, None, None]

        def feed(pending, place, tokens, depth, seen):
            batch, width = tokens.shape
            sees_before = jnp.broadcast_to(~alone, (batch, width, 1))
            among = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
            output, new = model.forward(
                params, tokens, cache, positions=context.length[:, None] - 1 + depth,
                mask=jnp.concatenate([sees_before, seen, among], 2), earlier=pending,
            )  # fmt: skip
            return kv.insert(pending, new, 1 + place), output.logits

        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)[:, 0]
        grown, pending = trees.grow(builder, feed, kv.widen(pending, slots), root, logits, keys, context, limit)
        return grown.tree, _State(cache, pending, state.path, state.count, grown.places, context.length == 1)

    def update(params, state: _State, tree, verdict, output):
        """Note what was accepted. The next round commits it: a branch of the verify pass would copy the cache."""
        accepted = jnp.pad(verdict.path, ((0, 0), (0, longest)))[:, :longest]
        fed = 1 + jnp.take_along_axis(state.places, jnp.maximum(accepted, 0), 1)  # the root stands at 1
        fed = jnp.concatenate([jnp.zeros_like(fed[:, :1]), fed], 1)
        path = jnp.where(state.alone[:, None], fed[:, 1:], fed[:, :-1])
        # All but the last token of the new text and the one before it: the deepest node may never have been fed.
        return state._replace(path=jnp.maximum(path, 0), count=verdict.num_nodes - state.alone)

    return Drafter(
        init=init,
        propose=propose,
        update=update,
        num_nodes=builder.num_nodes,
        max_depth=builder.max_depth,
        draws=builder.draws,
        widths=builder.widths,
    )
