"""Lookahead decoding: Jacobi iterations on a window of guesses produce n-grams, and the n-grams are drafts.

Fu, Bailis, Stoica, Zhang: Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (ICML 2024),
arXiv 2402.02057.

Rule: the window w[N - 1, W] stores guesses. w[0, 0] is the last token, at position p. w[r, i] is a guess for position
p + i + r. Its context is row 0 up to column i, then column i above it. Let y_i be the target's argmax below column
i. The n-gram (w[0, i], ..., w[N - 2, i], y_i) enters the pool, with its first token as the key. The candidates are the
n-grams of the last token. When `a` tokens are added to the text, the window shifts:
w'[r, i] = w[r + 1, i + a - 1] and w'[N - 2, i] = y_{i + a - 1}. Missing columns, and initially all of row 0, are random
tokens of the text. At first each pass adds one row.
Candidates and window form one token tree: they share the last token as root, and positions are depths.
Guarantee: distribution (a point-mass tree).
Deviations: candidates with a common prefix share nodes. Guesses of the window can be accepted too, if no candidate has
the token; the authors verify candidates only. Candidates are verified from the first pass on, and in full; the authors'
loop leaves the last token of each to the bonus token. The guesses may contain an eos, because a drafter cannot access
the tokens that end a row. The pool is a hash table: first tokens of the same bucket share its G entries.
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

    pool: PyTree  # ngrams.Table of n-grams of N tokens by their first token; () without candidates
    window: Array  # int32[B, N - 1, W]; -1: not drawn yet
    rows: Array  # int32[B], number of valid rows of the window
    # Within a step: int32[B, W], the node at the bottom of each column, -1: not in the tree; and the end of the text,
    # int32[B, 2 N - 1].
    ends: Any = ()
    tail: Any = ()


class LookaheadResult(NamedTuple):
    """Results of a target pass."""

    below: Array  # int32[B, W], the most likely token below each column; -1 if the column is not in the tree
    accepted: Array  # int32[B, N], the first tokens that the pass added to the text


@functools.cache
def lookahead(
    *, ngram: int = 5, window: int = 7, guesses: int = 7, seed_pool: bool = True, buckets: int = 4096
) -> Drafter:
    """Draft a window of (N - 1) W guesses and up to G candidates of N - 1 tokens.

    The defaults are the authors' for 7B models.

    Args:
      ngram: N. window: W. guesses: G, candidates per pass and entries per bucket.
      seed_pool: add the n-grams of the prompt and of new tokens to the pool too.
      buckets: number of buckets of the pool, per row.

    State: LookaheadState; the pool takes 4 x buckets x G (N + 1) bytes per row (688 kB by default).
    Raises: UsageError for a setting out of range.
    """
    if ngram < 2:
        raise UsageError(f"ngram must be at least 2, not {ngram}")
    if window < 1:
        raise UsageError(f"window must be at least 1, not {window}")
    if guesses < 0:
        raise UsageError(f"guesses must be at least 0, not {guesses}")
    if guesses:
        ngrams.check_buckets(buckets)
    config = Config(ngram, window, guesses, seed_pool, buckets)
    places, steady = _layout(config), config.rows * window
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(len(places.depth), int(places.depth.max())),
        init=functools.partial(_init, config),
        observe=functools.partial(_observe, config),
        update=functools.partial(_update, config),
        traits=Traits(widths=tuple(sorted({steady, steady + config.rows} - {len(places.depth)}))),
    )


class Config(NamedTuple):
    ngram: int
    window: int
    guesses: int
    seed_pool: bool
    buckets: int

    @property
    def rows(self) -> int:
        """Return the number of rows of the window, and of tokens of a candidate."""
        return self.ngram - 1


class LookaheadLayout(NamedTuple):
    """Layout of the tree before `compact`: the root, the candidates one after another, then the window by rows."""

    window: np.ndarray  # int[N - 1, W], the nodes of the window; the first is the root
    above: np.ndarray  # int[N - 1, W], their parents
    depth: np.ndarray  # int[nodes]


def _layout(config: Config) -> LookaheadLayout:
    row, column = np.indices((config.rows, config.window))
    window = config.guesses * config.rows + np.arange(row.size).reshape(row.shape)
    window[0, 0] = 0
    # Row 0 is a chain, and each of its nodes is the top of a column.
    above = np.concatenate([np.roll(window[:1], 1, 1), window[:-1]]).astype(np.int32)
    candidates = np.tile(1 + np.arange(config.rows), config.guesses)
    return LookaheadLayout(window, above, np.concatenate([[0], candidates, (row + column).ravel()[1:]]))


def _init(config: Config, params, context: Context) -> LookaheadState:
    batch = context.tokens.shape[0]
    pool: PyTree = ()
    if config.guesses:
        pool = ngrams.empty(batch, config.buckets, config.guesses, config.ngram)
    if config.guesses and config.seed_pool:
        pool = ngrams.learn_text(pool, context.tokens, context.length, config.ngram, _learn)
    unknown = jnp.full((batch, config.rows, config.window), -1, jnp.int32)
    return LookaheadState(pool, unknown, jnp.ones((batch,), jnp.int32))


def _propose(config: Config, params, keys: Array, state: LookaheadState, context: Context, limit: Array):
    root, pool, places = context.root, state.pool, _layout(config)
    guessed = _fill(state.window, keys, context).at[:, 0, 0].set(root[:, 0])
    parts = [(root, jnp.full_like(root, -1), jnp.ones_like(root, bool))]  # (tokens, parents, valid)
    if config.guesses:
        parts.append(_trie(*_candidates(ngrams.find(pool, root[:, :, None]))))
    row_exists = np.arange(config.rows)[:, None] < state.rows[:, None, None]  # [B, N - 1, 1]
    of_window = guessed, places.above, row_exists
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
    config: Config, params, state: LookaheadState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> LookaheadResult:
    likeliest = take_along(first_largest(output.logits), jnp.maximum(state.ends, 0), 1)
    path = jnp.pad(verdict.path, ((0, 0), (0, config.ngram)), constant_values=-1)[:, 1 : 1 + config.ngram]
    drafted = take_along(tree.tokens, jnp.maximum(path, 0), 1)
    added = jnp.where(jnp.arange(config.ngram) < verdict.num_nodes[:, None] - 1, drafted, verdict.next_token[:, None])
    return LookaheadResult(jnp.where(state.ends >= 0, likeliest, -1), added)


def _update(
    config: Config, params, state: LookaheadState, observation: LookaheadResult, verdict: Verdict
) -> LookaheadState:
    rows, window, n, y = config.rows, config.window, config.ngram, observation.below
    full = state.rows == rows
    extended = jnp.pad(state.window, ((0, 0), (0, 1), (0, 0)))  # a row for y
    extended = jnp.where(jnp.arange(config.ngram)[:, None] == state.rows[:, None, None], y[:, None], extended)
    by_column = extended.swapaxes(1, 2)  # [B, W, N]
    pool = state.pool
    if config.guesses:
        grams, is_new = by_column, full[:, None] & (y >= 0)
        if config.seed_pool:  # all that end within the first N new tokens; a single write, because writes are slow
            text = jnp.concatenate([state.tail, observation.accepted], 1)
            first = jnp.minimum(verdict.num_nodes, n)[:, None, None] + np.arange(n)[:, None] + np.arange(n)
            last = take_along(text[:, None], first.reshape(len(text), 1, -1), 2).reshape(first.shape)
            grams = jnp.concatenate([grams, last], 1)
            is_new = jnp.concatenate([is_new, jnp.all(last >= 0, 2)], 1)
        pool = _learn(pool, grams, is_new)
    # A full window drops its first row: one row down is one position, like one column to the right.
    column = jnp.arange(window) + (verdict.num_nodes - full)[:, None]
    below = (jnp.arange(rows) + full[:, None])[:, None, :]
    moved = take_along(by_column, jnp.clip(column, 0, window - 1)[:, :, None], 1)
    moved = take_along(moved, jnp.broadcast_to(below, (*column.shape, rows)), 2)
    moved = jnp.where((column < window)[:, :, None], moved, -1)
    return LookaheadState(pool, moved.swapaxes(1, 2), jnp.minimum(state.rows + 1, rows))


def _learn(pool: ngrams.Table, grams: Array, is_new: Array) -> ngrams.Table:
    return ngrams.write(pool, grams, (), is_new, prefix=1)


def _fill(window: Array, keys: Array, context: Context) -> Array:
    """Fill empty cells of the window with random tokens of the row's text."""
    draw = lambda key, length: jax.random.randint(key, window.shape[1:], 0, length)
    index = jax.vmap(draw)(keys, context.length).reshape(len(window), -1)
    return jnp.where(window < 0, take_along(context.tokens, index, 1).reshape(window.shape), window)


