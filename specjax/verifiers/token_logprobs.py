"""Log-probabilities of the tokens of a verdict, and of the likeliest tokens beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.pallas_kernels.gumbel_topk import likeliest
from specjax.trees import operations
from specjax.types import Array, PyTree, Target, TokenLogprobs, TokenTree, Verdict
from specjax.verifiers.node_logits import NodeLogits

BLOCK = 32
"""Places of a text whose logits exist at a time: 19 MB with the vocabulary of Qwen3."""


def token_logprobs(tree: TokenTree, verdict: Verdict, logits: NodeLogits) -> Array:
    """Return log p float32[B, N] of each token of a verdict by the logits of its node, then zeros."""
    return _along_path(tree, verdict, logits, _logprob_of, jnp.zeros(tree.tokens.shape))


def raw_logprobs(tree: TokenTree, verdict: Verdict, logits: Array, reports: Array, count: int) -> TokenLogprobs:
    """Return the log-probabilities of a verdict's tokens. Other places, and rows that are not read, may have zeros.

    Args:
      logits: float[B, N, V], the target's own logits. reports: bool[B], rows that are read.
      count: number K of alternatives.
    """
    zeros = zero_logprobs(tree.tokens.shape, count)
    read = functools.partial(_logprobs, count=count)
    end = jnp.max(jnp.where(reports, verdict.num_nodes, 0))
    return _along_path(tree, verdict, NodeLogits(logits, lambda rows, node: rows), read, zeros, end)


def zero_logprobs(shape: tuple[int, ...], count: int) -> TokenLogprobs:
    """Return zeros for places of a shape, each with `count` alternatives."""
    return TokenLogprobs(jnp.zeros(shape), jnp.zeros((*shape, count), jnp.int32), jnp.zeros((*shape, count)))


def text_logprobs(
    target: Target, hidden: Array, following: Array, end: Array, logprobs: TokenLogprobs
) -> TokenLogprobs:  # fmt: skip
    """Return the log-probabilities of the tokens that follow the first places of a text. Others may stay as they are.

    The logits of only BLOCK places exist at a time.

    Args:
      hidden: [B, T, D], hidden states after the final norm. following: int32[B, T], the tokens after these places.
      end: int32[], number of places that are read. logprobs: the result of the other places, [B, T].
    """
    unembed, count = target.model.unembed, logprobs.alternatives.shape[-1]
    assert unembed is not None
    batch, width = following.shape
    block = min(BLOCK, width)

    def read(number: Array, logprobs: TokenLogprobs) -> TokenLogprobs:
        first = jnp.minimum(number * block, width - block)
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, first, block, 1)
        rows = unembed(target.params, take(hidden)).astype(jnp.float32)
        values = _logprobs(rows.reshape(batch * block, -1), take(following).reshape(-1), count)
        put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y.reshape(batch, block, *y.shape[1:]), first, 1)
        return jax.tree.map(put, logprobs, values)

    with jax.named_scope(scopes.WALK):
        return jax.lax.fori_loop(0, (end + block - 1) // block, read, logprobs)


def _logprobs(rows: Array, tokens: Array, count: int) -> TokenLogprobs:
    """Return the log-probabilities of tokens int32[B] and of the `count` likeliest ones by logits [B, V]."""
    best, of_best = (x[:, :count] for x in likeliest(rows, max(count, 1)))
    return TokenLogprobs(_logprob_of(rows, tokens), best, of_best)


def _logprob_of(row: Array, tokens: Array) -> Array:
    """Return log p float32[B] of tokens int32[B] by logits [B, V].

    It reduces over the vocabulary, because a mesh may split it.
    """
    is_token = jnp.arange(row.shape[1]) == tokens[:, None]
    return jnp.max(jnp.where(is_token, row, -jnp.inf), 1) - jax.nn.logsumexp(row, 1)


def _along_path(
    tree: TokenTree, verdict: Verdict, logits: NodeLogits, read: Callable[[Array, Array], PyTree], zeros: PyTree,
    end: Array | None = None,
) -> PyTree:  # fmt: skip
    """Return `read(row float32[B, V], token int32[B])` for each token of a verdict, in arrays [B, N, ...].

    Args:
      zeros: the values of other places.
      end: int32[], number of places that are read. None: all; the place of a plain step is then read without a loop.
    """
    tokens, index = operations.emitted_tokens(tree, verdict), jnp.arange(tree.tokens.shape[1])

    def at(place: Array, values: PyTree) -> PyTree:
        column = lambda x: jax.lax.dynamic_index_in_dim(x, place, 1, keepdims=False)
        row = logits.at(jnp.maximum(column(verdict.path), 0)).astype(jnp.float32)
        is_here = (index == place) & (place < verdict.num_nodes[:, None])
        put = lambda x, y: jnp.where(is_here.reshape(*is_here.shape, *[1] * (x.ndim - 2)), y[:, None], x)
        return jax.tree.map(put, values, read(row, column(tokens)))

    if end is None and len(index) == 1:
        return at(jnp.int32(0), zeros)
    with jax.named_scope(scopes.WALK):
        return jax.lax.fori_loop(0, jnp.max(verdict.num_nodes) if end is None else end, at, zeros)
