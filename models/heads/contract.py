"""What every learned head is: pure functions over the target's states of the text and the tokens drafted after it.

How features and tokens are aligned, for a text of n tokens, x_0 ... x_{n-1}, of which the last, the root of every
draft, has not been through the target yet:

    position         0        1              n-2       n-1       n         n+1
    token           x_0      x_1     ...    x_{n-2}   root     draft 1   draft 2
    feature         f_0      f_1     ...    f_{n-2}   (the target says it of the root in this very round)
    pair t       (f_0,x_1) (f_1,x_2) ... (f_{n-2},root)
    what it says    x_2      x_3     ...     draft 1

So there are n - 1 pairs, the last of them holds the root, and a head can draft without asking the target first. What is
predicted replaces features that are not there yet: (f^, draft 1) says draft 2, at position n - 1, and so on. Those are
scratch: after the target's pass the pairs of the accepted tokens are read with true features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.types import Array, Output, PyTree, Said


class Pairs(NamedTuple):
    """Features of committed tokens, each with the token that followed it. The first `count[b]` of them belong to row b,
    and continue what was read before.

    Or `count` is int32[B, R]: what is read is the memory of B R rows, each as it was after so many of the pairs of one
    text, of which the keys and values are those of all its rows. Only `start` and `follow` take it: they then draft
    from R places of each text at once, which is what heads are trained by. Nothing was read before, and several texts
    may stand in one row, in which the places before `first` are those of another.
    """

    features: Array  # [B, T, F], the target's `features_of`
    tokens: Array  # int32[B, T]
    count: Array  # type: ignore[assignment]  # int32[B] or [B, R]
    first: Array | None = None  # int32[B, T], the first pair that each of them sees; None: 0


class Drafted(NamedTuple):
    """Drafted nodes to read, so that the head can say what follows each of them."""

    tokens: Array  # int32[B, F]
    depth: Array  # int32[B, F], 1: children of the root
    place: Array  # int32[], where in the scratch they stand; the root stands at 0
    parent: Array  # int32[B, F], the place of each one's parent
    seen: Array  # bool[B, F, places], the places of its drafted ancestors, without the root and itself


Stretches = tuple[tuple[int, int], ...]
"""Layers of the target: behind which each begins, and behind which it ends."""


def _none(num_layers: int) -> Stretches:
    return ()


class Head(NamedTuple):
    """A learned drafter as pure functions. Hashable: equal configs give the same object (`functools.cache`).

    `begin(params, context, batch, capacity) -> memory` of no pairs, with room for `capacity`.

    `read(params, memory, pairs, context) -> memory` takes in committed pairs; rows of which `count` is 0 stay as they
    are.

    `start(params, memory, context, places) -> (scratch, logits float32[B, V])`: what follows the root, by the pairs
    read. The scratch has room for `places` nodes, the root included. A head that knows how sure it is gives a `Said`
    in place of logits, here and in `follow`.

    `follow(params, scratch, drafted, context) -> (scratch, logits float32[B, F, V])`: what follows each drafted node.
    Logits are -inf of tokens that the head cannot draft.

    `prompts(params) -> [depths, copies, D]`, of a head that has no pass of its own: vectors that the target reads below
    a token, each below that of its copy at the depth before. What the target's `Output.hidden` is of them, joined, are
    the features of that token.

    `runs(num_layers)`: the layers of a target of so many that a pass of the head runs, each stretch as a pass of the
    target that skips all others (`types.Sublayers`).

    `feature(scratch, place) -> [B, D]`: what it said in place of the feature of the node there, of a head that feeds
    such back. Losses read it, and nothing else.

    `learns_as`: the head of the same parameters whose logits are to be learnt, where its own leave most tokens out.

    `axes(memory)` has the place of B in the shape of each array, as `Drafter.axes`.
    """

    begin: Callable[..., PyTree]
    read: Callable[..., PyTree]
    start: Callable[..., tuple[PyTree, Array | Said]]
    follow: Callable[..., tuple[PyTree, Array | Said]]
    kind: str  # the method of the catalogue that drafts with it
    config: Any
    taps: tuple[int, ...] = ()  # streams of the target that are its features, joined; none: `Output.hidden`
    deepest: int | None = None  # how many tokens it can draft after one another; None: any number
    prompts: Callable[[PyTree], Array] | None = None
    at_once: bool = False  # `start` computes what it says of all depths, and `follow` hardly anything
    levels: int = 1  # of a tree, of which one pass of its layers says the tokens
    runs: Callable[[int], Stretches] = _none
    feature: Callable[[PyTree, int], Array] | None = None
    learns_as: Any = None  # Head; None: itself
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    shardings: Callable[[PyTree, Mesh], PyTree] | None = None  # (memory, mesh); None: its rows over "data"

    @property
    def reads_cache(self) -> bool:
        """Whether it runs layers of the target, or the target runs its prompts: both on the target's own cache."""
        return self.runs is not _none or self.prompts is not None

    def features_of(self, output: Output) -> Array:
        """[B, T, F] of a pass of the target with these taps."""
        return features_of(output, self.taps)


def features_of(output: Output, taps: tuple[int, ...]) -> Array:
    """[B, T, F]: what a head with these taps has of a pass of the target."""
    return jnp.concatenate(output.taps, -1) if taps else output.hidden


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftHead:
    """A head with its parameters. A pytree: the parameters are its leaves."""

    head: Head = field(metadata={"static": True})
    params: PyTree

    replace = replace
