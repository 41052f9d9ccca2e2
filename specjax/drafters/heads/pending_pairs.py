"""The memory of a head between two drafts, and the pairs that it has not read yet.

The state has the head's memory of the pairs that it has read, and the pairs that came later. A head that drafts in
every step has the pairs of one step to read. If a head rests, pairs wait in a window; they are read when the window has
no room for another step. So the memory covers the whole text whenever the head drafts. The alignment of features,
tokens and positions is defined in `specjax.models.heads.contract`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes, scopes
from specjax.arrays.indexing import take_along
from specjax.models.heads.contract import FeaturePairs, Head
from specjax.trees import operations
from specjax.types import Array, Context, Output, PyTree, TokenTree, Verdict


class State(NamedTuple):
    """The state of a head between two steps."""

    memory: PyTree  # of the pairs that the head has read
    num_read: Array  # int32[B]
    pending: FeaturePairs  # pairs of the tokens that were accepted since; as many as fit the window


def init_state(head: Head, params: PyTree, context: Context, window: int) -> State:
    """Return a state without pairs, with room for `window` pending ones."""
    (batch, buffer), target = context.tokens.shape, context.target
    assert target is not None and target.model.embed is not None
    stream = jax.eval_shape(target.model.embed, target.params, context.root)  # [B, 1, D]
    features = jnp.zeros((batch, window, stream.shape[-1] * max(len(head.taps), 1)), stream.dtype)
    zeros = jnp.zeros((batch,), jnp.int32)
    pending = FeaturePairs(features, jnp.zeros((batch, window), jnp.int32), zeros)
    return State(head.init_memory(params, context, batch, buffer + window), zeros, pending)


def state_axes(head: Head, state: State) -> State:
    """Return the batch axis of each array, like `Hooks.axes`."""
    return batch_axes.rows_first(state)._replace(memory=head.axes(state.memory))


def read_prompt(
    head: Head, params: PyTree, state: State, context: Context, tokens: Array, count: Array, output: Output
) -> State:
    """Read the pairs of a chunk of the prompt, like `Hooks.prefill`."""
    index = state.num_read[:, None] + 1 + jnp.arange(tokens.shape[1])
    next_tokens = take_along(context.tokens, jnp.minimum(index, context.tokens.shape[1] - 1), 1)
    pairs = FeaturePairs(head.features_of(output), next_tokens, count)
    return state._replace(memory=head.read(params, state.memory, pairs, context), num_read=state.num_read + count)


def read_pending(
    head: Head, params: PyTree, state: State, context: Context, chunk: int | None = None, due: Array | bool = True
) -> State:
    """Read all pending pairs if `due` bool[] is true.

    chunk: pairs of one pass, a divisor of the window; the row with the most pending pairs sets the number of passes.
      None: read all of them in one pass, and ignore `due`.
    """
    pending = state.pending
    if chunk is None:
        memory = head.read(params, state.memory, pending, context)
        empty = pending._replace(count=jnp.zeros_like(pending.count))
        return State(memory, state.num_read + pending.count, empty)

    def read(i: Array, memory: PyTree) -> PyTree:
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1)
        count = jnp.clip(pending.count - i * chunk, 0, chunk)
        return head.read(params, memory, FeaturePairs(part(pending.features), part(pending.tokens), count), context)

    passes = jnp.where(due, -(-jnp.max(pending.count) // chunk), 0)
    with jax.named_scope(scopes.CATCH_UP):  # a branch would copy the memory; a loop writes in place
        memory = jax.lax.fori_loop(0, passes, read, state.memory)
    num_read = jnp.where(due, state.num_read + pending.count, state.num_read)
    return State(memory, num_read, pending._replace(count=jnp.where(due, 0, pending.count)))


def accepted_pairs(head: Head, max_accepted: int, tree: TokenTree, verdict: Verdict, output: Output) -> FeaturePairs:
    """Return the pairs of the tokens that a step accepts, at most `max_accepted`, for `Drafter.observe`."""
    fit = lambda x, value: jnp.pad(x, ((0, 0), (0, max_accepted)), constant_values=value)[:, :max_accepted]
    path = jnp.maximum(fit(verdict.path, -1), 0)[:, :, None]
    features = [take_along(x, path, 1) for x in (output.taps if head.taps else (output.hidden,))]
    count = jnp.minimum(verdict.num_nodes, max_accepted)
    return FeaturePairs(jnp.concatenate(features, -1), fit(operations.emitted_tokens(tree, verdict), 0), count)


def append(state: State, pairs: FeaturePairs) -> State:
    """Append the pairs of a step to the pending ones. The window has room for them."""
    old, length = state.pending, pairs.tokens.shape[1]
    if old.tokens.shape[1] == length:
        return state._replace(pending=pairs)  # the head reads all pairs before each draft, so none is pending
    offset = jnp.arange(old.tokens.shape[1]) - old.count[:, None]  # [B, window]
    index = jnp.clip(offset, 0, length - 1)
    tokens = jnp.where(offset < 0, old.tokens, take_along(pairs.tokens, index, 1))
    features = jnp.where(offset[:, :, None] < 0, old.features, take_along(pairs.features, index[:, :, None], 1))
    return state._replace(pending=FeaturePairs(features, tokens, old.count + pairs.count))