def _candidates(matches: ngrams.Lookup) -> tuple[Array, Array]:
    """Return the tails int32[B, G, N - 1] of a bucket's n-grams, the latest first, and their validity bool[B, G]."""
    hit, grams, ages = (x[:, 0] for x in (matches.hit, matches.grams, matches.ages))
    order = jnp.argsort(jnp.where(hit, -ages, 1), axis=1, stable=True)
    return take_along(grams, order[:, :, None], 1)[:, :, 1:], take_along(hit, order, 1)


def _trie(candidates: Array, is_candidate: Array) -> tuple[Array, Array, Array]:
    """Merge candidates int32[B, G, D] into a trie below the root; return tokens, parents, valid, each [B, G D]."""
    batch, g, depth = candidates.shape
    agrees = jnp.cumprod(candidates[:, :, None] == candidates[:, None], axis=3)  # [B, G, G, D], prefixes
    first_index = jnp.argmax(agrees, 2).astype(jnp.int32)  # [B, G, D]: the first candidate with this path
    above = 1 + first_index[:, :, :-1] * depth + jnp.arange(depth - 1)
    parents = jnp.pad(above, ((0, 0), (0, 0), (1, 0)))
    valid = is_candidate[:, :, None] & (first_index == jnp.arange(g)[:, None])
    flat = lambda x: x.reshape(batch, -1)
    return flat(jnp.maximum(candidates, 0)), flat(parents), flat(valid)
