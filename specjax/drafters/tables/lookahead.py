"""Lookahead decoding: Jacobi iterations on a window of guesses give n-grams, and n-grams give drafts.

Fu, Bailis, Stoica, Zhang: Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (ICML 2024),
arXiv 2402.02057.

Rule: the window w[N - 1, W] holds guesses; w[0, 0] is the last token, at position p, and w[r, i] a guess for position
p + i + r, seen after row 0 up to column i and then down column i. The target's argmax y_i below column i makes the
n-gram (w[0, i], ..., w[N - 2, i], y_i) for the pool, where it is found by its first token. Those that the last token
finds are the candidates. After a tokens are added to the text, w'[r, i] = w[r + 1, i + a - 1] and
w'[N - 2, i] = y_{i + a - 1}. Columns that are missing, and at first all of row 0, are random tokens of the text; at
first each pass adds one row.
Candidates and window are one token tree: all of them hang off the last token, and positions are depths.
Guarantee: distribution (a point-mass tree).
Deviations: candidates with a common beginning share nodes; guesses of the window are accepted too where no candidate
has that token (the authors verify candidates alone); candidates are verified from the first pass on and in full (the
authors' loop leaves the last token of each to the bonus). An eos among the guesses stays, since a drafter does not know
which tokens end a row. The pool is hashed: first tokens with the same bucket share its G places.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.indexing import first_largest, take_along
from specjax.retrieval import ngrams
from specjax.trees.operations import compact
from specjax.types import Array, Context, Drafter, Output, PyTree, TokenTree, Verdict


class LookaheadState(NamedTuple):
    """The pool and the window."""

    pool: PyTree  # ngrams.Table of n-grams of N tokens, by their first; () without candidates
    window: Array  # int32[B, N - 1, W]; -1: to be drawn
    rows: Array  # int32[B], how many of its rows count
    # Within a round: int32[B, W], the node at the bottom of each column; -1: not in the tree.
    ends: Array | tuple[()] = ()


@functools.cache
def lookahead(
    *, ngram: int = 5, window: int = 7, guesses: int = 7, seed_pool: bool = True, buckets: int = 4096
) -> Drafter:
    """A window of (N - 1) W guesses and up to G candidates of N - 1 tokens; the defaults are the authors' for 7B.

    Args:
      ngram: N. window: W. guesses: G, candidates per pass and places of a bucket.
      seed_pool: put the n-grams of the text into the pool too, of the prompt and of what is added to it. buckets: of
        the pool, per row.

    State: LookaheadState; the pool takes 4 x buckets x G (N + 1) bytes per row (688 kB by default).
    Raises: UsageError for a setting outside its range.
    """
    if ngram < 2:
        raise UsageError(f"ngram must be at least 2, not {ngram}")
    if window < 1:
        raise UsageError(f"window must be at least 1, not {window}")
    if guesses < 0:
        raise UsageError(f"guesses must be at least 0, not {guesses}")
    rows = ngram - 1
    shape = _Shape(rows, window, guesses)
    if guesses:
        ngrams.check_buckets(buckets)

    def learn(pool: ngrams.Table, grams: Array, wanted: Array) -> ngrams.Table:
        return ngrams.write(pool, grams, (), wanted, prefix=1)

    def init(params, context: Context) -> LookaheadState:
        batch = context.tokens.shape[0]
        pool: PyTree = ()
        if guesses:
            pool = ngrams.empty(batch, buckets, guesses, ngram)
        if guesses and seed_pool:
            pool = ngrams.learn_text(pool, context.tokens, context.length, ngram, learn)
        unknown = lambda *shape: jnp.full((batch, *shape), -1, jnp.int32)
        return LookaheadState(pool, unknown(rows, window), jnp.ones((batch,), jnp.int32))

    def propose(params, keys: Array, state: LookaheadState, context: Context, limit: Array):
        batch = context.tokens.shape[0]
        root, pool = context.root, state.pool
        guessed = _fill(state.window, keys, context).at[:, 0, 0].set(root[:, 0])
        parts = [(root, jnp.full_like(root, -1), jnp.ones_like(root, bool))]  # (tokens, parents, valid)
        if guesses:
            if seed_pool:
                start = context.length - 2 * ngram + 1  # all that end in the last N tokens
                pool = learn(pool, *ngrams.windows(context.tokens, context.length, start, ngram, ngram))
            parts.append(_trie(*_candidates(ngrams.find(pool, root[:, :, None]))))
        above = jnp.broadcast_to(shape.window_parents, (batch, rows * window - 1))
        parts.append((guessed.reshape(batch, -1)[:, 1:], above, jnp.less(shape.window_row, state.rows[:, None])))
        tokens, parents, valid = (jnp.concatenate(part, 1) for part in zip(*parts, strict=True))
        valid &= shape.depth <= limit[:, None]
        bottom = shape.node(state.rows[:, None] - 1, jnp.arange(window))
        place = jnp.where(valid, jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, -1)  # in the compact tree
        ends = take_along(place, bottom, 1)
        return compact(TokenTree(tokens, parents, valid)), LookaheadState(pool, guessed, state.rows, ends)

    def observe(
        params, state: LookaheadState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
    ) -> Array:
        """int32[B, W]: the likeliest token below each column; -1 where the column is not in the tree."""
        likeliest = take_along(first_largest(output.logits), jnp.maximum(state.ends, 0), 1)
        return jnp.where(state.ends >= 0, likeliest, -1)

    def update(params, state: LookaheadState, y: Array, verdict: Verdict) -> LookaheadState:
        full = state.rows == rows
        known = jnp.pad(state.window, ((0, 0), (0, 1), (0, 0)))  # a row for y
        known = jnp.where(jnp.arange(ngram)[:, None] == state.rows[:, None, None], y[:, None], known)
        by_column = known.swapaxes(1, 2)  # [B, W, N]
        pool = state.pool
        if guesses:
            pool = learn(pool, by_column, full[:, None] & (y >= 0))
        # A full window drops its first row: one step down is one position, as one column is.
        column = jnp.arange(window) + (verdict.num_nodes - full)[:, None]
        below = (jnp.arange(rows) + full[:, None])[:, None, :]
        moved = take_along(by_column, jnp.minimum(column, window - 1)[:, :, None], 1)
        moved = take_along(moved, jnp.broadcast_to(below, (*column.shape, rows)), 2)
        moved = jnp.where((column < window)[:, :, None], moved, -1)
        return LookaheadState(pool, moved.swapaxes(1, 2), jnp.minimum(state.rows + 1, rows))

    steady = rows * window
    return Drafter(
        init=init,
        propose=propose,
        observe=observe,
        update=update,
        num_nodes=shape.num_nodes,
        max_depth=int(shape.depth.max()),
        widths=tuple(sorted({steady, steady + rows} - {shape.num_nodes})),
    )


class _Shape:
    """Where things stand before `compact`: the root, the candidates one after another, the window row by row."""

    def __init__(self, rows: int, window: int, guesses: int):
        self.first = 1 + guesses * rows  # node of the window behind the root
        self.window = window
        self.num_nodes = self.first + rows * window - 1
        row, column = np.divmod(np.arange(rows * window), window)
        # Row 0 is a chain, and each of its nodes has a column below it.
        parents = np.where(row == 0, self.node(row, column - 1), self.node(row - 1, column))
        self.window_parents = parents[1:].astype(np.int32)
        self.window_row = row[1:]
        self.depth = np.concatenate([[0], np.tile(1 + np.arange(rows), guesses), (row + column)[1:]])

    def node(self, row, column):
        """The node of w[row, column], arrays of integers."""
        place = row * self.window + column
        return (place + self.first - 1) * (place > 0)


def _fill(window: Array, keys: Array, context: Context) -> Array:
    """The window, with random tokens of the row's text where it has none."""
    draw = lambda key, length: jax.random.randint(key, window.shape[1:], 0, length)
    index = jax.vmap(draw)(keys, context.length).reshape(len(window), -1)
    return jnp.where(window < 0, take_along(context.tokens, index, 1).reshape(window.shape), window)


