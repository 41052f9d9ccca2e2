"""A table of what a model thought after contexts of a few tokens: the likeliest next tokens, by the mean of all times.

Contexts of all ORDERS stand in one table of n-grams.
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

ORDERS = 4, 3, 2  # lengths of contexts, the first that is found counts
KEPT = 10  # tokens of an entry
WAYS = 4  # places of a bucket
LONGEST = max(ORDERS)
UNUSED = np.arange(LONGEST) < LONGEST - np.array(ORDERS)[:, None]
"""bool[3, 4]: the tokens of a context that each of ORDERS leaves out."""
LEFT_OUT = np.iinfo(np.int32).max  # stands for them: no token


class Entry(NamedTuple):
    """What followed a context, the likeliest first."""

    tokens: Array  # int32[..., k]; -1: none
    probs: Array  # float32[..., k]
    seen: Array  # int32[...], how many distributions it is the mean of; 0: none


def empty(batch: int, buckets: int, kept: int) -> ngrams.Table:
    """A table that knows no context; `kept`: tokens of an entry."""
    none = Entry(jnp.full((kept,), -1, jnp.int32), jnp.zeros((kept,)), jnp.int32(0))
    return ngrams.empty(batch, buckets, WAYS, LONGEST, none)


def entries(logits: Array, wanted: Array, kept: int) -> Entry:
    """Logits float32[B, M, V] as entries: the likeliest tokens with their probabilities, seen once where `wanted`."""
    tokens, log_p = likeliest(logits, kept)
    return Entry(tokens, jnp.exp(log_p), wanted.astype(jnp.int32))


def learn(table: ngrams.Table, contexts: Array, new: Entry) -> ngrams.Table:
    """Mix entries [B, M], seen once or not at all, into those of their contexts int32[B, M, 4], of every order."""
    grams = _by_order(jnp.where(new.seen[:, :, None] > 0, contexts, -1))
    wanted = jnp.all(grams >= 0, -1)
    tokens, probs = (jnp.repeat(x, len(ORDERS), 1) for x in new[:2])
    once = Entry(tokens, probs, jnp.int32(1))
    found = ngrams.find(table, grams)
    place = np.arange(len(grams))[:, None], found.bucket, jnp.argmax(found.hit, 2)
    known = _standing(table.values, place, jnp.any(found.hit, 2))
    return ngrams.write(table, grams, mix(known, once), wanted, prefix=LONGEST)


def find(params: PyTree, table: ngrams.Table, contexts: Array) -> Entry:
    """The entries [B, M] of the longest contexts known; seen 0 where none is."""
    grams, several = _by_order(contexts), [params, table] if params else [table]
    each = WAYS * table.ages.shape[1]  # places
    # One number for each hit, the larger the longer its context, that names its place: on a TPU operations count.
    number = each * np.arange(len(ORDERS), 0, -1)[:, None] + np.arange(WAYS)
    number = np.tile(number, (contexts.shape[1], 1))  # [3 M, A]

    def longest(table: ngrams.Table) -> Array:
        found = ngrams.find(table, grams)
        hits = jnp.where(found.hit, number + WAYS * found.bucket[:, :, None], 0)
        return jnp.max(hits.reshape(*contexts.shape[:2], -1), 2)

    best = [longest(table) for table in several]  # [B, M]; 0: none
    overall = functools.reduce(jnp.maximum, best) // each  # 1 to 3, of the longest context that any table knows

    def entry(table: ngrams.Table, best: Array) -> Entry:
        place = best % each
        row = np.arange(len(table.ages))[:, None]
        return _standing(table.values, (row, place // WAYS, place % WAYS), (best > 0) & (best // each == overall))

    return functools.reduce(mix, map(entry, several, best))


def merge(known: ngrams.Table, rows: ngrams.Table) -> ngrams.Table:
    """A table of one row with what the rows of another learned."""
    return ngrams.merge(known, rows, mix)


def mix(a: Entry, b: Entry) -> Entry:
    """The mean of two entries by their counts, over the tokens of both; the k largest, of equal ones the lower ids.
    Tokens of no probability are none."""
    total = a.seen + b.seen
    share = lambda x: (x.seen / jnp.maximum(total, 1))[..., None] * x.probs
    ours, theirs = share(a), share(b)
    same = (a.tokens[..., :, None] == b.tokens[..., None, :]) & (a.tokens >= 0)[..., :, None]
    ours += jnp.sum(jnp.where(same, theirs[..., None, :], 0.0), -1)
    rest = jnp.where(jnp.any(same, -2), -1, b.tokens)
    tokens = jnp.concatenate([a.tokens, rest], -1)
    probs = jnp.where(tokens >= 0, jnp.concatenate([ours, theirs], -1), -1.0)
    order = -probs, jnp.where(tokens >= 0, tokens, np.iinfo(np.int32).max)
    negative, tokens = (x[..., : a.tokens.shape[-1]] for x in jax.lax.sort(order, num_keys=2))
    known = negative < 0
    return Entry(jnp.where(known, tokens, -1), jnp.where(known, -negative, 0.0), total)


def _by_order(contexts: Array) -> Array:
    """int32[B, 3 M, 4]: of each context int32[B, M, 4] its n-grams, one for each of ORDERS."""
    grams = jnp.where(UNUSED, LEFT_OUT, contexts[:, :, None])
    return grams.reshape(len(contexts), -1, contexts.shape[-1])


def _standing(values: Entry, place: tuple[ArrayLike, ...], known: Array) -> Entry:
    """What stands at places, int32[B, M] each; nothing where not `known` bool[B, M]."""
    entry = jax.tree.map(lambda x: gather_at(x, *place), values)
    return Entry(jnp.where(known[..., None], entry.tokens, -1), entry.probs, jnp.where(known, entry.seen, 0))
