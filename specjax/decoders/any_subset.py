"""Any-subset speculative decoding: an any-order model fills in missing tokens and drafts for itself.

Guo, Ermon: Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling and Speculative Decoding (2025),
arXiv 2504.20456.

Rule: order the tokens: the given ones first, then the missing ones by position. With n tokens known,
  1. one call draws the next k in parallel, x_j ~ q_j = p(x_j | known), each as if the others were not there;
  2. one call with the drafts filled in gives p_j = p(x_j | known, x_<j);
  3. accept x_j with min(1, p_j(x_j) / q_j(x_j)) up to the first rejection, which is redrawn from norm([p_j - q_j]+).
As p_1 = q_1 the first is always accepted, and the second accepted or redrawn: never more calls than tokens. A single
draft needs no second call. No bonus token.
Guarantee: distribution: the model's own joint distribution of the missing tokens in this order.
Deviations: the first draft is accepted by decree, since two calls may round differently. With k = 1 the second call is
skipped, so a token costs one call. Temperature, top-k and top-p apply to p and q alike, and the mask token has no mass
in either. Not here: drafts from a table of bigrams, and the slack added to the ratio. No cache: each call reads the
whole sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import add_round, zero_stats
from specjax.errors import UsageError
from specjax.numerics.sampling import DRAFT, VERIFY, draw, fold_in, row_keys, uniform, warp
from specjax.trees.operations import chain
from specjax.types import Array, PyTree, Sampling, Stats
from specjax.verifiers.exact.standard import core as verify_chain

METHOD = Method(
    name="any_subset",
    kind="decoder",
    guarantee="distribution",
    summary="fills in missing tokens with an any-order model, which drafts and verifies its own tokens",
    paper="Guo, Ermon 2025, arXiv 2504.20456",
    needs=frozenset({"any_order"}),
    options=(Option("window", "int", 5, "drafted tokens per step"),),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AnySubsetModel:
    """A two-stream model that can predict any token from any others, with its parameters as the only leaves.

    `apply(params, tokens int32[B, S], content bool[B, S, S], positions int32[B, Q], query bool[B, Q, S]) -> logits
    float32[B, Q, V]`: the distribution of the token at `positions[b, i]`, as seen by a query stream that knows its
    position but not its token and reads the tokens j with `query[b, i, j]`, possibly none. What it reads of token j is
    the content stream, in which j reads the tokens l with `content[b, j, l]`, itself included.
    """

    apply: Callable[..., Array] = field(metadata={"static": True})
    vocab_size: int = field(metadata={"static": True})
    mask_token: int | None = field(metadata={"static": True}, default=None)  # stands where a token is missing
    params: PyTree = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AnySubsetResult(DecodeResult):
    """`tokens` int32[B, S] are those that were missing, by position; `stats.target_passes` are the calls of the model
    that a row needed, and a depth is a place in the draft."""

    filled: Array  # int32[B, S], the whole sequences


class Order(NamedTuple):
    """The order in which tokens become known."""

    position: Array  # int32[B, S], of the token of each rank
    rank: Array  # int32[B, S], of the token at each position
    given: Array  # int32[B], tokens known from the start
    stop: Array  # int32[B], tokens known at the end; ranks beyond are padding


def any_subset(
    model: AnySubsetModel,
    tokens: Array,
    missing: Array,
    *,
    key: Array | int,
    lengths: Array | None = None,
    window: int = 5,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> AnySubsetResult:
    """Fill in the missing tokens: one compiled loop, in which each row goes at its own speed.

    Args:
      tokens: int32[B, S]. missing: bool[B, S], where to draw; what `tokens` holds there is not read.
      key: one PRNG key or seed, from which row b takes `fold_in(key, b)`, or one key per row [B].
      lengths: int32[B], positions of a row that exist; default: all.
      window: tokens drafted at once, k of the rule.
      temperature, top_k, top_p: as for `specjax.decode`; a Python 0 compiles the greedy program.

    Raises: UsageError for a window below 1 or shapes that do not agree.
    """
    tokens, missing = jnp.asarray(tokens, jnp.int32), jnp.asarray(missing, bool)
    if window < 1:
        raise UsageError(f"window must be at least 1, not {window}")
    if tokens.ndim != 2 or missing.shape != tokens.shape:
        raise UsageError(f"tokens and missing must both be [B, S], not {tokens.shape} and {missing.shape}")
    batch, size = tokens.shape
    keys = row_keys(key, batch)
    sampling = Sampling()
    if not (isinstance(temperature, int | float) and temperature == 0):
        sampling = Sampling(*(None if x is None else jnp.asarray(x) for x in (temperature, top_k, top_p)))
    lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    return _fill(model, tokens, missing, lengths, keys, sampling, window=window)


def order_of(missing: Array, lengths: Array) -> Order:
    """Given tokens, then missing ones, then padding; each by position."""
    exists = jnp.arange(missing.shape[1]) < lengths[:, None]
    position = jnp.argsort(jnp.where(exists, missing, 2), 1, stable=True).astype(jnp.int32)
    rank = jnp.argsort(position, 1).astype(jnp.int32)
    return Order(position, rank, jnp.sum(exists & ~missing, 1, dtype=jnp.int32), jnp.minimum(lengths, missing.shape[1]))


def content_mask(order: Order) -> Array:
    """bool[B, S, S]: a token reads those of its rank and below; given tokens read each other freely.

    The same in both calls, so that what is known looks the same to both.
    """
    reach = jnp.maximum(order.rank, order.given[:, None] - 1)
    return order.rank[:, None, :] <= reach[:, :, None]


class _State(NamedTuple):
    tokens: Array  # int32[B, S]
    known: Array  # int32[B]
    stats: Stats


@functools.partial(jax.jit, static_argnames=("window",))
@without_x64
def _fill(model, tokens, missing, lengths, keys, sampling, *, window: int) -> AnySubsetResult:
    batch, size = tokens.shape
    order, row, slots = order_of(missing, lengths), jnp.arange(batch)[:, None], jnp.arange(window)
    content = content_mask(order)
    blank = 0 if model.mask_token is None else model.mask_token

    def distributions(tokens: Array, positions: Array, seen: Array) -> Array:
        """float32[B, k, V]: warped logits at `positions`, from the tokens of rank below `seen` int32[B, k]."""
        logits = model.apply(model.params, tokens, content, positions, order.rank[:, None, :] < seen[:, :, None])
        if model.mask_token is not None:
            logits = logits.at[:, :, model.mask_token].set(-jnp.inf)
        return warp(logits, sampling)

    def body(s: _State) -> _State:
        n = s.known[:, None]
        valid = slots < order.stop[:, None] - n  # [B, k]
        positions = take_along(order.position, jnp.minimum(n + slots, size - 1), 1)
        purpose = functools.partial(fold_in, fold_in(keys, s.known))
        q = distributions(s.tokens, positions, jnp.broadcast_to(n, positions.shape))
        drafted = draw(fold_in(purpose(DRAFT)[:, None], slots), q)
        place = lambda chosen: jnp.where(chosen, positions, size)
        filled = s.tokens.at[row, place(valid)].set(drafted, mode="drop")
        several = jnp.sum(valid, 1) > 1
        p = jax.lax.cond(jnp.any(several), lambda: distributions(filled, positions, n + slots), lambda: q)
        p = p.at[:, 0].set(q[:, 0])
        count, next_token = _verify(purpose(VERIFY), drafted, valid, p, q)
        redrawn = count < jnp.sum(valid, 1)
        new = jnp.where(slots < count[:, None], drafted, next_token[:, None])
        committed = count + redrawn
        calls = jnp.any(valid, 1).astype(jnp.int32) + several
        return _State(
            s.tokens.at[row, place(slots < committed[:, None])].set(new, mode="drop"),
            s.known + committed,
            add_round(s.stats, calls, valid, slots < count[:, None]),
        )

    state = _State(jnp.where(missing, blank, tokens), order.given, zero_stats(batch, window))
    state = jax.lax.while_loop(lambda s: jnp.any(s.known < order.stop), body, state)
    count = order.stop - order.given
    ranks = order.given[:, None] + jnp.arange(size)
    new = take_along(state.tokens, take_along(order.position, jnp.minimum(ranks, size - 1), 1), 1)
    return AnySubsetResult(
        jnp.where(jnp.arange(size) < count[:, None], new, -1),
        count,
        state.stats.hit_eos,
        state.stats,
        filled=state.tokens,
    )


def _verify(keys: Array, drafted: Array, valid: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """How many of drafted int32[B, k] are accepted, and the token that replaces the first rejected one: int32[B] each.

    The standard rule, on the chain whose root stands for what is known. The first draft passes whatever its uniform.
    """
    root = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    leaf = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)))  # a bonus token's distribution, which is never drawn from
    tree = chain(root(drafted, 0), root(valid, True), leaf(q))
    split = jax.vmap(jax.random.split)(keys)
    u = uniform(split[:, 0], drafted.shape[1] + 1)
    end = verify_chain(u.at[:, 1].set(0.0), tree, leaf(p))
    return end.num_nodes - 1, draw(split[:, 1], jnp.log(end.residual))
