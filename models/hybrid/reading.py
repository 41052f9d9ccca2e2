"""Outputs and updates of the tokens of one pass of a recurrent layer, with the equations of `recurrence`.

A tree, or a text of few tokens, is one system of equations over all tokens. A longer text is read in chunks: products
inside of all chunks first, then a loop that carries the state from chunk to chunk. The loop has one body, so the
compiler's time does not grow with the text. Source of the chunked form: Yang et al. 2024, Parallelizing Linear
Transformers with the Delta Rule over Sequence Length (arXiv 2406.06484), section 3.2, with the decays of arXiv
2412.06464, section 3.3. Deviation: both papers compute W = inverse * (beta exp(s) k) and U = inverse * (beta v) of all
chunks first. The inverse is applied in the loop here, to v - exp(s) S' k, which takes one product less.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.arrays.texts import causal_mask, traced_mask
from specjax.models.hybrid import recurrence as R
from specjax.models.hybrid.ancestry import Ancestry
from specjax.numerics.triangular import solve_unit_lower, unit_lower_inverse
from specjax.types import Array

CHUNK = 64  # tokens of a text that are read at once


class TokenInputs(NamedTuple):
    """Inputs of the recurrence at T tokens. Each of G key heads serves H / G heads."""

    query: Array  # float32[B, T, G, d]
    key: Array  # float32[B, T, G, d]
    value: Array  # float32[B, T, H, v]
    decay: Array  # float32[B, T, H], the logarithms g, at most 0
    beta: Array | None = None  # float32[B, T, H], of a delta rule; None: the updates u are the values


class PassReading(NamedTuple):
    """Results of the recurrence at T tokens."""

    output: Array  # float32[B, T, H, v]
    value: Array  # float32[B, T, H, v], the vectors u
    decay: Array  # float32[B, T, H, 2], the logarithms g in two parts
    total: Array  # float32[B, T, H, 2], their sums s over the path to each token


def read_pass(tokens: TokenInputs, state: Array, ancestry: Ancestry, earlier: R.Updates | None) -> PassReading:
    """Return the outputs and updates of the new tokens of a pass.

    Args:
      state: float32[B, H, d, v] of the committed text.
      earlier: updates of pending tokens; None: there are none.
    """
    if ancestry.mask is None and tokens.key.shape[1] > CHUNK:
        return read_text(tokens, state)
    return read_nodes(tokens, state, ancestry, earlier)


def read_nodes(tokens: TokenInputs, state: Array, ancestry: Ancestry, earlier: R.Updates | None) -> PassReading:
    """Read the nodes of a tree, as `read_pass`."""
    query, key, value, decay, beta = tokens
    groups = key.shape[2]
    decays = R.find_decays(decay, ancestry.mask_of(*key.shape[:2]), earlier, groups)
    u = R.split_groups(value, groups) if beta is None else _solve(key, value, beta, state, decays, earlier)
    every_key, every_u = key, u
    if earlier is not None:
        assert earlier.key is not None and earlier.value is not None
        every_key = R.join_tokens(earlier.key, key)
        every_u = jnp.concatenate([R.split_groups(earlier.value, groups), u], 3)
    output = R.read_state(query, state, decays) + R.read_tokens(query, every_key, every_u, decays)
    return PassReading(R.merge_groups(output), R.merge_groups(u), decays.decay, decays.total)


def _solve(key: Array, value: Array, beta: Array, state: Array, decays: R.Decays, earlier: R.Updates | None) -> Array:
    """Return the u float32[B, G, r, T, v] of the new tokens. Those of pending tokens are data."""
    groups, count = key.shape[2], key.shape[1]
    beta_by_group = R.by_group(beta, groups)[..., None]  # [B, G, r, T, 1]
    right = R.split_groups(value, groups) - R.read_state(key, state, decays)
    num_earlier = 0
    if earlier is not None:
        assert earlier.key is not None and earlier.value is not None
        num_earlier = earlier.key.shape[1]
        to_earlier = decays._replace(between=decays.between[..., :num_earlier])
        right = right - R.read_tokens(key, earlier.key, R.split_groups(earlier.value, groups), to_earlier)
    if count == 1:
        return beta_by_group * right
    return solve_unit_lower(_coupling(key, beta_by_group, decays.between[..., num_earlier:]), beta_by_group * right)


def _coupling(key: Array, beta_by_group: Array, between: Array) -> Array:
    """Return A float32[B, G, r, T, T] of the equations (I + A) U = R."""
    products = jnp.einsum("btgd,bsgd->bgts", key, key, precision=R.EXACT)[:, :, None]
    strict = jnp.where(jnp.eye(key.shape[1], dtype=bool), 0, between)
    return beta_by_group * strict * products


class _Chunks(NamedTuple):
    """Products inside of chunks, which do not depend on the state. Leading axes: [B] or [chunks, B]."""

    read: Array  # float32[2 c, G, d], queries and keys
    key: Array  # float32[c, G, d]
    value: Array  # float32[G, r, c, v]
    scores: Array  # float32[G, r, c, c], D_ij (q_i . k_j)
    from_start: Array  # float32[G, r, c], exp(s)
    to_end: Array  # float32[G, r, c], D between each token and the last one
    solve: Array | None  # float32[G, r, c, c], from v - exp(s) S' k to u


def read_text(tokens: TokenInputs, state: Array, *, is_looped: bool | None = None) -> PassReading:
    """Read a text in chunks of CHUNK tokens, as `read_pass` without pending tokens.

    Args:
      is_looped: compute the products of a chunk in the loop, and not those of all chunks at once. Default: on a TPU.
    """
    batch, count, groups = tokens.key.shape[:3]
    num_chunks = -(-count // CHUNK)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, num_chunks * CHUNK - count)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch * num_chunks, CHUNK, *x.shape[2:])

    in_chunks = jax.tree.map(split, tokens)  # zeros behind the text change nothing
    mask = traced_mask(causal_mask(batch * num_chunks, CHUNK))
    decays = R.find_decays(in_chunks.decay, mask, None, groups)
    apart = lambda x: x.reshape(batch, num_chunks, *x.shape[1:])  # [B, chunks, ...]
    stack = lambda arrays: jax.tree.map(lambda x: jnp.moveaxis(apart(x), 1, 0), arrays)
    if platforms.of_program() == "tpu" if is_looped is None else is_looped:
        read = lambda state, chunk: _read_chunk(state, _find_products(*chunk))
        _, (output, u) = jax.lax.scan(read, state, stack((in_chunks, decays)))
    else:
        _, (output, u) = jax.lax.scan(_read_chunk, state, stack(_find_products(in_chunks, decays)))
    # [chunks, B, G, r, c, v] to [B, T, H, v]
    join = lambda x: jnp.moveaxis(x, (0, 4), (1, 2)).reshape(batch, num_chunks * CHUNK, -1, x.shape[-1])[:, :count]
    total = apart(decays.total)
    ends = jnp.cumsum(total[:, :, -1:], 1)
    total = total + jnp.pad(ends[:, :-1], ((0, 0), (1, 0), *((0, 0),) * 3))
    flat = lambda x: x.reshape(batch, num_chunks * CHUNK, *x.shape[-2:])[:, :count]
    return PassReading(join(output), join(u), flat(decays.decay), flat(total))


def _find_products(tokens: TokenInputs, decays: R.Decays) -> _Chunks:
    """Return the products inside of chunks. Both arguments have one row per chunk."""
    query, key, value, _, beta = tokens
    groups = key.shape[2]
    scores = jnp.einsum("btgd,bsgd->bgts", query, key, precision=R.EXACT)[:, :, None] * decays.between
    solve = None
    if beta is not None:
        by_group = R.by_group(beta, groups)
        solve = unit_lower_inverse(_coupling(key, by_group[..., None], decays.between)) * by_group[..., None, :]
    value, to_end = R.split_groups(value, groups), decays.between[..., -1, :]
    return _Chunks(jnp.concatenate([query, key], 1), key, value, scores, decays.from_start, to_end, solve)


def _read_chunk(state: Array, chunk: _Chunks) -> tuple[Array, tuple[Array, Array]]:
    """Read one chunk. Returns: the state after it; outputs and vectors u float32[B, G, r, c, v]."""
    _, groups, per_group, count = chunk.from_start.shape[-4:]
    grouped = state.reshape(state.shape[0], groups, per_group, *state.shape[2:])
    from_state = jnp.einsum("btgd,bgrdv->bgrtv", chunk.read, grouped, precision=R.EXACT)
    decayed = lambda x: chunk.from_start[..., None] * x
    u = chunk.value
    if chunk.solve is not None:
        u = jnp.matmul(chunk.solve, u - decayed(from_state[..., count:, :]), precision=R.EXACT)
    output = decayed(from_state[..., :count, :]) + jnp.matmul(chunk.scores, u, precision=R.EXACT)
    added = jnp.einsum("bsgd,bgrsv->bgrdv", chunk.key, chunk.to_end[..., None] * u, precision=R.EXACT)
    changed = chunk.from_start[..., -1, None, None] * grouped + added
    return changed.reshape(state.shape), (output, u)
