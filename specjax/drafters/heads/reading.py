"""What a head has read of the text, and what it has yet to read.

Between rounds the state holds the head's memory of the pairs it has read, and the pairs that came since. A head that
drafts in every round has those of one round to read; of one that rests they wait in a window, and are read when that
has no room for another round. So its memory is that of the whole text whenever it drafts. How features, tokens and
positions belong together: `specjax.models.heads.contract`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes, scopes
from specjax.arrays.indexing import take_along
from specjax.models.heads.contract import Head, FeaturePairs
from specjax.trees import operations
from specjax.types import Array, Context, Output, PyTree, TokenTree, Verdict


class State(NamedTuple):
    """The head's memory between two rounds."""

    memory: PyTree  # of the pairs that it has read
    held: Array  # int32[B], how many these are
    new: FeaturePairs  # of the tokens accepted since; as many as fit the window


def begin(head: Head, params: PyTree, context: Context, window: int) -> State:
    """Of no pairs, with room for `window` that are not read yet."""
    (batch, buffer), target = context.tokens.shape, context.target
    assert target is not None and target.model.embed is not None
    stream = jax.eval_shape(target.model.embed, target.params, context.root)  # [B, 1, D]
    features = jnp.zeros((batch, window, stream.shape[-1] * max(len(head.taps), 1)), stream.dtype)
    none = jnp.zeros((batch,), jnp.int32)
    new = FeaturePairs(features, jnp.zeros((batch, window), jnp.int32), none)
    return State(head.init_memory(params, context, batch, buffer + window), none, new)


def axes(head: Head, state: State) -> State:
    """As `Hooks.axes`."""
    return batch_axes.rows_first(state)._replace(memory=head.axes(state.memory))


def read_prompt(
    head: Head, params: PyTree, state: State, context: Context, tokens: Array, count: Array, output: Output
) -> State:
    """As `Hooks.prefill`."""
    index = state.held[:, None] + 1 + jnp.arange(tokens.shape[1])
    following = take_along(context.tokens, jnp.minimum(index, context.tokens.shape[1] - 1), 1)
    pairs = FeaturePairs(head.features_of(output), following, count)
    return state._replace(memory=head.read(params, state.memory, pairs, context), held=state.held + count)


def caught_up(
    head: Head, params: PyTree, state: State, context: Context, chunk: int | None = None, due: Array | bool = True
) -> State:
    """With all pairs read, if that is `due` bool[].

    chunk: how many at a time, a divisor of the window; as many passes as the row needs that has most to read. None: all
      at once, and in any case.
    """
    new = state.new
    if chunk is None:
        memory = head.read(params, state.memory, new, context)
        return State(memory, state.held + new.count, new._replace(count=jnp.zeros_like(new.count)))

    def read(i: Array, memory: PyTree) -> PyTree:
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1)
        pairs = FeaturePairs(part(new.features), part(new.tokens), jnp.clip(new.count - i * chunk, 0, chunk))
        return head.read(params, memory, pairs, context)

    passes = jnp.where(due, -(-jnp.max(new.count) // chunk), 0)
    with jax.named_scope(scopes.CATCH_UP):  # a branch would copy the memory; a loop writes in place
        memory = jax.lax.fori_loop(0, passes, read, state.memory)
    held, left = jnp.where(due, state.held + new.count, state.held), jnp.where(due, 0, new.count)
    return State(memory, held, new._replace(count=left))


def seen(head: Head, longest: int, tree: TokenTree, verdict: Verdict, output: Output) -> FeaturePairs:
    """The pairs of a round, of which it accepts at most `longest` tokens: for `Drafter.observe`."""
    fit = lambda x, value: jnp.pad(x, ((0, 0), (0, longest)), constant_values=value)[:, :longest]
    path = jnp.maximum(fit(verdict.path, -1), 0)[:, :, None]
    features = [take_along(x, path, 1) for x in (output.taps if head.taps else (output.hidden,))]
    count = jnp.minimum(verdict.num_nodes, longest)
    return FeaturePairs(jnp.concatenate(features, -1), fit(operations.emitted(tree, verdict), 0), count)


def added(state: State, pairs: FeaturePairs) -> State:
    """With the pairs of a round behind those that wait; there is room for them."""
    old, longest = state.new, pairs.tokens.shape[1]
    if old.tokens.shape[1] == longest:
        return state._replace(new=pairs)  # none waits
    place = jnp.arange(old.tokens.shape[1]) - old.count[:, None]  # [B, window]
    new = jnp.clip(place, 0, longest - 1)
    tokens = jnp.where(place < 0, old.tokens, take_along(pairs.tokens, new, 1))
    features = jnp.where(place[:, :, None] < 0, old.features, take_along(pairs.features, new[:, :, None], 1))
    return state._replace(new=FeaturePairs(features, tokens, old.count + pairs.count))
