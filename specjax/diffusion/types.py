"""Contracts of diffusion decoding: a canvas of tokens that is filled in, several columns per pass.

Shapes, in addition to those of `specjax.types`: N columns of the canvas and W columns of the window. The window is the
part of the canvas that a pass may decide. The tokens of the canvas are `DecodeState.tokens`, with L = N. A *column* is
a position of the text. A column is *masked* until it is decided. The stored token of a masked column is
arbitrary, because the model reads the mask token there.

One pass works as follows. The schedule places the window, and the cache runs the model over it. A score may change the
logits. The schedule bounds the columns that may be decided and gives a quota. The rule decides columns, and a control
may end the row early.

    canvas ─place→ window ─look→ logits ─transform→ Proposal ─bound→ (eligible, quota) ─select→ canvas ─act→

All parts treat rows independently: a row's text depends only on its prompt, its key and the parts. Prompts are padded
on the right, so column numbers do not depend on the batch. Noise is drawn from (row key, column, number of decided
columns), so the batch, the cache and the order of passes do not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.requirements import check_later_tokens
from specjax.numerics.sampling import fold_in
from specjax.types import STATIC, Array, Model, PyTree, Target

Attention = Literal["full", "block_causal"]
Alignment = Literal["same", "shifted"]
Seeding = Literal["all_masked", "seed_and_mask"]

RULE = 2
"""Purpose of the random keys of rules, in addition to DRAFT and VERIFY of `specjax.numerics.sampling`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Denoiser:
    """A model used as a denoiser. It is a pytree whose only leaves are the parameters.

    mask_token: the token that the model reads at a masked column, and that is never proposed. None: the model has no
    mask token and decodes blocks of one column.

    attention: "full": every column attends to the whole canvas. "block_causal": the columns of a block attend to each
    other and to earlier blocks, so that the keys and values of a finished block are final.

    block: columns of such a block, counted from column 0. A block of 1 is autoregressive decoding.

    alignment: "same": the output row of a column predicts that column. "shifted": the row of the previous column
    predicts it, as in models derived from autoregressive ones.

    seeding: "all_masked": a block starts without tokens. "seed_and_mask": the pass that reads the previous finished
    block predicts the first column of a block.
    """

    model: Model = field(metadata=STATIC)
    params: PyTree
    mask_token: int | None = field(metadata=STATIC)
    attention: Attention = field(metadata=STATIC, default="full")
    block: int | None = field(metadata=STATIC, default=None)
    alignment: Alignment = field(metadata=STATIC, default="same")
    seeding: Seeding = field(metadata=STATIC, default="all_masked")

    replace = replace

    def __post_init__(self):
        for name, kinds in (("attention", Attention), ("alignment", Alignment), ("seeding", Seeding)):
            if getattr(self, name) not in get_args(kinds):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kinds))}, not {getattr(self, name)!r}")
        for name in ("mask_token", "block"):
            if not isinstance(getattr(self, name), Integral | NoneType):
                raise UsageError(f"{name} must be a whole number or None, not {getattr(self, name)!r}")
        causal = self.attention == "block_causal"
        if causal and (self.block is None or self.block < 1):
            raise UsageError(f"a block-causal denoiser needs a block of at least 1, not {self.block}; give block=")
        if not causal and self.block is not None:
            raise UsageError('block needs block-causal attention; leave block out, or set attention="block_causal"')
        if not causal and self.seeding == "seed_and_mask":
            raise UsageError(
                'seeding="seed_and_mask" needs block-causal attention; leave it out, or set attention="block_causal"'
            )
        if causal and self.alignment == "shifted" and self.seeding == "all_masked":
            raise UsageError(
                "a block-causal denoiser with shifted logits needs seeding='seed_and_mask': nothing else predicts the "
                "first column of a block"
            )
        if self.mask_token is None and self.block != 1:
            raise UsageError(
                "a denoiser needs a mask_token, the token that it reads at masked columns; give mask_token="
            )
        if self.mask_token is not None and not 0 <= self.mask_token < self.model.vocab_size:
            raise UsageError(
                f"mask_token {self.mask_token} is outside the vocabulary of {self.model.vocab_size} tokens"
            )
        if self.block != 1:
            check_later_tokens(self.model, "a denoiser")
        if self.model.unembed is None:
            raise UsageError(f"the model {self.model.name} has no `unembed`, which a denoiser needs to compute logits")

    @property
    def is_causal(self) -> bool:
        """True if finished blocks are final."""
        return self.attention == "block_causal"

    @property
    def is_shifted(self) -> bool:
        """True if the output row before a column predicts it."""
        return self.alignment == "shifted"

    @property
    def blank(self) -> int:
        """Input token of masked columns. It is arbitrary for a model without a mask token."""
        return self.mask_token or 0

    @property
    def target(self) -> Target:
        """The model as a `Target`."""
        return Target(self.model, self.params)


def autoregressive(target: Target) -> Denoiser:
    """Return a causal model as a denoiser with blocks of one column."""
    return Denoiser(target.model, target.params, None, "block_causal", 1, "shifted", "seed_and_mask")


