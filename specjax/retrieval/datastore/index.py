"""A datastore on the device: the search of `Datastore.search` and `continuations` for a batch, inside `jit`."""

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
"""Tokens and suffixes of each: `Datastore.shards`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Index:
    """S shards of n places each, filled up with END. 6 bytes per place, 8 above 65,535 ids."""

    tokens: Array  # uint16[S, n] or int32[S, n]
    suffixes: Array  # int32[S, n]
    sizes: Array  # int32[S]
    vocab_size: int = field(metadata={"static": True})  # END


class Matches(NamedTuple):
    """`store.Match` for each row."""

    span: Array  # int32[B]; 0: none
    first: Array  # int32[B, S]
    counts: Array  # int32[B, S]


def to_device(shards: Shards, vocab_size: int, mesh: Mesh | None = None) -> Index:
    """Shards on the device; with a mesh, the target's, spread over all its axes but "data".

    Over P devices a device holds ceil(S / P) shards, as long as the longest; those along "data", where other rows are
    decoded, hold the same ones, as they do of the weights. The host reads the shards of one device at a time, and those
    of its own devices only.
    """
    if mesh is None:
        tokens, suffixes, sizes = jax.device_put(_arrays(shards, vocab_size, 0, len(shards)))
        return Index(tokens, suffixes, sizes, vocab_size)
    axes = tuple(axis for axis in mesh.axis_names if axis != "data")
    parts = math.prod(mesh.shape[axis] for axis in axes)
    each = -(-len(shards) // parts)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    holders: dict[int, list[jax.Device]] = {}  # first shard -> this host's devices that hold it
    for device, (rows,) in sharding.devices_indices_map((each * parts,)).items():
        if device in sharding.addressable_devices:
            holders.setdefault(rows.start or 0, []).append(device)
    placed = []
    for first, devices in holders.items():
        arrays = _arrays(shards, vocab_size, first, each)
        placed += [jax.device_put(arrays, device) for device in devices]
    whole = lambda *pieces: jax.make_array_from_single_device_arrays(
        (each * parts, *pieces[0].shape[1:]), sharding, list(pieces)
    )
    tokens, suffixes, sizes = map(whole, *placed)
    return Index(tokens, suffixes, sizes, vocab_size)


def _arrays(shards: Shards, vocab_size: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, suffixes and sizes of `count` shards from `first` on, empty ones behind the last."""
    longest = max(len(tokens) for tokens, _ in shards)
    tokens = np.full((count, longest), vocab_size, np.uint16 if vocab_size < 1 << 16 else np.int32)
    suffixes, sizes = np.zeros((count, longest), np.int32), np.zeros(count, np.int32)
    for i, (ids, places) in enumerate(shards[first : first + count]):
        sizes[i] = len(ids)
        tokens[i, : sizes[i]], suffixes[i, : sizes[i]] = ids, places
    return tokens, suffixes, sizes


def search(index: Index, text: Array, length: Array, min_span: int = 2) -> Matches:
    """The longest end of each text, of `min_span` to M tokens, that occurs in the corpus.

    All spans are searched at once, in log2 n steps that read 2 M tokens of each shard per span. Where the shards are
    spread over devices each searches its own; no more than counts and the continuations found travel between them.

    Args: text: int32[B, M], the last M tokens of each row, the newest last. length: int32[B], how many are real.
    """
    longest = text.shape[1]
    spans = np.arange(longest, min_span - 1, -1)
    queries = jnp.stack([jnp.roll(text, span, 1) for span in spans], 1)  # [B, K, M], the first `span` tokens count

    def bound(tokens, suffixes, size, query, span, past):
        """The first rank whose suffix is not below the query (`past`: and does not begin with it)."""
        offset = jnp.arange(longest)

        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            place = suffixes[middle] + offset
            token = tokens[jnp.minimum(place, tokens.shape[0] - 1)].astype(jnp.int32)
            differs = (token != query) & (offset < span)
            at = jnp.argmax(differs)
            below = jnp.where(jnp.any(differs), token[at] < query[at], past)
            right = below & (low < high)
            return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

        return jax.lax.fori_loop(0, tokens.shape[0].bit_length(), halve, (jnp.zeros_like(size), size))[0]

    bounds = jax.vmap(bound, (None, None, None, None, None, 0))  # both ends
    bounds = jax.vmap(bounds, (None, None, None, 0, 0, None))  # spans
    bounds = jax.vmap(bounds, (None, None, None, 0, None, None))  # rows
    bounds = jax.vmap(bounds, (0, 0, 0, None, None, None), 2)  # shards
    found = bounds(index.tokens, index.suffixes, index.sizes, queries, jnp.asarray(spans), jnp.array([False, True]))
    first, count = found[..., 0], found[..., 1] - found[..., 0]  # [B, K, S]
    known = jnp.sum(jnp.cumprod((text < index.vocab_size)[:, ::-1], 1), 1)  # ids beyond the vocabulary match nothing
    count = jnp.where((spans <= jnp.minimum(length, known)[:, None])[:, :, None], count, 0)
    hit = jnp.any(count > 0, 2)
    best = jnp.argmax(hit, 1)  # the longest
    take = lambda x: take_along(x, best[:, None, None], 1)[:, 0]
    return Matches(jnp.where(jnp.any(hit, 1), jnp.asarray(spans)[best], 0), take(first), take(count))


def continuations(index: Index, matches: Matches, num_paths: int, length: int) -> Array:
    """What follows each match: int32[B, num_paths, length], -1 behind a document's end.

    All occurrences if there are at most `num_paths` (then rows of -1), else so many, evenly spread over them in the
    order of the shards and their suffix arrays: continuations come in proportion to how often they occur.
    """
    total = jnp.sum(matches.counts, 1)[:, None]
    before = jnp.cumsum(matches.counts, 1) - matches.counts  # [B, S], occurrences in earlier shards
    j = jnp.arange(num_paths)
    spread = j * (total // num_paths) + j * (total % num_paths) // num_paths  # j * total // num_paths overflows
    rank = jnp.where(total <= num_paths, j, spread)  # [B, R]

    def of_shard(tokens, suffixes, first, before, count):
        local = rank - before[:, None]
        mine = (local >= 0) & (local < count[:, None])
        start = suffixes[jnp.where(mine, first[:, None] + local, 0)] + matches.span[:, None]
        place = jnp.minimum(start[:, :, None] + jnp.arange(length), tokens.shape[0] - 1)
        return jnp.where(mine[:, :, None], tokens[place].astype(jnp.int32) + 1, 0)

    by_shard = jax.vmap(of_shard, (0, 0, 1, 1, 1))(index.tokens, index.suffixes, matches.first, before, matches.counts)
    paths = jnp.sum(by_shard, 0) - 1  # each belongs to one shard
    return jnp.where(jnp.cumsum(paths == index.vocab_size, 2) > 0, -1, paths)
