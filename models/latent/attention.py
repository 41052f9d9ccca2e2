"""Attention over the short vectors of tokens.

DeepSeek-AI: DeepSeek-V2 (2024), arXiv 2405.04434, section 2.1. The cache has the vector c [r] and a rotated key [d]
that all heads share, so 576 numbers per token in the published models.

Rule: a head's key is [W_k c; k], its value W_v c. A query [q; p] has the score q . W_k c + p . k, which is
(W_k' q) . c + p . k. So attention runs on the cache itself, as with one key/value head of r + d numbers whose value is
its first r, and W_v is applied to the sum (the for_vectors form). Otherwise each pass would expand the whole cache.
The kernel for TPUs reads each entry once for the score and the value (`value_size` of `tree_attention`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.products import pad_tokens
from specjax.models.rotary import rotate
from specjax.pallas_kernels.tree_attention import tree_attention
from specjax.types import Array

EPS = 1e-6  # of the norms of short vectors, whatever the config has for the others


class LatentAttention(nnx.Module):
    """Attention over short vectors of tokens."""

    def __init__(self, c: Any, rngs: nnx.Rngs):
        """Create the projections and norms. c: a `DecoderConfig` with `latent`."""
        sizes = self.sizes = c.latent
        assert sizes is not None
        linear = functools.partial(L.Linear, dtype=c.dtype, rngs=rngs)
        norm = functools.partial(L.RMSNorm, eps=EPS, dtype=c.dtype)
        rank, heads = sizes.query_rank, c.num_heads
        self.q_down = None if rank is None else linear(c.width, rank)
        self.q_down_norm = None if rank is None else norm(rank)
        self.q = linear(c.width if rank is None else rank, heads * (sizes.plain_dim + sizes.rotary_dim))
        self.latent = linear(c.width, sizes.cached)
        self.latent_norm = norm(sizes.rank)
        self.k_up, self.v_up = linear(sizes.rank, heads * sizes.plain_dim), linear(sizes.rank, heads * sizes.value_dim)
        self.o = linear(heads * sizes.value_dim, c.width)
        self.scale = sizes.scale(c.rope_scaling)

    def __call__(self, x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        """Attend from x [B, T, D], which may have more tokens than the pass, as `layers.Attention`.

        Returns: the output, like x, and ([B, 1, T, r + d], None): the entries of the cache have no separate values.
        """
        shared, cache, sizes = inputs.shared, inputs.cache, self.sizes
        new = kv.to_cache_dtype(self._entries(x, inputs).swapaxes(1, 2), cache.k)
        join = lambda old, new: jnp.concatenate([old, new], 2)
        keys = jax.tree.map(join, cache.earlier[0], new) if cache.earlier else new
        attend: Callable[..., Array] = functools.partial(tree_attention, scale=self.scale, value_size=sizes.rank)
        attend = attend if shared.layout is None else shared.layout.shard_attention(attend)
        optional = {} if shared.first is None else {"first": shared.first}
        out = attend(
            kv.pad_head_dim(self._queries(x, inputs), cache.k), keys, None, cache.k, None, shared.length,
            shared.positions, shared.mask,
            key_positions=shared.key_positions, layer=cache.layer, window=inputs.settings.window, **optional,
        )  # fmt: skip
        by_head = self.v_up.weight[...].reshape(-1, sizes.value_dim, sizes.rank)
        out = jnp.einsum("bthr,hvr->bthv", out, by_head)
        out = out.reshape(*out.shape[:2], -1)
        return shared.sum(self.o(pad_tokens(out, x.shape[1])), "heads"), (new, None)

    def _entries(self, x: Array, inputs: L.LayerInputs) -> Array:
        """Return what the cache stores of the pass's tokens, [B, T, 1, r + d]."""
        y = L.isolated(self.latent(x))[:, : inputs.shared.positions.shape[1], None]
        short, key = y[..., : self.sizes.rank], y[..., self.sizes.rank :]
        return jnp.concatenate([self.latent_norm(short), _rotated(key, inputs.settings)], -1)

    def _queries(self, x: Array, inputs: L.LayerInputs) -> Array:
        """Return queries for the entries of the cache, [B, T, H, r + d]."""
        shared, sizes = inputs.shared, self.sizes
        x = x if self.q_down is None or self.q_down_norm is None else self.q_down_norm(self.q_down(x))
        q = L.isolated(self.q(x))[:, : shared.positions.shape[1]]
        q = shared.place(q.reshape(*q.shape[:2], -1, sizes.plain_dim + sizes.rotary_dim), "data", None, "heads", None)
        by_head = self.k_up.weight[...].reshape(-1, sizes.plain_dim, sizes.rank)
        for_vectors = jnp.einsum("bthn,hnr->bthr", q[..., : sizes.plain_dim], by_head)
        return jnp.concatenate([for_vectors, _rotated(q[..., sizes.plain_dim :], inputs.settings)], -1)


def _rotated(x: Array, settings: L.AttentionSettings) -> Array:
    """Rotate x [B, T, H, d] by the positions of its tokens."""
    return x if settings.rotation is None else rotate(x, settings.rotation)
