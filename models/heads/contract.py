"""The contract of draft heads: pure functions over the target's features and the drafted tokens.

A text has n tokens x_0 ... x_{n-1}. The last one, the root of the draft, has not been through the target yet. Features
and tokens are aligned like this:

    position         0        1              n-2       n-1       n         n+1
    token           x_0      x_1     ...    x_{n-2}   root     draft 1   draft 2
    feature         f_0      f_1     ...    f_{n-2}   (computed by the target in the next pass)
    pair t       (f_0,x_1) (f_1,x_2) ... (f_{n-2},root)
    predicts        x_2      x_3     ...     draft 1

There are n - 1 pairs, and the last one contains the root, so a head can draft without another pass of the target. A
predicted feature replaces the one that is not computed yet: (f^, draft 1) predicts draft 2, at position n - 1, and so
on. These predictions are scratch: after the target pass, the head reads the pairs of the accepted tokens again, with
true features.

A head is two files: `specjax.models.heads.<head>` has the mathematics, the row of the catalogue and a `HeadKind`, and
`specjax.models.loading.heads.<head>` has the checkpoint format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.catalog import Method
from specjax.types import Array, DraftOutput, Output, PyTree


class FeaturePairs(NamedTuple):
    """Features of committed tokens, each with the token that followed it.

    The first `count[b]` pairs belong to row b, and they continue the pairs that the head read before.

    In training `count` is int32[B, R]: the head reads one text into B R memories, each after a different number of its
    pairs. The keys and values are shared by all rows of a text. Only `start` and `follow` accept such memories, and
    they then draft from R positions of each text at once. The memories are new, and one row may hold several texts;
    `first` then marks the first pair of each pair's own text.
    """

    features: Array  # [B, T, F], the target's `features_of`
    tokens: Array  # int32[B, T]
    count: Array  # type: ignore[assignment]  # int32[B] or [B, R]
    first: Array | None = None  # int32[B, T], the first pair that each pair attends to; None: 0
    positions: Array | None = None  # int32[B, T], of the features, if training shifts them; None: the pairs' numbers
    keys: Array | None = None  # key[B], of what a head draws in its training; None: it is not trained


class DraftedNodes(NamedTuple):
    """Drafted nodes that a head reads to predict the tokens after them."""

    tokens: Array  # int32[B, F]
    depth: Array  # int32[B, F], 1: children of the root
    place: Array  # int32[], their first place in the scratch; the root has place 0
    parent: Array  # int32[B, F], the place of each node's parent
    seen: Array  # bool[B, F, places], the places of the drafted ancestors, without the root and the node itself


Stretches = tuple[tuple[int, int], ...]
"""Ranges of the target's layers: the number of layers before the first one of a range, and up to its last one."""


def _no_layers(num_layers: int) -> Stretches:
    return ()


class StateDraft(NamedTuple):
    """The functions of a head without its output layer, for logits that are too large to be stored.

    `start` and `follow` are those of `Head`, but return the states that the output layer reads in place of logits:
    pytrees of arrays [B, ...] and [B, F, ...].

    `logits(params, states, context) -> float[B, R, V]` applies the output layer to the states [B, R, ...] of R nodes.
    """

    start: Callable[..., tuple[PyTree, PyTree]]
    follow: Callable[..., tuple[PyTree, PyTree]]
    logits: Callable[..., Array]


