"""Log-probabilities of the added tokens and of the likeliest tokens beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.pallas_kernels.gumbel_topk import likeliest
from specjax.trees import operations
from specjax.types import Array, TokenLogprobs, TokenTree, Verdict
from specjax.verifiers.node_logits import NodeLogits


def raw_logprobs(tree: TokenTree, verdict: Verdict, logits: Array, reports: Array, count: int) -> TokenLogprobs:
    """Return the log-probabilities of a verdict's tokens. Other places, and rows that are not read, may have zeros.

    Args:
      logits: float[B, N, V], the target's own logits. reports: bool[B], rows that are read.
      count: number K of alternatives.
    """
    batch, nodes = tree.tokens.shape
    tokens, index = operations.emitted_tokens(tree, verdict), jnp.arange(nodes)
    rows_of = NodeLogits(logits, lambda rows, node: rows)
    is_read = reports & (verdict.num_nodes > 0)

    def at(place: Array, values: TokenLogprobs) -> TokenLogprobs:
        column = lambda x: jax.lax.dynamic_index_in_dim(x, place, 1, keepdims=False)
        row = rows_of.at(jnp.maximum(column(verdict.path), 0)).astype(jnp.float32)  # [B, V]
        # A reduction over the vocabulary, because a mesh may split it.
        is_token = jnp.arange(row.shape[1]) == column(tokens)[:, None]
        of_token = jnp.max(jnp.where(is_token, row, -jnp.inf), 1) - jax.nn.logsumexp(row, 1)
        best, of_best = (x[:, :count] for x in likeliest(row, max(count, 1)))
        at_place = TokenLogprobs(of_token, best, of_best)
        is_here = (index == place) & (place < verdict.num_nodes[:, None])
        put = lambda x, y: jnp.where(is_here.reshape(batch, nodes, *[1] * (x.ndim - 2)), y[:, None].astype(x.dtype), x)
        return jax.tree.map(put, values, at_place)

    zeros = TokenLogprobs(
        jnp.zeros((batch, nodes)), jnp.zeros((batch, nodes, count), jnp.int32), jnp.zeros((batch, nodes, count))
    )
    with jax.named_scope(scopes.WALK):
        end = jnp.max(jnp.where(is_read, verdict.num_nodes, 0))
        return jax.lax.fori_loop(0, end, at, zeros)
