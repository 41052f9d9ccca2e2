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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest, gather_at, take_along
from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.retrieval import ngrams
from specjax.trees.operations import compact
from specjax.types import Array, Context, Drafter, Output, PyTree, TokenTree, Traits, TreeSize, Verdict

METHOD = Method(
    name="lookahead",
    kind="drafter",
    guarantee="distribution",
    summary="drafts n-grams that Jacobi iterations on a window of guesses produced",
    paper="Fu et al. 2024, arXiv 2402.02057",
    options=(
        Option("ngram", "int", 5, "tokens per n-gram"),
        Option("window", "int", 7, "columns of the window"),
        Option("guesses", "int", 7, "candidate n-grams per target pass"),
        Option("seed_pool", "yes_or_no", True, "collect n-grams from the text too"),
        shared.buckets(4096),
    ),
    cpu_options={"ngram": 4, "window": 3, "guesses": 2},
)


class LookaheadState(NamedTuple):
    """The pool and the window."""

    pool: PyTree  # ngrams.Table of n-grams of N tokens, by their first; () without candidates
    window: Array  # int32[B, N - 1, W]; -1: to be drawn
    rows: Array  # int32[B], how many of its rows count
    # Within a round: int32[B, W], the node at the bottom of each column, -1: not in the tree; and the end of the text,
    # int32[B, 2 N - 1].
    ends: Any = ()
    tail: Any = ()


class Seen(NamedTuple):
    """What a pass showed."""

    below: Array  # int32[B, W], the likeliest token below each column; -1 where the column is not in the tree
    accepted: Array  # int32[B, N], the first tokens that it added to the text


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
    if guesses:
        ngrams.check_buckets(buckets)
    config = _Config(ngram, window, guesses, seed_pool, buckets)
    places, steady = _places(config), config.rows * window
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(len(places.depth), int(places.depth.max())),
        init=functools.partial(_init, config),
        observe=functools.partial(_observe, config),
        update=functools.partial(_update, config),
        traits=Traits(widths=tuple(sorted({steady, steady + config.rows} - {len(places.depth)}))),
    )


class _Config(NamedTuple):
    ngram: int
    window: int
    guesses: int
    seed_pool: bool
    buckets: int

    @property
    def rows(self) -> int:
        """Of the window, and tokens of a candidate."""
        return self.ngram - 1


class _Places(NamedTuple):
    """Where things stand before `compact`: the root, the candidates one after another, the window row by row."""

    window: np.ndarray  # int[N - 1, W], the nodes of the window; the first is the root
    above: np.ndarray  # int[N - 1, W], their parents
    depth: np.ndarray  # int[nodes]


def _places(config: _Config) -> _Places:
    row, column = np.indices((config.rows, config.window))
    window = config.guesses * config.rows + np.arange(row.size).reshape(row.shape)
    window[0, 0] = 0
    # Row 0 is a chain, and each of its nodes has a column below it.
    above = np.concatenate([np.roll(window[:1], 1, 1), window[:-1]]).astype(np.int32)
    candidates = np.tile(1 + np.arange(config.rows), config.guesses)
    return _Places(window, above, np.concatenate([[0], candidates, (row + column).ravel()[1:]]))


def _init(config: _Config, params, context: Context) -> LookaheadState:
    batch = context.tokens.shape[0]
    pool: PyTree = ()
    if config.guesses:
        pool = ngrams.empty(batch, config.buckets, config.guesses, config.ngram)
    if config.guesses and config.seed_pool:
        pool = ngrams.learn_text(pool, context.tokens, context.length, config.ngram, _learn)
    unknown = jnp.full((batch, config.rows, config.window), -1, jnp.int32)
    return LookaheadState(pool, unknown, jnp.ones((batch,), jnp.int32))