class Canvas(NamedTuple):
    """The text of each row: prompt, decided columns, masked columns, and columns past the end."""

    tokens: Array  # int32[B, N]
    open: Array  # bool[B, N], columns that are not decided yet
    start: Array  # int32[B], first column after the prompt
    end: Array  # int32[B], number of columns that exist, including those of the last block after the text
    origin: Array  # int32[B], column that blocks are counted from: 0 for block-causal models, else the first new one
    decided_at: Array  # int32[B, N], index of the pass that decided a column; -1: none yet, -2: the prompt
    passes: Array  # int32[B], number of passes so far

    @property
    def first_open(self) -> Array:
        """Number of columns before the first open one, int32[B]. They are final if the rule never revises."""
        columns = jnp.arange(self.tokens.shape[1])
        return jnp.min(jnp.where(self.open, columns, self.end[:, None]), 1)

    @property
    def decided(self) -> Array:
        """Number of decided columns after the prompt, int32[B]."""
        return jnp.sum(self.decided_at >= 0, 1, dtype=jnp.int32)


class Window(NamedTuple):
    """The columns that a pass may decide."""

    start: Array  # int32[B], its first column
    entered: Array  # bool[B], True in the first pass over this window
    active: Array  # bool[B], rows that have not ended
    width: int  # W


class View(NamedTuple):
    """The window in one pass, as the parts of a procedure read it."""

    start: Array  # int32[B], its first column
    columns: Array  # int32[B, W]
    tokens: Array  # int32[B, W]; where `open`, the mask token
    exists: Array  # bool[B, W], columns that the canvas has; the values of other columns are arbitrary
    open: Array  # bool[B, W], columns that are not decided
    eligible: Array  # bool[B, W], columns that may be decided now: predicted, and within the schedule's bounds
    revisable: Array  # bool[B, W], columns that were decided in this window, in rows that have not ended
    entered: Array  # bool[B], True in the first pass over this window
    active: Array  # bool[B], rows that have not ended
    keys: Array  # key[B, W], keys that tokens are drawn with, from (row key, column, number of decided columns)
    passes: Array  # int32[B], number of passes before this one
    eos: Array | None = None  # int32[E], or per row int32[B, E], tokens that end a row; None: no tokens
    canvas: Canvas | None = None  # canvas of the window, before this pass

    def ends(self, token: Array) -> Array:
        """Return bool[B, T]: True for tokens [B, T] that end a row."""
        return jnp.zeros(token.shape, bool) if self.eos is None else is_eos(self.eos, token)

    @property
    def rule_keys(self) -> Array:
        """Random keys [B, W] for rules, independent of the noise of the tokens."""
        return fold_in(self.keys, RULE)


def is_eos(eos: Array, token: Array) -> Array:
    """Return bool[B, T]: True for tokens [B, T] that are among eos [E], or per row [B, E]."""
    ids = eos if eos.ndim > 1 else eos[None]
    return jnp.any(token[:, :, None] == ids[:, None, :], -1)


class Proposal(NamedTuple):
    """The model's proposal for each column of the window. `specjax.diffusion.measures` computes confidences."""

    token: Array  # int32[B, W], drawn from `warped`
    logits: Array  # float32[B, W, V], used for confidences: not warped, without noise, -inf for the mask token
    warped: Array  # float32[B, W, V], after temperature, top-k, top-p and min-p; at temperature 0 a point mass
    filtered: Array  # float32[B, W, V], `warped`, but at temperature 0 the logits after top-k, top-p and min-p
    greedy: Array  # bool[B], rows with temperature 0, in which nothing is drawn
    weight: Array | None = None  # float32[B, W], factor of the confidences; None: 1


class CanvasOutput(NamedTuple):
    """The model's output for the whole canvas, for controls that need it."""

    best: Array  # int32[B, N], most likely token
    gap: Array  # float32[B, N], difference of the two largest logits


class WindowOutput(NamedTuple):
    """The output of the model for the window."""

    hidden: Array  # [B, W, D], row i predicts column i of the window, for any alignment
    predicted: Array  # bool[B, W], columns that have a valid row
    columns: Array  # int32[B], columns of the row's canvas in this pass; they depend on no other row
    computed: Array  # int32[B], columns that the program computes for the row, padding included
    canvas: Array | None = None  # [B, N, D], the same for the whole canvas, if the cache computes all of it
    # [B, W, D], hidden states of the logits u of guidance, u + (guidance + 1)(l - u); None: no guidance
    against: Array | None = None
    guidance: float | Array | None = None  # scale of guidance