def _candidates(found: ngrams.Found) -> tuple[Array, Array]:
    """The tails int32[B, G, N - 1] of the n-grams of one bucket, the latest first, and which count: bool[B, G]."""
    hit, grams, ages = (x[:, 0] for x in (found.hit, found.grams, found.ages))
    order = jnp.argsort(jnp.where(hit, -ages, 1), axis=1, stable=True)
    return take_along(grams, order[:, :, None], 1)[:, :, 1:], take_along(hit, order, 1)


def _trie(candidates: Array, present: Array) -> tuple[Array, Array, Array]:
    """Candidates int32[B, G, D] as chains below the root, each path once: tokens, parents, valid, [B, G D] each."""
    batch, g, depth = candidates.shape
    agrees = jnp.cumprod(candidates[:, :, None] == candidates[:, None], axis=3)  # [B, G, G, D], up to here
    stands = jnp.argmax(agrees, 2).astype(jnp.int32)  # [B, G, D]: the first candidate with this path
    above = 1 + stands[:, :, :-1] * depth + jnp.arange(depth - 1)
    parents = jnp.pad(above, ((0, 0), (0, 0), (1, 0)))
    valid = present[:, :, None] & (stands == jnp.arange(g)[:, None])
    flat = lambda x: x.reshape(batch, -1)
    return flat(jnp.maximum(candidates, 0)), flat(parents), flat(valid)
