"""Contracts of tree growth: builders, stop conditions, and drafters that return logits.

A level drafts W nodes. F of them form its frontier, and children are drafted only below these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows
from specjax.numerics import sampling
from specjax.pallas_kernels.gumbel_topk import gumbel_topk, reference
from specjax.types import Array, DraftOutput, Draws, PyTree

COLD = 2.0**-27
"""Temperature at which noise (between -4 and 23) can no longer change the order of any two float32 numbers near 1."""


SHORTLIST = 64
"""Number of the likeliest tokens among which scored trees of coupled decoding look for the winner of a race.

The noise of all tokens of the vocabulary takes longer than a small head. 64 tokens have nine tenths of the mass of
SmolLM2 at temperature 1, and the winner is among them more often, because a head is uncertain about the others."""


class Parents(NamedTuple):
    """Nodes whose children are to be drafted, selected by the builder in the previous level."""

    ids: Array  # int32[B, F], node numbers; 0 is the root
    valid: Array  # bool[B, F], nodes to draft below: they exist, are above the depth limit and were not stopped
    rows: LogitRows  # float32[B, F, V], log q: the normalised and warped distribution of the children
    keys: Array | None  # [B, F], keys of the children's noise; None: no noise, draft the likeliest tokens
    coupled: bool  # True if the noise is the target's, one field per position
    is_greedy: Array | None = None  # bool[B], rows that draft the likeliest tokens despite keys; None: no rows
    shortlist: int | None = None  # number of the likeliest tokens that are drawn from; None: all

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the vocabulary."""
        return self.rows.shape[-1]

    def reduce(self, function: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
        """Return `function(log_q float32[B, F, V], keys, *arrays)`, a pytree of arrays [B, F, ...].

        Large distributions are computed for a few of the F parents at a time. `function` then receives these parents,
        with their keys, and their part of the arrays [B, F, ...].
        """
        return self.rows.reduce(function, self.keys, *arrays)

    def best(self, k: int, *, noisy: bool = True) -> tuple[Array, Array]:
        """Draw k children of each node without replacement, in this order (Gumbel-top-k).

        Without keys or with noisy=False the children are the likeliest tokens.

        Returns: tokens int32[B, F, k] and scores float32[B, F, k], -inf where no such child exists.
        """
        if not noisy or self.keys is None or self.is_greedy is None:
            return self.reduce(lambda log_q, keys: gumbel_topk(keys if noisy else None, log_q, k))
        heat = jnp.broadcast_to(jnp.where(self.is_greedy, COLD, 1.0)[:, None], self.ids.shape)
        if self.shortlist is not None and k < self.shortlist < self.vocab_size:
            return self.reduce(functools.partial(best_of_likeliest, count=self.shortlist, k=k), heat)
        return self.reduce(lambda log_q, keys, heat: gumbel_topk(keys, log_q, k, temperature=heat), heat)

    def unless_greedy(self, drawn: PyTree, likeliest: PyTree) -> PyTree:
        """Select arrays [B, ...]: `likeliest` in rows that draft the likeliest tokens, `drawn` in the others."""
        if self.keys is None or self.is_greedy is None:
            return likeliest if self.keys is None else drawn
        per_row = lambda x: self.is_greedy.reshape(-1, *[1] * (x.ndim - 1))
        return jax.tree.map(lambda x, y: jnp.where(per_row(x), y, x), drawn, likeliest)


def best_of_likeliest(log_q: Array, keys: Array, heat: Array, *, count: int, k: int) -> tuple[Array, Array]:
    """Return the `k` best of the `count` likeliest tokens of log_q float32[B, F, V] by log q / heat + noise."""
    tokens, log_q = gumbel_topk(None, log_q, count)
    scores, place = jax.lax.top_k(log_q / heat[..., None] + noise_at(keys, tokens), k)
    return take_along(tokens, place, 2), scores


def noise_at(keys: Array, tokens: Array) -> Array:
    """Return the entries of `sampling.noise(keys, V)` at tokens int32[..., K], for keys [...].

    They are other numbers if JAX's partitionable threefry is off.
    """
    words = jax.random.key_data(keys)[..., None, :]
    return reference.gumbel(words[..., 0], words[..., 1], tokens)


def noise(keys: Array, vocab: int, race: int = 0) -> Array:
    """Return Gumbel noise float32[..., V] of keys [...]. Each `race` is an independent draw."""
    return sampling.noise(sampling.fold_in(keys, race) if race else keys, vocab)


def exclude(log_q: Array, tokens: Array) -> Array:
    """Return log_q float32[B, F, V] without the mass of tokens int32[B, F, k]; V: no token."""
    rows, nodes = jnp.indices(tokens.shape[:2])
    return log_q.at[rows[:, :, None], nodes[:, :, None], tokens].set(-jnp.inf, mode="drop")


class Level(NamedTuple):
    """W drafted nodes of one level. Siblings are in draft order."""

    tokens: Array  # int32[B, W]
    parents: Array  # int32[B, W], node numbers
    valid: Array  # bool[B, W]
    feed: Array  # int32[B, F], slots of this level to draft below: the next frontier
    # int32[B, F, `Builder.excludes`], tokens without mass in the distribution of each parent's draws; V: none
    excluded: Array | None = None


class Frontier(NamedTuple):
    """Drafted nodes that the drafter reads next, to predict the tokens after them."""

    place: Array  # int32[], tokens fed in earlier levels, the root included
    tokens: Array  # int32[B, F]
    depth: Array  # int32[B, F]
    visible: Array  # bool[B, F, places], earlier tokens that each node may attend to
    expands: Array  # bool[B, F], nodes with drafts below them; the logits of the other nodes are not used

    @property
    def mask(self) -> Array:
        """Return bool[B, F, places + F]: the earlier tokens and the frontier nodes that each node may attend to.

        Within the frontier, each node attends only to itself.
        """
        self_mask = jnp.broadcast_to(
            jnp.eye(self.tokens.shape[1], dtype=bool), (*self.tokens.shape, self.tokens.shape[1])
        )
        return jnp.concatenate([self.visible, self_mask], 2)


FeedFn = Callable[[PyTree, Frontier], tuple[PyTree, Array | DraftOutput]]
"""The drafter's pass: `feed(memory, frontier) -> (memory, logits float32[B, F, V] or DraftOutput)`."""


class Fed(NamedTuple):
    """Nodes that the drafter has just read, as input of a stop condition."""

    log_q: Array  # float32[B, F, V], normalised distribution from which the children will be drawn
    depth: Array  # int32[B, F]
    logits: Array  # [B, F, V], logits of the drafter
    confidence: Array | None = None  # float32[B, F], from drafters with a confidence head
    accepted: Array | None = None  # float32[B, F], acceptance of the nodes themselves, from an acceptance head
    expands: Array | None = None  # bool[B, F], nodes below which a level may be drafted
    pass_costs: np.ndarray | None = None  # float32[D + 1], of the target pass for a chain of each length; None: unknown


class Stop(NamedTuple):
    """A stop condition, which ends drafting early. `specjax.trees.stops` contains the conditions.

    `judge(value, fed) -> (value, go_on bool[B, F])` judges the nodes of a pass. `value` contains arrays float32[B, F]
    in the structure of `start`. The argument is the result of judging the parents, and the result is passed to the
    children. Where `go_on` is False, drafting ends below the children; without `keeps`, below the nodes themselves.
    A condition reads distributions and the tokens drawn above them, never the tokens drawn from them. So the existing
    nodes still follow the drafter's distribution, and exact verification rules stay exact. It may read other rows at
    the same level.
    """

    judge: Callable[[PyTree, Fed], tuple[PyTree, Array]]
    keeps: bool = True  # True: tokens drawn at the stop stay in the draft
    start: PyTree = ()  # numbers, the value of the root
    reads_costs: bool = False  # True: `judge` reads `Fed.pass_costs`


@dataclass(frozen=True)
class Builder:
    """A rule for the growth of a tree. Node 1 + d * width + w is slot w of level d + 1.

    `expand(state, level, parents) -> (state, Level)` drafts the children of `parents`, drawn from their distributions
    without the excluded tokens. `finish(state, parents, valid) -> int32[B, num_nodes]` returns the nodes of the tree:
    the root (0) first, parents before children, and -1 for no node.
    """

    init: Callable[[int], PyTree]  # (batch) -> state
    expand: Callable[[PyTree, Array, Parents], tuple[PyTree, Level]]
    finish: Callable[[PyTree, Array, Array], Array]
    num_nodes: int  # N, root included
    max_depth: int
    width: int  # W
    frontier: int  # F
    levels: int  # drafter passes, including the one over the root
    draws: Draws
    widths: tuple[int, ...] = ()  # verify widths worth compiling besides N, from `verify_widths`
    warped: bool = True  # False: `log_q` is at temperature 1, for any temperature of the target
    stop: Stop | None = None
    is_open: Callable[[PyTree], Array] | None = None  # (state) -> bool[B]: draws remain at nodes not in `feed`
    excludes: int = 0  # number of tokens that a level excludes from each distribution
    prunes: bool = False  # `expand` may select no node to draft below, before the last level
    keep_logits: bool = False  # return `logits` of sampled trees in greedy and coupled decoding too
    # For callers that order the nodes themselves: return the drafter's acceptance estimate of each node, and keep all
    # nodes, valid or not, in the order of `finish`.
    scored: bool = False
    keep_confidence: bool = False  # return `confidence` of trees, from drafters with a confidence head
    sized: bool = False  # the drafter cuts each tree to the size with the most tokens per second
    # (state) -> arrays [B, size - 1, ...] of all nodes behind the root, which `grow` returns for those of the tree
    details: Callable[[PyTree], PyTree] | None = None
    # (depth) -> Builder, for trees from one distribution per depth: the same tree with at most `depth` levels. Only
    # drafters whose slots do not see each other's tokens can grow such a tree. Each level feeds one node.
    shorten: Callable[[int], Builder] | None = None

    @property
    def size(self) -> int:
        """Return the number of nodes during growth, root included."""
        return 1 + self.levels * self.width

    @property
    def places(self) -> int:
        """Return the number of tokens fed to the drafter: the root and the frontiers of all levels except the last."""
        return 1 + (self.levels - 1) * self.frontier


@functools.cache
def with_stop(
    builder: Builder, stop: Stop | None, *, keep_logits: bool = False, keep_confidence: bool = False
) -> Builder:
    """Return `builder` with a stop condition.

    Args:
      keep_logits: return `logits` of drawn trees in greedy and coupled decoding too, for callers that read them.
      keep_confidence: return the drafter's trained confidence in each node.
    """
    return replace(builder, stop=stop, keep_logits=keep_logits, keep_confidence=keep_confidence)


STEPS = 1, 4, 8, 16, 32


def verify_widths(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return verify widths worth compiling for trees that end early, because of a limit or a stop condition.

    Each width is a branch of the target pass. Widths start at 1, 4, 8, 16 and 32 nodes, since a pass over 4 tokens
    hardly costs more than one over 2. No width exceeds three quarters of the complete tree.

    Args:
      sizes: possible node counts of such trees, increasing; the last one is that of the complete tree.
    """
    largest = sizes[-1]
    widths = {next(size for size in sizes if size >= min(step, largest)) for step in STEPS}
    return tuple(sorted(size for size in widths if 4 * size <= 3 * largest))