class Head(NamedTuple):
    """A draft head as pure functions. Equal configs give the same object (`functools.cache`), so it is hashable.

    `init_memory(params, context, batch, capacity) -> memory` returns an empty memory with room for `capacity` pairs.

    `read(params, memory, pairs, context) -> memory` reads committed pairs. Rows with a count of 0 stay unchanged.

    `start(params, memory, context, places) -> (scratch, logits float32[B, V])` predicts the token after the root. The
    scratch has room for `places` nodes, root included. A head with a trained confidence returns a `DraftOutput` instead
    of logits, here and in `follow`.

    `follow(params, scratch, drafted, context) -> (scratch, logits float32[B, F, V])` predicts the tokens after drafted
    nodes. The logits of tokens that the head cannot draft are -inf.

    `soft_prompts(params) -> [depths, copies, D]` exists for heads without a pass of their own. It returns vectors that
    the target reads below a token, each below the vector of the same copy at the previous depth. The concatenated
    `Output.hidden` of these vectors are the features of that token.

    `target_layers(num_layers)` returns the layers of the target that one pass of the head runs. Each stretch is one
    target pass that skips all other layers (`types.Sublayers`).

    `feature(scratch, place) -> [B, D]` returns the predicted feature of a node, for heads that feed features back. Only
    losses use it.

    `training_head` is a head with the same parameters for training, if the logits of this one leave most tokens out.

    `in_states` are the same functions without the output layer; None: the logits of every draft are stored.

    `axes(memory)` returns the position of the batch axis in each array, like `Hooks.axes`.
    """

    init_memory: Callable[..., PyTree]
    read: Callable[..., PyTree]
    start: Callable[..., tuple[PyTree, Array | DraftOutput]]
    follow: Callable[..., tuple[PyTree, Array | DraftOutput]]
    kind: str  # the method of the catalogue that drafts with this head
    config: Any
    taps: tuple[int, ...] = ()  # streams of the target that are concatenated into features; (): `Output.hidden`
    max_depth: int | None = None  # longest chain that it can draft; None: any length
    trained_depth: int | None = None  # chain length in its training, if it has no limit; None: that of the recipe
    soft_prompts: Callable[[PyTree], Array] | None = None
    is_single_pass: bool = False  # `start` computes the predictions of all depths, and `follow` costs hardly anything
    levels_per_pass: int = 1  # tree levels that one pass of its layers predicts
    target_layers: Callable[[int], Stretches] = _no_layers
    reads_keys: bool = False  # its layers attend to keys in `Context.cache`
    reads_images: bool = False  # it reads `Context.images`
    feature: Callable[[PyTree, int], Array] | None = None
    training_head: Any = None  # Head; None: this head itself
    in_states: StateDraft | None = None
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    shardings: Callable[[PyTree, Mesh], PyTree] | None = None  # (memory, mesh); None: rows over the axis "data"

    @property
    def reads_cache(self) -> bool:
        """Return True if the head drafts on the target's own cache, by its layers, its keys or by soft prompts."""
        return self.reads_keys or self.target_layers is not _no_layers or self.soft_prompts is not None

    def features_of(self, output: Output) -> Array:
        """Return the features [B, T, F] of a target pass that recorded these taps."""
        return features_of(output, self.taps)


def features_of(output: Output, taps: tuple[int, ...]) -> Array:
    """Return the features [B, T, F] that a head with these taps reads from a target pass."""
    return jnp.concatenate(output.taps, -1) if taps else output.hidden


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftHead:
    """A head with its parameters. It is a pytree with the parameters as leaves."""

    head: Head = field(metadata={"static": True})
    params: PyTree

    replace = replace


def has_confidence(draft: Any) -> bool:
    """Return True for a `DraftHead` with a trained confidence."""
    return isinstance(draft, DraftHead) and getattr(draft.head.config, "confidence", "no") != "no"


class HeadKind(NamedTuple):
    """A kind of head: its row of the catalogue, its functions, and the shapes that a user may change."""

    method: Method
    module: Callable[..., Any]  # (config, *, rngs) -> nnx.Module
    head: Callable[[Any], Head]  # (config)
    of_target: Callable[..., Any]  # (the target's config, **changes) -> the config that the authors train
    numbers: tuple[str, ...] = ()  # changes that are whole numbers
    taps: bool = False  # True: the user may choose the streams of the target that it reads
    flags: tuple[str, ...] = ()  # changes that are yes or no
    counts: tuple[str, ...] = ()  # changes that are whole numbers or 0
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()  # changes that are words, each with all of its words
    trains: bool = True  # specjax can train heads of this kind

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the names that `parse_change` accepts."""
        words = tuple(name for name, _ in self.choices)
        return (("taps",) if self.taps else ()) + self.numbers + self.counts + self.flags + words

    def parse_change(self, text: str) -> tuple[str, Any] | None:
        """Parse `num_layers=1`, `taps=2+15+27`, `embeds=no` or `norm_taps=each` into a name and a value.

        Returns: None for other texts.
        """
        name, _, value = text.partition("=")
        words = dict(self.choices)
        if name in words:
            return (name, value) if value in words[name] else None
        if name in self.flags:
            return (name, YES_NO[value]) if value in YES_NO else None
        parts = value.split("+") if name == "taps" else [value]
        if name not in self.changes or not all(part.isdecimal() for part in parts):
            return None
        numbers = tuple(map(int, parts))
        if name == "taps":
            return name, numbers
        return (name, numbers[0]) if numbers[0] or name in self.counts else None

    @property
    def forms(self) -> tuple[str, ...]:
        """Return one example of each change, as `parse_change` reads it."""
        forms = {"taps": "2+15+27"} | dict.fromkeys(self.flags, "no")
        forms |= {name: "|".join(words) for name, words in self.choices}
        return tuple(f"{name}={forms.get(name, 'N')}" for name in self.changes)


YES_NO = {"yes": True, "no": False}
