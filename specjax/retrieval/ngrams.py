"""Tables of n-grams as fixed-size arrays: the memory of drafters without a model.

A table stores n-grams with a value each. The first tokens of an n-gram, its *prefix*, select one of H buckets by a
hash. A bucket has A places. N-grams are compared token by token, so a hash collision costs a place and never gives a
wrong result. In a full bucket the place that was written longest ago is replaced.

The table has two uses. In STAND the prefix is the complete n-gram, and the value is its statistics. In Lookahead and
ADED the prefix is a part of the n-gram, and the A places are the continuations of that prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import gather_at, take_along
from specjax.errors import UsageError
from specjax.types import Array, PyTree

CHUNK = 32
"""Entries of a text per write. The work of a write grows with the square of this number."""
FREE = -2
"""Content of free places. It is neither a token nor -1, which marks a missing token."""


class Table(NamedTuple):
    """N-gram tables, one per row of the batch. Memory: 4 H A (n + 1) bytes and the values, per row.

    The n-grams of a bucket share one array row, because a TPU pads the last two axes to tiles of 8 x 128.
    Otherwise a pool of 7 places for 5 tokens would take 29 times its size.
    """

    grams: Array  # int32[B, H, A n], the places in order; FREE in free places
    ages: Array  # int32[B, H, A], clock at the last write; 0: free
    values: PyTree  # [B, H, A, ...]
    clock: Array  # int32[B], number of n-grams passed to `write` so far


class Lookup(NamedTuple):
    """Contents of the bucket of each of M n-grams or prefixes."""

    bucket: Array  # int32[B, M]
    hit: Array  # bool[B, M, A], n-grams of the bucket that match
    grams: Array  # int32[B, M, A, n]
    ages: Array  # int32[B, M, A]
    values: PyTree  # [B, M, A, ...]


def check_buckets(buckets: int) -> None:
    """Raise UsageError unless `buckets` is a power of two of at least 2."""
    if buckets < 2 or buckets & (buckets - 1):
        raise UsageError(f"buckets must be a power of two of at least 2, not {buckets}")


def empty(batch: int, buckets: int, ways: int, size: int, value: PyTree = ()) -> Table:
    """Return an empty table of n-grams of `size` tokens. `value` is a pytree of arrays, the value of a free place."""
    fill = lambda x: jnp.broadcast_to(x, (batch, buckets, ways, *np.shape(x)))
    return Table(
        jnp.full((batch, buckets, ways * size), FREE, jnp.int32),
        jnp.zeros((batch, buckets, ways), jnp.int32),
        jax.tree.map(fill, value),
        jnp.zeros((batch,), jnp.int32),
    )


def bucket(prefix, buckets: int):
    """Return the buckets int32[...] of prefixes int32[..., h], numpy or jax.

    The hash is multiplicative hashing of a polynomial, modulo 2^32.
    """
    total = prefix[..., 0].astype(np.uint32)
    for j in range(1, prefix.shape[-1]):
        total = total * np.uint32(0x01000193) + prefix[..., j].astype(np.uint32)
    shift = 33 - buckets.bit_length()
    return ((total * np.uint32(0x9E3779B1)) >> np.uint32(shift)).astype(np.int32)


def find(table: Table, tokens: Array, *, prefix: int | None = None) -> Lookup:
    """Look up n-grams or their prefixes int32[B, M, h] in their buckets. A table of one row serves all rows.

    Args:
      prefix: number of tokens that selected the bucket when the n-grams were written; None: all h.
    """
    rows, buckets = table.ages.shape[:2]
    row = np.arange(rows)[:, None]
    index = bucket(tokens[..., :prefix], buckets)
    ages = gather_at(table.ages, row, index)
    grams = gather_at(table.grams, row, index).reshape(*ages.shape, -1)
    hit = jnp.all(grams[..., : tokens.shape[-1]] == tokens[:, :, None], -1)
    return Lookup(index, hit, grams, ages, jax.tree.map(lambda x: gather_at(x, row, index), table.values))


def write(table: Table, grams: Array, values: PyTree, mask: Array, *, prefix: int) -> Table:
    """Write M n-grams, each to its place or to the place of its bucket that was written longest ago.

    A scatter with equal indices has no defined result, so the n-gram to write is selected first. Among equal n-grams
    the last is written. If new n-grams overfill a bucket, the last ones that fit are written.

    Args:
      grams: int32[B, M, n]. values: [B, M, ...], new values. mask: bool[B, M], n-grams to write.
      prefix: number of tokens that select the bucket.
    """
    batch, buckets, ways = table.ages.shape
    m = grams.shape[1]
    index, hit, _, old_ages, _ = find(table, grams, prefix=prefix)  # [B, M, A]
    is_later = jnp.arange(m)[:, None] < jnp.arange(m)
    is_written = mask & ~jnp.any(equal(grams) & mask[:, None, :] & is_later, 2)
    shares_bucket = (index[:, :, None] == index[:, None, :]) & is_written[
        :, None, :
    ]  # [B, M, M]: writer j goes to i's bucket
    is_stored = jnp.any(hit, 2)
    rank = jnp.sum(
        shares_bucket & ~is_stored[:, None, :] & is_later, 2
    )  # rank among the new n-grams of a bucket, counted from the last
    # Places of this bucket that keep their n-gram, [B, M, A]. It is a matrix product because M x M x A would be large.
    is_kept = jnp.einsum("bij,bja->bia", shares_bucket.astype(jnp.float32), hit.astype(jnp.float32)) > 0
    oldest = jnp.argsort(jnp.where(is_kept, np.iinfo(np.int32).max, old_ages), axis=2, stable=True)
    fits = rank < ways - jnp.sum(is_kept, 2)
    new = take_along(oldest, jnp.minimum(rank, ways - 1)[..., None], 2)[..., 0]
    way = jnp.where(is_stored, jnp.argmax(hit, 2), new)
    index = jnp.where(is_written & (is_stored | fits), index, buckets)  # index after the last bucket: dropped
    row = np.arange(batch)[:, None]
    put = lambda old, value: old.at[row, index, way].set(value, mode="drop")
    ages = put(table.ages, table.clock[:, None] + 1 + jnp.arange(m))
    token = way[:, :, None] * grams.shape[2] + np.arange(grams.shape[2])
    grams = table.grams.at[row[..., None], index[..., None], token].set(grams, mode="drop")
    return Table(grams, ages, jax.tree.map(put, table.values, values), table.clock + m)


def equal(grams: Array) -> Array:
    """Return bool[B, M, M]: True where two of the n-grams int32[B, M, n] are equal."""
    return jnp.all(grams[:, :, None] == grams[:, None], -1)


def merge(table: Table, rows: Table, combine: Callable[[PyTree, PyTree], PyTree]) -> Table:
    """Add the rows of another table with the same number of buckets to a table of one row, in order.

    The value of an n-gram in both is `combine(value, value of the row)`, of shapes [H, A, ...]. If a bucket overflows,
    the n-grams written last stay. N-grams of a later row count as written later.
    """
    ways = table.ages.shape[2]

    def add(one: Table, row: Table) -> tuple[Table, None]:
        grams_a, grams_b = (x.grams.reshape(*x.ages.shape, -1) for x in (one, row))  # [H, A, n]
        same = jnp.all(grams_a[:, :, None] == grams_b[:, None], -1)  # [H, A, A]
        same &= (one.ages > 0)[:, :, None] & (row.ages > 0)[:, None]
        in_both, match = jnp.any(same, 2), jnp.argmax(same, 2)
        at_match = lambda x: take_along(x, expand(match, x), 1)
        combined = combine(one.values, jax.tree.map(at_match, row.values))
        values = jax.tree.map(lambda new, old: jnp.where(expand(in_both, old), new, old), combined, one.values)
        later = jnp.where(row.ages > 0, row.ages + one.clock, 0)
        ages = jnp.where(in_both, at_match(later), one.ages)
        joined = jnp.concatenate([ages, jnp.where(jnp.any(same, 1), 0, later)], 1)  # [H, 2 A]
        ages, place = jax.lax.top_k(joined, ways)
        join = lambda x, y: take_along(jnp.concatenate([x, y], 1), expand(place, x), 1)
        values = jax.tree.map(join, values, row.values)
        grams = jnp.where(ages[:, :, None] > 0, join(grams_a, grams_b), FREE)
        return Table(grams.reshape(one.grams.shape), ages, values, one.clock + row.clock), None

    merged, _ = jax.lax.scan(add, jax.tree.map(lambda x: x[0], table), rows)
    # Ages grow with every call and would overflow int32 after some thousand calls.
    halved = lambda x: jnp.where(merged.clock >= 1 << 30, (x + 1) >> 1, x)
    return jax.tree.map(lambda x: x[None], merged._replace(ages=halved(merged.ages), clock=halved(merged.clock)))


def expand(x: Array, like: Array) -> Array:
    """Append axes to `x` until it has as many dimensions as `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def windows(tokens: Array, length: Array, start: Array, count: int, size: int) -> tuple[Array, Array]:
    """Return the n-grams of `tokens` int32[B, L] that begin at start[b] ... start[b] + count - 1.

    Returns: int32[B, count, size], and bool[B, count]: the n-grams within the first length[b] tokens.
    """
    begin = start[:, None] + jnp.arange(count)
    index = begin[:, :, None] + jnp.arange(size)
    flat = jnp.clip(index, 0, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    grams = take_along(tokens, flat, 1).reshape(index.shape)
    return grams, (begin >= 0) & (begin + size <= length[:, None])


def learn_text(
    table: Table, tokens: Array, length: Array, size: int, learn: Callable[[Table, Array, Array], Table]
) -> Table:
    """Apply `learn(table, grams[B, M, size], mask[B, M])` to all n-grams of the first length[b] tokens, in chunks."""

    def body(carry):
        start, table = carry
        grams, is_real = windows(tokens, length, jnp.full_like(length, start), CHUNK, size)
        return start + CHUNK, learn(table, grams, is_real)

    longest = jnp.max(length)
    return jax.lax.while_loop(lambda carry: carry[0] + size <= longest, body, (jnp.int32(0), table))[1]


def scan_chunks(learn: Callable[..., PyTree], state: PyTree, *arrays: PyTree) -> PyTree:
    """Apply `learn(state, *arrays)` to arrays [B, M, ...], CHUNK of the M at a time.

    The last chunk is padded with zeros.
    """
    batch, m = jax.tree.leaves(arrays)[0].shape[:2]
    if m <= CHUNK:
        return learn(state, *arrays)
    chunks = -(-m // CHUNK)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - m), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch, chunks, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    return jax.lax.scan(lambda state, part: (learn(state, *part), None), state, jax.tree.map(split, arrays))[0]
