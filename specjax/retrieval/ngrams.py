"""Tables of n-grams as fixed arrays: what drafters without a model remember.

A table holds n-grams with a value each. The first tokens of an n-gram, its *prefix*, choose one of H buckets by a hash;
a bucket has A places. Which n-gram lies in a place is compared token by token, so a collision of hashes costs a place,
never a wrong answer. A full bucket gives away the place that was written longest ago.

Two uses: prefix = the whole n-gram, and the value is what is known about it (STAND); prefix = a part of it, and the A
places are what followed that prefix (Lookahead, ADED).
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
"""Entries of a text that are learnt at once; the work of a write grows with the square of their n-grams."""
FREE = -2
"""In free places: neither a token nor -1, which stands for none."""


class Table(NamedTuple):
    """One table per row of the batch: 4 H A (n + 1) bytes and the values, each.

    The n-grams of a bucket lie in one row: a TPU gives the last two axes of an array tiles of 8 x 128, and would hold a
    pool of 7 places for 5 tokens in 29 times its size.
    """

    grams: Array  # int32[B, H, A n], place by place; FREE in a free one
    ages: Array  # int32[B, H, A], the clock at the last write; 0: free
    values: PyTree  # [B, H, A, ...]
    clock: Array  # int32[B], n-grams offered so far


class Found(NamedTuple):
    """What lies in the bucket of each of M n-grams or beginnings."""

    bucket: Array  # int32[B, M]
    hit: Array  # bool[B, M, A], which of its n-grams begin so
    grams: Array  # int32[B, M, A, n]
    ages: Array  # int32[B, M, A]
    values: PyTree  # [B, M, A, ...]


def check_buckets(buckets: int) -> None:
    """Raises: UsageError unless `buckets` is a power of two of at least 2."""
    if buckets < 2 or buckets & (buckets - 1):
        raise UsageError(f"buckets must be a power of two of at least 2, not {buckets}")


def empty(batch: int, buckets: int, ways: int, size: int, value: PyTree = ()) -> Table:
    """A table of n-grams of `size` tokens; `value`: a pytree of arrays, that of a free place."""
    fill = lambda x: jnp.broadcast_to(x, (batch, buckets, ways, *np.shape(x)))
    return Table(
        jnp.full((batch, buckets, ways * size), FREE, jnp.int32),
        jnp.zeros((batch, buckets, ways), jnp.int32),
        jax.tree.map(fill, value),
        jnp.zeros((batch,), jnp.int32),
    )


def bucket(prefix, buckets: int):
    """int32[...] of prefixes int32[..., h], numpy or jax: multiplicative hashing of a polynomial, modulo 2^32."""
    total = prefix[..., 0].astype(np.uint32)
    for j in range(1, prefix.shape[-1]):
        total = total * np.uint32(0x01000193) + prefix[..., j].astype(np.uint32)
    shift = 33 - buckets.bit_length()
    return ((total * np.uint32(0x9E3779B1)) >> np.uint32(shift)).astype(np.int32)


def find(table: Table, tokens: Array, *, prefix: int | None = None) -> Found:
    """The buckets of n-grams or their beginnings int32[B, M, h]. A table of one row serves all rows.

    prefix: how many tokens chose the bucket when the n-grams were written; None: all h.
    """
    rows, buckets = table.ages.shape[:2]
    row = np.arange(rows)[:, None]
    here = bucket(tokens[..., :prefix], buckets)
    ages = gather_at(table.ages, row, here)
    grams = gather_at(table.grams, row, here).reshape(*ages.shape, -1)
    hit = jnp.all(grams[..., : tokens.shape[-1]] == tokens[:, :, None], -1)
    return Found(here, hit, grams, ages, jax.tree.map(lambda x: gather_at(x, row, here), table.values))


def write(table: Table, grams: Array, values: PyTree, wanted: Array, *, prefix: int) -> Table:
    """Write M n-grams, each to its own place or to the one of its bucket that was written longest ago.

    Scatters with equal indices have no defined winner, so it is chosen before: of equal n-grams the last, and of new
    ones that crowd a bucket the last that fit.

    Args:
      grams: int32[B, M, n]. values: [B, M, ...], what is to stand there. wanted: bool[B, M]. prefix: its length h.
    """
    batch, buckets, ways = table.ages.shape
    m = grams.shape[1]
    here, hit, _, old_ages, _ = find(table, grams, prefix=prefix)  # [B, M, A]
    after = jnp.arange(m)[:, None] < jnp.arange(m)
    wins = wanted & ~jnp.any(equal(grams) & wanted[:, None, :] & after, 2)
    shares = (here[:, :, None] == here[:, None, :]) & wins[:, None, :]  # [B, M, M]: writer j goes to i's bucket
    known = jnp.any(hit, 2)
    rank = jnp.sum(shares & ~known[:, None, :] & after, 2)  # among the new ones of a bucket, from the last
    # Places of this bucket that keep their n-gram, [B, M, A]; a matrix product, for M x M x A would be large.
    kept = jnp.einsum("bij,bja->bia", shares.astype(jnp.float32), hit.astype(jnp.float32)) > 0
    oldest = jnp.argsort(jnp.where(kept, np.iinfo(np.int32).max, old_ages), axis=2, stable=True)
    fits = rank < ways - jnp.sum(kept, 2)
    new = take_along(oldest, jnp.minimum(rank, ways - 1)[..., None], 2)[..., 0]
    way = jnp.where(known, jnp.argmax(hit, 2), new)
    here = jnp.where(wins & (known | fits), here, buckets)  # beyond the last bucket: dropped
    row = np.arange(batch)[:, None]
    put = lambda old, value: old.at[row, here, way].set(value, mode="drop")
    ages = put(table.ages, table.clock[:, None] + 1 + jnp.arange(m))
    token = way[:, :, None] * grams.shape[2] + np.arange(grams.shape[2])
    grams = table.grams.at[row[..., None], here[..., None], token].set(grams, mode="drop")
    return Table(grams, ages, jax.tree.map(put, table.values, values), table.clock + m)


def equal(grams: Array) -> Array:
    """bool[B, M, M]: which of the n-grams int32[B, M, n] are equal."""
    return jnp.all(grams[:, :, None] == grams[:, None], -1)


def merge(table: Table, rows: Table, combine: Callable[[PyTree, PyTree], PyTree]) -> Table:
    """Add the rows of another table with equal buckets to a table of one row, one after another.

    An n-gram that both hold gets `combine(value, value of the row)`, of shapes [H, A, ...]. Where more n-grams meet in
    a bucket than it has places, those written last stay; those of later rows count as later.
    """
    ways = table.ages.shape[2]

    def add(one: Table, row: Table) -> tuple[Table, None]:
        mine, theirs = (x.grams.reshape(*x.ages.shape, -1) for x in (one, row))  # [H, A, n]
        same = jnp.all(mine[:, :, None] == theirs[:, None], -1)  # [H, A, A]
        same &= (one.ages > 0)[:, :, None] & (row.ages > 0)[:, None]
        both, match = jnp.any(same, 2), jnp.argmax(same, 2)
        at_match = lambda x: take_along(x, expand(match, x), 1)
        combined = combine(one.values, jax.tree.map(at_match, row.values))
        values = jax.tree.map(lambda new, old: jnp.where(expand(both, old), new, old), combined, one.values)
        later = jnp.where(row.ages > 0, row.ages + one.clock, 0)
        ages = jnp.where(both, at_match(later), one.ages)
        joined = jnp.concatenate([ages, jnp.where(jnp.any(same, 1), 0, later)], 1)  # [H, 2 A]
        ages, kept = jax.lax.top_k(joined, ways)
        join = lambda x, y: take_along(jnp.concatenate([x, y], 1), expand(kept, x), 1)
        values = jax.tree.map(join, values, row.values)
        grams = jnp.where(ages[:, :, None] > 0, join(mine, theirs), FREE)
        return Table(grams.reshape(one.grams.shape), ages, values, one.clock + row.clock), None

    merged, _ = jax.lax.scan(add, jax.tree.map(lambda x: x[0], table), rows)
    # Ages count on from call to call, and would leave int32 after some thousand calls.
    halved = lambda x: jnp.where(merged.clock >= 1 << 30, (x + 1) >> 1, x)
    return jax.tree.map(lambda x: x[None], merged._replace(ages=halved(merged.ages), clock=halved(merged.clock)))


def expand(x: Array, like: Array) -> Array:
    """`x` with as many dimensions as `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def windows(tokens: Array, length: Array, start: Array, count: int, size: int) -> tuple[Array, Array]:
    """The n-grams of `tokens` int32[B, L] that begin at start[b] ... start[b] + count - 1.

    Returns: int32[B, count, size], and which of them lie within the first length[b] tokens, bool[B, count].
    """
    begin = start[:, None] + jnp.arange(count)
    index = begin[:, :, None] + jnp.arange(size)
    flat = jnp.clip(index, 0, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    grams = take_along(tokens, flat, 1).reshape(index.shape)
    return grams, (begin >= 0) & (begin + size <= length[:, None])


def learn_text(
    table: Table, tokens: Array, length: Array, size: int, learn: Callable[[Table, Array, Array], Table]
) -> Table:
    """`learn(table, grams[B, M, size], wanted[B, M])` for all n-grams of the first length[b] tokens, in chunks."""

    def body(carry):
        start, table = carry
        grams, inside = windows(tokens, length, jnp.full_like(length, start), CHUNK, size)
        return start + CHUNK, learn(table, grams, inside)

    longest = jnp.max(length)
    return jax.lax.while_loop(lambda carry: carry[0] + size <= longest, body, (jnp.int32(0), table))[1]


def by_chunks(learn: Callable[..., PyTree], state: PyTree, *arrays: PyTree) -> PyTree:
    """`learn(state, *arrays)` for arrays [B, M, ...], CHUNK of the M at a time; the last chunk is padded with zeros."""
    batch, m = jax.tree.leaves(arrays)[0].shape[:2]
    if m <= CHUNK:
        return learn(state, *arrays)
    chunks = -(-m // CHUNK)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - m), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch, chunks, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    return jax.lax.scan(lambda state, part: (learn(state, *part), None), state, jax.tree.map(split, arrays))[0]