def _nothing(*_: Any) -> PyTree:
    return ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """The position of the window, and the number of columns to decide.

    `place(state, canvas) -> (start[B], state)` returns the first column of the window, before the pass. `bound(state,
    canvas, proposal, view) -> (end[B], quota[B], state)` runs after it. The window's columns below `end` are eligible,
    and a rule with a quota decides `quota` of them. `view.eligible` is not bounded yet.
    """

    width: int | None = field(metadata=STATIC)  # W; None: the maximum number of new columns
    place: Callable[..., tuple[Array, PyTree]] = field(metadata=STATIC)
    bound: Callable[..., tuple[Array, Array, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width)
    params: PyTree = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasCache:
    """The columns that a pass computes, and the cache of columns that earlier passes computed.

    `init(denoiser, canvas, width) -> state` may read the prompts. `look(denoiser, state, canvas, window) ->
    (WindowOutput, state)` runs the model over the window. `exact` is True if the result equals that of a pass over the
    whole canvas without a cache. A guarantee of the procedure without a cache then holds with it too.

    `several(denoiser, state, canvases, window) -> (WindowOutput, state)` runs the model on canvases [d, B, ...] in one
    pass. They are equal before the window. In its output, hidden, predicted and canvas have the leading axis d too. The
    state is that of `look`. None: not supported.

    `check(procedure)` raises a UsageError for a procedure that the cache does not support.
    """

    look: Callable[..., tuple[WindowOutput, PyTree]] = field(metadata=STATIC)
    attention: Attention = field(metadata=STATIC)
    exact: bool = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)
    name: str = field(metadata=STATIC, default="memory")
    axes: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)  # (denoiser, state); None: rows first
    several: Callable[..., tuple[WindowOutput, PyTree]] | None = field(metadata=STATIC, default=None)
    check: Callable[..., None] | None = field(metadata=STATIC, default=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Score:
    """A change of the model's proposals before the rule reads them.

    `transform(params, state, logits[B, W, V], view) -> (logits, state)` changes logits. `warp(params, logits, sampling,
    view) -> float32[B, W, V]` replaces `specjax.numerics.sampling.warp`, which gives the distributions that tokens are
    drawn from. `weigh(params, state, proposal, view) -> float32[B, W]` returns factors of the confidences. Each may be
    None. `learn(params, state, view, take, token) -> state` receives the decided columns. `check(params, count, eos)`
    raises a UsageError if no text of `count` tokens is possible. It also raises one if a text that ends with one of
    `eos` int32[E] may be invalid.
    """

    transform: Callable[..., tuple[Array, PyTree]] | None = field(metadata=STATIC, default=None)
    warp: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    weigh: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width, vocab)
    learn: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)
    check: Callable[..., None] | None = field(metadata=STATIC, default=None)
    params: PyTree = ()

    replace = replace


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColumnRule:
    """The choice of the eligible columns to decide.

    `select(params, state, proposal, view, quota[B]) -> (take bool[B, W], token int32[B, W], state)` selects only
    eligible columns, and at least one in each row that has any. A rule with `settled(params, state) -> bool[B]` may
    also change the tokens of columns that it decided in this window (`view.revisable`). Until `settled` is true, the
    window does not move and none of its columns is final.
    """

    select: Callable[..., tuple[Array, Array, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width, vocab)
    settled: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    params: PyTree = ()

    replace = replace


class ControlAction(NamedTuple):
    """The action of a control."""

    fill: Array | None = None  # bool[B], decide all masked columns now, with their most likely tokens
    end: Array | None = None  # int32[B], new number of columns that exist


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Control:
    """A condition that ends a row early.

    `act(params, state, canvas, proposal, view, wide) -> (ControlAction, state)` runs after the rule, and `canvas`
    includes its decisions. `wide` requests the `CanvasOutput`, which needs a cache that computes the whole canvas.
    """

    act: Callable[..., tuple[ControlAction, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width)
    wide: bool = field(metadata=STATIC, default=False)
    params: PyTree = ()

    replace = replace


class Verify(NamedTuple):
    """A replacement of `specjax.diffusion.loop.decide` that may run several passes per step.

    `decide(parts, state, canvas, window, slots) -> loop.StepOutcome` decides the columns of a step. Its state is
    `slots.verify`, initially `init(parts, canvas)`. `exact_memory`: the guarantee requires an exact cache. `several`:
    `decide` requires a cache with `several`. `memory`: the only supported cache, whose state `decide` reads.
    `check(procedure)` raises a UsageError for parts that it would ignore. `mode(denoiser) -> Denoiser` returns the
    denoiser with blocks of one whose text the guarantee refers to. None: it refers to the procedure without `verify`.
    """

    decide: Callable[..., Any]
    init: Callable[..., PyTree] = _nothing
    exact_memory: bool = True
    several: bool = False
    memory: CanvasCache | None = None
    check: Callable[..., None] | None = None
    mode: Callable[[Denoiser], Denoiser] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Procedure:
    """A decoding procedure composed of parts. `specjax.denoise` takes one, or the name of a published method."""

    schedule: Schedule
    rule: ColumnRule
    memory: CanvasCache | None = None  # None: the exact cache for the denoiser's attention
    score: Score | None = None
    control: Control | None = None
    verify: Verify | None = field(metadata=STATIC, default=None)

    replace = replace