def _propose(config: _Config, params, keys: Array, state: LookaheadState, context: Context, limit: Array):
    root, pool, places = context.root, state.pool, _places(config)
    guessed = _fill(state.window, keys, context).at[:, 0, 0].set(root[:, 0])
    parts = [(root, jnp.full_like(root, -1), jnp.ones_like(root, bool))]  # (tokens, parents, valid)
    if config.guesses:
        parts.append(_trie(*_candidates(ngrams.find(pool, root[:, :, None]))))
    there = np.arange(config.rows)[:, None] < state.rows[:, None, None]  # [B, N - 1, 1]
    of_window = guessed, places.above, there
    flat = tuple(jnp.broadcast_to(x, guessed.shape).reshape(len(root), -1)[:, 1:] for x in of_window)
    tokens, parents, valid = (jnp.concatenate(part, 1) for part in zip(*parts, flat, strict=True))
    valid &= places.depth <= limit[:, None]
    bottom = gather_at(jnp.asarray(places.window), state.rows - 1)  # [B, W]
    place = jnp.where(valid, jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, -1)  # in the compact tree
    ends = take_along(place, bottom, 1)
    back = context.length[:, None] + np.arange(1 - 2 * config.ngram, 0)
    tail = jnp.where(back >= 0, take_along(context.tokens, jnp.maximum(back, 0), 1), -1)
    return compact(TokenTree(tokens, parents, valid)), LookaheadState(pool, guessed, state.rows, ends, tail)


def _observe(
    config: _Config, params, state: LookaheadState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> Seen:
    likeliest = take_along(first_largest(output.logits), jnp.maximum(state.ends, 0), 1)
    path = jnp.pad(verdict.path, ((0, 0), (0, config.ngram)), constant_values=-1)[:, 1 : 1 + config.ngram]
    drafted = take_along(tree.tokens, jnp.maximum(path, 0), 1)
    added = jnp.where(jnp.arange(config.ngram) < verdict.num_nodes[:, None] - 1, drafted, verdict.next_token[:, None])
    return Seen(jnp.where(state.ends >= 0, likeliest, -1), added)


def _update(config: _Config, params, state: LookaheadState, seen: Seen, verdict: Verdict) -> LookaheadState:
    rows, window, n, y = config.rows, config.window, config.ngram, seen.below
    full = state.rows == rows
    known = jnp.pad(state.window, ((0, 0), (0, 1), (0, 0)))  # a row for y
    known = jnp.where(jnp.arange(config.ngram)[:, None] == state.rows[:, None, None], y[:, None], known)
    by_column = known.swapaxes(1, 2)  # [B, W, N]
    pool = state.pool
    if config.guesses:
        grams, wanted = by_column, full[:, None] & (y >= 0)
        if config.seed_pool:  # all that end in the first N tokens added, or before; one write for all, for it is dear
            text = jnp.concatenate([state.tail, seen.accepted], 1)
            first = jnp.minimum(verdict.num_nodes, n)[:, None, None] + np.arange(n)[:, None] + np.arange(n)
            last = take_along(text[:, None], first.reshape(len(text), 1, -1), 2).reshape(first.shape)
            grams = jnp.concatenate([grams, last], 1)
            wanted = jnp.concatenate([wanted, jnp.all(last >= 0, 2)], 1)
        pool = _learn(pool, grams, wanted)
    # A full window drops its first row: one step down is one position, as one column is.
    column = jnp.arange(window) + (verdict.num_nodes - full)[:, None]
    below = (jnp.arange(rows) + full[:, None])[:, None, :]
    moved = take_along(by_column, jnp.clip(column, 0, window - 1)[:, :, None], 1)
    moved = take_along(moved, jnp.broadcast_to(below, (*column.shape, rows)), 2)
    moved = jnp.where((column < window)[:, :, None], moved, -1)
    return LookaheadState(pool, moved.swapaxes(1, 2), jnp.minimum(state.rows + 1, rows))


def _learn(pool: ngrams.Table, grams: Array, wanted: Array) -> ngrams.Table:
    return ngrams.write(pool, grams, (), wanted, prefix=1)


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
