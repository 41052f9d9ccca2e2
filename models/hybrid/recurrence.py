"""Linear recurrences over token trees: one pass over all nodes, and the commit of a path.

A layer with H heads has a state S [d, v] per head. Token t changes it by a decay and a rank-one update, and reads it:

    S <- exp(g_t) S + k_t u_t'        o_t = S' q_t

A state-space layer (Mamba-2) has u_t = dt_t x_t. A gated delta net has u_t = beta_t (v_t - exp(g_t) S' k_t) with the
state before the token, so its u depend on each other.

In a tree the tokens before node i are the committed text, with the state S0, and the ancestors of i. Let s_i be the sum
of g over the path to i, itself included, and D_ij = exp(s_i - s_j) for j = i and its ancestors, else 0. Then

    o_i = exp(s_i) S0' q_i + sum_j D_ij (q_i . k_j) u_j
    (I + A) U = R,  A_ij = beta_i D_ij (k_i . k_j) for j != i,  R_i = beta_i (v_i - exp(s_i) S0' k_i)

and the state after a path that ends at node n is exp(s_n) S0 + sum over its nodes of exp(s_n - s_j) k_j u_j'. No state
per node is stored, and no token is read again. Nodes that are not on the path leave no trace.

Source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks (arXiv 2412.06464), and Dao and Gu 2024, Mamba-2 (arXiv
2405.21060), for texts. Wu et al. 2025, STree (arXiv 2505.14969), has the tree form for Mamba-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.texts import is_in_order
from specjax.types import Array

DECAY_STEPS = 1024
EXACT = "highest"  # precision of products of float32 numbers, which the state sums up over thousands of tokens


class RecurrentState(NamedTuple):
    """Memory of the committed text in one layer. Stacked layers have a leading axis in every array."""

    window: Array  # [B, w, C], the last inputs of the convolution, zeros before the start of the text
    state: Array | None = None  # float32[B, H, d, v]; None: the layer has only a convolution


class Updates(NamedTuple):
    """Changes of the state by T pending tokens, of which a path is committed later. G key heads serve H heads."""

    inputs: Array  # [B, T, C], of the convolution
    key: Array | None = None  # float32[B, T, G, d]
    value: Array | None = None  # float32[B, T, H, v], the vectors u
    decay: Array | None = None  # float32[B, T, H, 2], the logarithms g in two parts
    total: Array | None = None  # float32[B, T, H, 2], the sums s of these parts


class Decays(NamedTuple):
    """Decays between the tokens of a pass."""

    decay: Array  # float32[B, T, H, 2], the logarithms g of the new tokens in two parts
    total: Array  # float32[B, T, H, 2], the sums s of these parts
    from_start: Array  # float32[B, G, r, T], exp(s)
    between: Array  # float32[B, G, r, T, P + T], D; 0 outside of the ancestry


def find_decays(decay: Array, mask: Array, earlier: Updates | None, groups: int) -> Decays:
    """Return the decays between tokens.

    Args:
      decay: float32[B, T, H], the logarithms g, at most 0.
      mask: bool[B, T, P + T], each token's ancestors and the token itself.
    """
    parts = split_decay(decay)
    every_part = join_tokens(None if earlier is None else earlier.decay, parts)
    total = jnp.einsum("bts,bshp->bthp", mask.astype(jnp.float32), every_part, precision=EXACT)
    s_new, s_all = (
        by_group(total, groups),
        by_group(join_tokens(None if earlier is None else earlier.total, total), groups),
    )
    difference = jnp.sum(s_new[..., :, None, :] - s_all[..., None, :, :], -1)
    # Mask before `exp`: between tokens of different paths the difference may be large and positive.
    between = jnp.exp(jnp.where(mask[:, None, None], difference, -jnp.inf))
    return Decays(parts, total, jnp.exp(jnp.sum(s_new, -1)), between)


def split_decay(decay: Array) -> Array:
    """Split logarithms of decays [...] into two parts [..., 2], multiples of 1 / DECAY_STEPS and the small remainder.

    Sums of the first part are exact up to 2 ** 24 / DECAY_STEPS. In one part, the difference of two sums of -400 would
    have an error of 3e-5, which is a relative error of the state.
    """
    coarse = jnp.round(decay * DECAY_STEPS) / DECAY_STEPS
    return jnp.stack([coarse, decay - coarse], -1)


def by_group(x: Array, groups: int) -> Array:
    """Return x [B, T, H, ...] as [B, G, H / G, T, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], groups, -1, *x.shape[3:]), 1, 3)


