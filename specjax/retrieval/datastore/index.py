"""Datastores on the device: `search` and `continuations` of `Datastore` for a batch, inside `jit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.arrays.indexing import take_along
from specjax.types import Array

Shards = Sequence[tuple[np.ndarray, np.ndarray]]
"""Tokens and suffixes of each shard: `Datastore.shards`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Index:
    """S shards of n places each, padded with END. It takes 6 bytes per place, or 8 above 65,535 ids."""

    tokens: Array  # uint16[S, n] or int32[S, n]
    suffixes: Array  # int32[S, n]
    sizes: Array  # int32[S]
    vocab_size: int = field(metadata={"static": True})  # END


class Matches(NamedTuple):
    """A `store.Match` for each row."""

    span: Array  # int32[B]; 0: no match
    first: Array  # int32[B, S]
    counts: Array  # int32[B, S]


def to_device(shards: Shards, vocab_size: int, mesh: Mesh | None = None) -> Index:
    """Copy shards to the device, or distribute them over all axes except "data" of the target's `mesh`.

    On P devices each stores ceil(S / P) shards, padded to the longest. Devices along "data" decode different rows and
    store the same shards, as they store the same weights. The host reads the shards of one device at a time, and only
    those of its own devices.
    """
    if mesh is None:
        tokens, suffixes, sizes = jax.device_put(_arrays(shards, vocab_size, 0, len(shards)))
        return Index(tokens, suffixes, sizes, vocab_size)
    axes = tuple(axis for axis in mesh.axis_names if axis != "data")
    parts = math.prod(mesh.shape[axis] for axis in axes)
    per_device = -(-len(shards) // parts)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    holders: dict[int, list[jax.Device]] = {}  # first shard -> devices of this host that store it
    for device, (rows,) in sharding.devices_indices_map((per_device * parts,)).items():
        if device in sharding.addressable_devices:
            holders.setdefault(rows.start or 0, []).append(device)
    arrays_on_devices = []
    for first, devices in holders.items():
        arrays = _arrays(shards, vocab_size, first, per_device)
        arrays_on_devices += [jax.device_put(arrays, device) for device in devices]
    assemble = lambda *pieces: jax.make_array_from_single_device_arrays(
        (per_device * parts, *pieces[0].shape[1:]), sharding, list(pieces)
    )
    tokens, suffixes, sizes = map(assemble, *arrays_on_devices)
    return Index(tokens, suffixes, sizes, vocab_size)


def _arrays(shards: Shards, vocab_size: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, suffixes and sizes of `count` shards from `first` on, padded with empty shards after the last."""
    longest = max(len(tokens) for tokens, _ in shards)
    tokens = np.full((count, longest), vocab_size, np.uint16 if vocab_size < 1 << 16 else np.int32)
    suffixes, sizes = np.zeros((count, longest), np.int32), np.zeros(count, np.int32)
    for i, (ids, places) in enumerate(shards[first : first + count]):
        sizes[i] = len(ids)
        tokens[i, : sizes[i]], suffixes[i, : sizes[i]] = ids, places
    return tokens, suffixes, sizes


def search(index: Index, text: Array, length: Array, min_span: int = 2) -> Matches:
    """Find the longest end of each text, of `min_span` to M tokens, that occurs in the corpus.

    All spans are searched in parallel, in log2 n steps that read 2 M tokens of each shard per span. If the shards are
    distributed over devices, each device searches its own. Only counts and continuations are exchanged.

    Args:
      text: int32[B, M], the last M tokens of each row, the newest last. length: int32[B], number of valid tokens.
    """
    max_span = text.shape[1]
    spans = np.arange(max_span, min_span - 1, -1)
    queries = jnp.stack(
        [jnp.roll(text, span, 1) for span in spans], 1
    )  # [B, K, M]; only the first `span` tokens are compared

    def bound(tokens, suffixes, size, query, span, past):
        """Return the first rank whose suffix is not below the query and, with `past`, does not begin with it."""
        offset = jnp.arange(max_span)

        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            place = suffixes[middle] + offset
            token = tokens[jnp.minimum(place, tokens.shape[0] - 1)].astype(jnp.int32)
            differs = (token != query) & (offset < span)
            at = jnp.argmax(differs)
            below = jnp.where(jnp.any(differs), token[at] < query[at], past)
            go_right = below & (low < high)
            return jnp.where(go_right, middle + 1, low), jnp.where(go_right, high, middle)

        return jax.lax.fori_loop(0, tokens.shape[0].bit_length(), halve, (jnp.zeros_like(size), size))[0]

    bounds = jax.vmap(bound, (None, None, None, None, None, 0))  # both ends
    bounds = jax.vmap(bounds, (None, None, None, 0, 0, None))  # spans
    bounds = jax.vmap(bounds, (None, None, None, 0, None, None))  # rows
    bounds = jax.vmap(bounds, (0, 0, 0, None, None, None), 2)  # shards
    ranks = bounds(index.tokens, index.suffixes, index.sizes, queries, jnp.asarray(spans), jnp.array([False, True]))
    first, count = ranks[..., 0], ranks[..., 1] - ranks[..., 0]  # [B, K, S]
    valid_length = jnp.sum(
        jnp.cumprod((text < index.vocab_size)[:, ::-1], 1), 1
    )  # ids outside of the vocabulary match no token
    count = jnp.where((spans <= jnp.minimum(length, valid_length)[:, None])[:, :, None], count, 0)
    hit = jnp.any(count > 0, 2)
    best = jnp.argmax(hit, 1)  # the longest
    take = lambda x: take_along(x, best[:, None, None], 1)[:, 0]
    return Matches(jnp.where(jnp.any(hit, 1), jnp.asarray(spans)[best], 0), take(first), take(count))


def continuations(index: Index, matches: Matches, num_paths: int, length: int) -> Array:
    """Return the tokens after each match: int32[B, num_paths, length], -1 from a document's end on.

    All occurrences are returned if they are at most `num_paths`, followed by rows of -1. Otherwise `num_paths` of them
    are chosen at even distances in the order of the shards and their suffix arrays. So continuations appear in
    proportion to their frequency.
    """
    total = jnp.sum(matches.counts, 1)[:, None]
    earlier = jnp.cumsum(matches.counts, 1) - matches.counts  # [B, S], occurrences in earlier shards
    path = jnp.arange(num_paths)
    spaced = path * (total // num_paths) + path * (total % num_paths) // num_paths  # j * total // num_paths overflows
    rank = jnp.where(total <= num_paths, path, spaced)  # [B, R]

    def gather_shard(tokens, suffixes, first, earlier, count):
        local = rank - earlier[:, None]
        in_shard = (local >= 0) & (local < count[:, None])
        start = suffixes[jnp.where(in_shard, first[:, None] + local, 0)] + matches.span[:, None]
        place = jnp.minimum(start[:, :, None] + jnp.arange(length), tokens.shape[0] - 1)
        return jnp.where(in_shard[:, :, None], tokens[place].astype(jnp.int32) + 1, 0)

    by_shard = jax.vmap(gather_shard, (0, 0, 1, 1, 1))(
        index.tokens, index.suffixes, matches.first, earlier, matches.counts
    )
    paths = jnp.sum(by_shard, 0) - 1  # each path belongs to one shard
    return jnp.where(jnp.cumsum(paths == index.vocab_size, 2) > 0, -1, paths)
