"""Selections of cached tokens, against loops in NumPy written from the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.retrieval.cached_tokens import ends_of_text, most_attended, nearest_chunks

SLOTS, BUDGET = 64, 16
CACHED = np.array([50, 9, 64])
RNG = np.random.default_rng(0)
KEY = RNG.normal(size=(3, 2, SLOTS, 8)).astype(np.float32)
QUERY = RNG.normal(size=(3, 4, 4, 8)).astype(np.float32)  # 4 tokens, 4 heads: two of each key/value head


def of_row(slots, row):
    """Return the selected slots of each head of a row, without places for none."""
    rows = np.asarray(slots)[row].reshape(-1, BUDGET)
    assert (np.diff(rows) >= 0).all(), "the order is that of the text"
    return [list(row[row < SLOTS]) for row in rows]


def test_the_ends_of_a_text():
    slots = jax.jit(ends_of_text, static_argnums=(1, 2, 3))(CACHED, SLOTS, BUDGET, 3)
    assert of_row(slots, 0) == [[0, 1, 2, *range(37, 50)]]
    assert of_row(slots, 1) == [list(range(9))]


def test_the_most_attended_tokens():
    positions = np.maximum(CACHED - 4, 0)[:, None] + np.arange(4)
    slots = jax.jit(most_attended, static_argnums=4)(QUERY, positions, KEY, CACHED, BUDGET)
    for row, cached in enumerate(CACHED):
        for head, selected in enumerate(of_row(slots, row)):
            start = max(cached - 4, 0)
            attention = np.zeros(start)
            for token, query_head in np.ndindex(4, 2):
                scores = KEY[row, head, : start + token + 1] @ QUERY[row, token, 2 * head + query_head]
                weights = np.exp(scores.astype(float) - scores.max())
                attention += (weights / weights.sum())[:start]
            smooth = np.convolve(np.pad(attention, 2), np.ones(5) / 5, "valid") if start else attention
            best = np.argsort(-smooth, kind="stable")[: BUDGET - 4]
            assert selected == sorted([*best, *range(start, cached)])


def test_the_nearest_chunks():
    select = jax.jit(functools.partial(nearest_chunks, budget=BUDGET, chunk=5))
    slots = select(QUERY[:, 0], KEY, CACHED)
    for row, cached in enumerate(CACHED):
        chunks = [list(range(first, min(first + 5, cached))) for first in range(0, cached, 5)]
        for head, selected in enumerate(of_row(slots, row)):
            query = QUERY[row, 0, 2 * head : 2 * head + 2].sum(0)
            score = [KEY[row, head, chunk].mean(0) @ query for chunk in chunks]
            score[0] = score[-1] = np.inf
            best = np.argsort(-np.array(score), kind="stable")[: BUDGET // 5]
            assert selected == sorted(slot for chunk in best for slot in chunks[chunk])


def test_a_planted_token_is_selected_by_attention_and_not_by_place():
    """A key that is equal to the query is far from both ends."""
    key = KEY.copy()
    key[0, :, 20] = 5 * QUERY[0, 0, 0]
    query = np.broadcast_to(QUERY[:1, :1, :1], (1, 4, 4, 8))
    cached, positions = CACHED[:1], np.arange(46, 50)[None]
    assert all(20 in head for head in of_row(most_attended(query, positions, key[:1], cached, BUDGET), 0))
    assert all(20 in head for head in of_row(nearest_chunks(query[:, 0], jnp.asarray(key[:1]), cached, BUDGET, 5), 0))
    assert 20 not in of_row(ends_of_text(cached, SLOTS, BUDGET, 3), 0)[0]
