"""What grows a tree, and what it is told: builders, stop rules, and the drafter that gives logits.

W nodes are drafted on a level, F of them, its frontier, have nodes drafted below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.numerics import sampling
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, DraftOutput, Draws, PyTree

COLD = 2.0**-27
"""The temperature at which noise, which is between -4 and 23, no longer decides between any two float32 of about 1."""


class Parents(NamedTuple):
    """The nodes whose children are to be drafted, as the builder chose them in the level before."""

    ids: Array  # int32[B, F], node numbers; 0 is the root
    valid: Array  # bool[B, F], whether to draft below it: it exists, lies above the limit and was not stopped
    log_q: Array  # float32[B, F, V], normalised: their children's distribution, warped
    keys: Array | None  # [B, F], of the children's noise; None: no noise, draft the likeliest tokens
    coupled: bool  # the noise is the target's own: one field per position
    is_greedy: Array | None = None  # bool[B], which rows draft the likeliest tokens all the same; None: none

    def noise(self, race: int = 0) -> Array:
        """Gumbel noise float32[B, F, V] for a draw of the children; each race is an independent draw."""
        assert self.keys is not None
        keys = sampling.fold_in(self.keys, race) if race else self.keys
        return sampling.noise(keys, self.log_q.shape[-1])

    def best(self, k: int, *, noisy: bool = True) -> tuple[Array, Array]:
        """k children of each, drawn without replacement in this order (Gumbel-top-k): int32[B, F, k], and their scores.

        The likeliest where there is no noise, or none is wanted. float32[B, F, k]: -inf where there is no such child.
        """
        if not noisy or self.keys is None or self.is_greedy is None:
            return gumbel_topk(self.keys if noisy else None, self.log_q, k)
        heat = jnp.where(self.is_greedy, COLD, 1.0)[:, None]
        return gumbel_topk(self.keys, self.log_q, k, temperature=jnp.broadcast_to(heat, self.ids.shape))

    def unless_greedy(self, drawn: PyTree, likeliest: PyTree) -> PyTree:
        """Arrays [B, ...]: `likeliest` of rows that draft the likeliest tokens, `drawn` of the others."""
        if self.keys is None or self.is_greedy is None:
            return likeliest if self.keys is None else drawn
        of_row = lambda x: self.is_greedy.reshape(-1, *[1] * (x.ndim - 1))
        return jax.tree.map(lambda x, y: jnp.where(of_row(x), y, x), drawn, likeliest)


class Level(NamedTuple):
    """W drafted nodes. Siblings stand in draft order."""

    tokens: Array  # int32[B, W]
    parents: Array  # int32[B, W], node numbers
    valid: Array  # bool[B, W]
    feed: Array  # int32[B, F], the slots of this level to draft below: the next frontier


class Frontier(NamedTuple):
    """Drafted nodes for the drafter to read, so that it can say what follows them."""

    place: Array  # int32[], how many tokens it was fed before, the root included
    tokens: Array  # int32[B, F]
    depth: Array  # int32[B, F]
    seen: Array  # bool[B, F, places], which of the tokens fed before each may see
    below: Array  # bool[B, F], whether anything is drafted below; the logits of the others are not used

    @property
    def mask(self) -> Array:
        """bool[B, F, places + F]: what each may see of the tokens fed before and of these, of which only itself."""
        among = jnp.broadcast_to(jnp.eye(self.tokens.shape[1], dtype=bool), (*self.tokens.shape, self.tokens.shape[1]))
        return jnp.concatenate([self.seen, among], 2)


FeedFn = Callable[[PyTree, Frontier], tuple[PyTree, Array | DraftOutput]]
"""The drafter: `feed(memory, frontier) -> (memory, logits float32[B, F, V])`, or with its confidence."""


class Fed(NamedTuple):
    """Nodes that the drafter has just read, as a stop rule sees them."""

    log_q: Array  # float32[B, F, V], normalised: their children's distribution, as they will be drawn
    depth: Array  # int32[B, F]
    logits: Array  # [B, F, V], what the drafter said
    confidence: Array | None = None  # float32[B, F], of the drafters that give one
    accepted: Array | None = None  # float32[B, F], of the nodes themselves, likewise


class Stop(NamedTuple):
    """When to draft no further; `specjax.trees.stops` has the rules.

    `judge(value, fed) -> (value, go_on bool[B, F])` judges the nodes of a pass by what their parents left them in
    `value`, numbers float32[B, F] in the structure of `start`; those it returns are for their children. Where it does
    not go on, nothing is drafted below the children, or, without `keeps`, below the nodes themselves. It reads
    distributions and what was drawn above them, never what is drawn from them: so what exists of a draft is drawn as
    the drafter says, and exact rules stay exact.
    """

    judge: Callable[[PyTree, Fed], tuple[PyTree, Array]]
    keeps: bool = True  # the tokens drawn at the stop stay in the draft
    start: PyTree = ()  # numbers, the root's value


@dataclass(frozen=True)
class Builder:
    """How a tree grows. Node 1 + d * width + w is slot w of level d + 1.

    `expand(state, level, parents) -> (state, Level, log_q)`: draft the children of `parents`; `log_q` float32[B, F, V]
    is what they were drawn from. `finish(state, parents, valid) -> int32[B, num_nodes]`: the nodes of the tree, parents
    first, the root (0) at the front; -1 for none.
    """

    init: Callable[[int], PyTree]  # (batch) -> state
    expand: Callable[[PyTree, Array, Parents], tuple[PyTree, Level, Array]]
    finish: Callable[[PyTree, Array, Array], Array]
    num_nodes: int  # N, root included
    max_depth: int
    width: int  # W
    frontier: int  # F
    levels: int  # passes of the drafter, the root's included
    draws: Draws
    widths: tuple[int, ...] = ()  # verify widths worth compiling besides N, from `narrower`
    warped: bool = True  # False: `log_q` is at temperature 1, whatever the target's is
    stop: Stop | None = None
    is_open: Callable[[PyTree], Array] | None = None  # (state) -> bool[B]: draws are left elsewhere than below `feed`
    keep_logits: bool = False  # give `logits` of sampled trees in greedy and coupled decoding too
    # For what orders the nodes itself: say how likely the drafter holds each to be right, and leave all of them, valid
    # or not, where `finish` puts them.
    weighed: bool = False

    @property
    def size(self) -> int:
        """Nodes while it grows, the root included."""
        return 1 + self.levels * self.width

    @property
    def places(self) -> int:
        """Tokens that the drafter is fed: the root and the frontiers of all levels but the last."""
        return 1 + (self.levels - 1) * self.frontier


@functools.cache
def with_stop(builder: Builder, stop: Stop | None, *, keep_logits: bool = False) -> Builder:
    """`builder` with a stop rule.

    keep_logits: give `logits` of drawn trees in greedy and coupled decoding too, for what reads them.
    """
    return replace(builder, stop=stop, keep_logits=keep_logits)


STEPS = 1, 4, 8, 16, 32


def narrower(sizes: Sequence[int]) -> tuple[int, ...]:
    """Verify widths worth compiling, each a branch of the target's pass, for trees cut short by a limit or a stop rule.

    sizes: rising, how many nodes such trees have; the last is the whole tree. Of these the first from 1, 4, 8, 16 and
      32 nodes on: a pass over 4 hardly costs more than one over 2. None of more than three quarters of the whole tree.
    """
    most = sizes[-1]
    found = {next(size for size in sizes if size >= min(step, most)) for step in STEPS}
    return tuple(sorted(size for size in found if 4 * size <= 3 * most))