def read_state(query: Array, state: Array, decays: Decays) -> Array:
    """Return exp(s_i) S0' q_i float32[B, G, r, T, v] for queries float32[B, T, G, d] and the state [B, H, d, v]."""
    groups = query.shape[2]
    grouped = state.reshape(state.shape[0], groups, -1, *state.shape[2:])
    product = jnp.einsum("btgd,bgrdv->bgrtv", query, grouped, precision=EXACT)
    return decays.from_start[..., None] * product


def read_tokens(query: Array, key: Array, value: Array, decays: Decays) -> Array:
    """Return sum_j D_ij (q_i . k_j) u_j float32[B, G, r, T, v].

    Args:
      query: float32[B, T, G, d]. key: float32[B, S, G, d]. value: float32[B, G, r, S, v].
      decays: those of S tokens, pending ones first.
    """
    scores = jnp.einsum("btgd,bsgd->bgts", query, key, precision=EXACT)[:, :, None] * decays.between
    return jnp.einsum("bgrts,bgrsv->bgrtv", scores, value, precision=EXACT)


def merge_groups(x: Array) -> Array:
    """Return x [B, G, r, T, v] as [B, T, H, v]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, *x.shape[3:]), 1, 2)


def split_groups(x: Array, groups: int) -> Array:
    """Return x [B, T, H, v] as [B, G, r, T, v]."""
    return jnp.moveaxis(x, 2, 1).reshape(x.shape[0], groups, -1, x.shape[1], x.shape[3])


def join_tokens(old: Array | None, new: Array) -> Array:
    """Return pending and new tokens [B, P + T, ...]."""
    return new if old is None else jnp.concatenate([old, new], 1)


def commit_path(memory: RecurrentState, updates: Updates, path: Array, num_nodes: Array) -> RecurrentState:
    """Return the memory after the nodes `path[b, :num_nodes[b]]`. A row with 0 nodes stays the same to the bit.

    Args:
      path: int32[B, P], nodes from the root down. Entries past `num_nodes` are ignored. For a constant path of
        `specjax.arrays.texts.in_order`, nothing is gathered.
    """
    nodes = jnp.maximum(path, 0)[..., None]
    window = _shift_window(memory.window, take_along(updates.inputs, nodes, 1), num_nodes)
    if memory.state is None:
        return RecurrentState(window)
    assert updates.key is not None and updates.value is not None and updates.total is not None
    is_committed = jnp.arange(path.shape[1]) < num_nodes[:, None]  # bool[B, P]
    along = lambda x: take_along(x, nodes.reshape(*nodes.shape[:2], *[1] * (x.ndim - 2)), 1)
    at_path = (lambda x: x) if is_in_order(path) and path.shape[1] == updates.inputs.shape[1] else along
    total = at_path(updates.total)  # [B, P, H, 2]
    last = take_along(total, jnp.maximum(num_nodes - 1, 0)[:, None, None, None], 1)
    weight = jnp.exp(jnp.where(is_committed[..., None], jnp.sum(last - total, -1), -jnp.inf))
    # Values of other nodes may be anything, so they are masked and not multiplied by 0.
    value = jnp.where(is_committed[..., None, None], at_path(updates.value), 0) * weight[..., None]
    key = jnp.where(is_committed[..., None, None], at_path(updates.key), 0)
    state = memory.state
    key = jnp.repeat(key, value.shape[2] // key.shape[2], 2)
    added = jnp.einsum("bphd,bphv->bhdv", key, value, precision=EXACT)
    changed = jnp.exp(jnp.sum(last[:, 0], -1))[:, :, None, None] * state + added
    return RecurrentState(window, jnp.where((num_nodes > 0)[:, None, None, None], changed, state))


def _shift_window(window: Array, inputs: Array, count: Array) -> Array:
    """Return the last inputs [B, w, C] after the first `count` int32[B] of `inputs` [B, P, C]."""
    size = window.shape[1]
    places = count[:, None] + jnp.arange(size)
    return take_along(jnp.concatenate([window, inputs.astype(window.dtype)], 1), places[..., None], 1)


def convolve(inputs: Sequence[Array], weight: Array, bias: Array | None = None) -> Array:
    """Return the depthwise convolution float32[B, T, C] of the inputs [B, T, C] at distance w, ..., 0.

    weight: [C, w + 1]. bias: [C].
    """
    terms = [x.astype(jnp.float32) * weight[:, i].astype(jnp.float32) for i, x in enumerate(inputs)]
    y = sum(terms[1:], terms[0])
    return y if bias is None else y + bias.astype(jnp.float32)
