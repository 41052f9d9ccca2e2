"""A table of next-token distributions after contexts of a few tokens: the likeliest tokens, averaged over occurrences.

Contexts of all ORDERS share one table of n-grams.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specjax.arrays.indexing import gather_at
from specjax.pallas_kernels.gumbel_topk import likeliest
from specjax.retrieval import ngrams
from specjax.types import Array, PyTree

ORDERS = 4, 3, 2  # context lengths; the first one with an entry is used
MAX_TOKENS = 10  # maximum tokens of an entry
WAYS = 4  # places of a bucket
LONGEST = max(ORDERS)
UNUSED = np.arange(LONGEST) < LONGEST - np.array(ORDERS)[:, None]
"""bool[3, 4], the tokens of a context that each of ORDERS does not use."""
LEFT_OUT = np.iinfo(np.int32).max  # placeholder for unused tokens; not a token


class NextTokens(NamedTuple):
    """The likeliest tokens after a context, best first."""

    tokens: Array  # int32[..., k]; -1: none
    probs: Array  # float32[..., k]
    occurrences: Array  # int32[...], number of distributions averaged; 0: no entry


def empty(batch: int, buckets: int, size: int) -> ngrams.Table:
    """Return a table without contexts, for entries of `size` tokens."""
    none = NextTokens(jnp.full((size,), -1, jnp.int32), jnp.zeros((size,)), jnp.int32(0))
    return ngrams.empty(batch, buckets, WAYS, LONGEST, none)


def make_entries(logits: Array, mask: Array, size: int) -> NextTokens:
    """Return the likeliest tokens of logits [B, M, V] and their probabilities, with 1 occurrence where `mask`."""
    tokens, log_p = likeliest(logits, size)
    return NextTokens(tokens, jnp.exp(log_p), mask.astype(jnp.int32))


def add_entries(table: ngrams.Table, contexts: Array, new: NextTokens) -> ngrams.Table:
    """Average entries [B, M], with 0 or 1 occurrences, into those of their contexts int32[B, M, 4], of every order."""
    grams = _by_order(jnp.where(new.occurrences[:, :, None] > 0, contexts, -1))
    mask = jnp.all(grams >= 0, -1)
    tokens, probs = (jnp.repeat(x, len(ORDERS), 1) for x in new[:2])
    new_entries = NextTokens(tokens, probs, jnp.int32(1))
    lookup = ngrams.find(table, grams)
    place = np.arange(len(grams))[:, None], lookup.bucket, jnp.argmax(lookup.hit, 2)
    stored = _read(table.values, place, jnp.any(lookup.hit, 2))
    return ngrams.write(table, grams, mix(stored, new_entries), mask, prefix=LONGEST)


def find(params: PyTree, table: ngrams.Table, contexts: Array) -> NextTokens:
    """Return the entries [B, M] of the longest stored contexts; 0 occurrences if no context is stored."""
    grams, tables = _by_order(contexts), [params, table] if params else [table]
    places = WAYS * table.ages.shape[1]
    # One number per hit encodes its context length and its place, and is larger for longer contexts. This saves TPU
    # operations.
    number = places * np.arange(len(ORDERS), 0, -1)[:, None] + np.arange(WAYS)
    number = np.tile(number, (contexts.shape[1], 1))  # [3 M, A]

    def longest(table: ngrams.Table) -> Array:
        lookup = ngrams.find(table, grams)
        hits = jnp.where(lookup.hit, number + WAYS * lookup.bucket[:, :, None], 0)
        return jnp.max(hits.reshape(*contexts.shape[:2], -1), 2)

    best = [longest(table) for table in tables]  # [B, M]; 0: none
    overall = functools.reduce(jnp.maximum, best) // places  # 1 to 3, order of the longest context in any table

    def entry(table: ngrams.Table, best: Array) -> NextTokens:
        place = best % places
        row = np.arange(len(table.ages))[:, None]
        return _read(table.values, (row, place // WAYS, place % WAYS), (best > 0) & (best // places == overall))

    return functools.reduce(mix, map(entry, tables, best))


def merge(table: ngrams.Table, rows: ngrams.Table) -> ngrams.Table:
    """Return a table of one row with the contexts of all rows of another table added."""
    return ngrams.merge(table, rows, mix)


def mix(a: NextTokens, b: NextTokens) -> NextTokens:
    """Return the mean of two entries, weighted by their counts, over the tokens of both.

    The k likeliest tokens stay; ties go to the lower ids. Tokens of probability 0 become -1.
    """
    total = a.occurrences + b.occurrences
    share = lambda x: (x.occurrences / jnp.maximum(total, 1))[..., None] * x.probs
    p_a, p_b = share(a), share(b)
    same = (a.tokens[..., :, None] == b.tokens[..., None, :]) & (a.tokens >= 0)[..., :, None]
    p_a += jnp.sum(jnp.where(same, p_b[..., None, :], 0.0), -1)
    unshared = jnp.where(jnp.any(same, -2), -1, b.tokens)
    tokens = jnp.concatenate([a.tokens, unshared], -1)
    probs = jnp.where(tokens >= 0, jnp.concatenate([p_a, p_b], -1), -1.0)
    order = -probs, jnp.where(tokens >= 0, tokens, np.iinfo(np.int32).max)
    negative, tokens = (x[..., : a.tokens.shape[-1]] for x in jax.lax.sort(order, num_keys=2))
    valid = negative < 0
    return NextTokens(jnp.where(valid, tokens, -1), jnp.where(valid, -negative, 0.0), total)


def _by_order(contexts: Array) -> Array:
    """Return int32[B, 3 M, 4]: the n-grams of each context int32[B, M, 4], one for each of ORDERS."""
    grams = jnp.where(UNUSED, LEFT_OUT, contexts[:, :, None])
    return grams.reshape(len(contexts), -1, contexts.shape[-1])


def _read(values: NextTokens, place: tuple[ArrayLike, ...], valid: Array) -> NextTokens:
    """Return the entries at places int32[B, M], or empty entries where `valid` bool[B, M] is False."""
    entry = jax.tree.map(lambda x: gather_at(x, *place), values)
    return NextTokens(
        jnp.where(valid[..., None], entry.tokens, -1), entry.probs, jnp.where(valid, entry.occurrences, 0)
    )
