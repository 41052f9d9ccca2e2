"""The contracts of diffusion decoding: a canvas that fills up, several columns per pass.

Shapes, besides those of `specjax.types`: N columns of the canvas (its tokens are `DecodeState.tokens`, L = N), W
columns of the window, the part of the canvas that a pass may decide. A *column* is a position of the text. A column is
*open* until it is decided; what its token is meanwhile does not matter, the model is shown the mask token there.

One pass is: the schedule places the window, the memory has the model look at it, a score may change what it says, the
schedule bounds what may be decided and says how much should be, the rule decides, and a control may end it early.

    canvas ─place→ window ─look→ logits ─transform→ Proposal ─bound→ (eligible, quota) ─select→ canvas ─act→

Whatever the parts are, rows are independent: a row's text depends on its prompt, its key and the parts alone. Prompts
are padded on the right, so columns count as they do for the row alone, and noise is drawn from (row key, column, how
many columns are decided): neither the batch nor a memory nor another order of passes changes it.
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
from specjax.numerics.sampling import fold_in
from specjax.types import STATIC, Array, Model, PyTree, Target

Attention = Literal["full", "block_causal"]
Alignment = Literal["same", "shifted"]
Seeding = Literal["all_masked", "seed_and_mask"]

RULE = 2
"""Purpose of the random keys of rules, beside DRAFT and VERIFY of `specjax.numerics.sampling`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Denoiser:
    """A model read as a denoiser. A pytree: its parameters are the only leaves.

    mask_token: what it is shown for an open column, and never proposes; None: it never meets one, with blocks of one.
    attention: "full", every column sees all of the canvas; "block_causal", the columns of a block see each other and
      the blocks before, so that a finished block's keys and values are final.
    block: columns of such a block, counted from column 0; 1 is autoregression.
    alignment: "same", the row of a column predicts it; "shifted", the row of the column before does, as in models made
      from autoregressive ones.
    seeding: "all_masked", a block begins without any token; "seed_and_mask", its first column is predicted by the pass
      that reads the finished block before it.
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
            raise UsageError('block is of block-causal attention; leave it out, or say attention="block_causal"')
        if not causal and self.seeding == "seed_and_mask":
            raise UsageError(
                'seeding="seed_and_mask" is of block-causal attention, whose finished blocks seed the next'
            )
        if causal and self.alignment == "shifted" and self.seeding == "all_masked":
            raise UsageError(
                "a block-causal denoiser with shifted logits needs seeding='seed_and_mask': nothing else predicts the "
                "first column of a block"
            )
        if self.mask_token is None and self.block != 1:
            raise UsageError("a denoiser needs a mask_token, which stands where a column is open")
        if self.mask_token is not None and not 0 <= self.mask_token < self.model.vocab_size:
            raise UsageError(f"mask_token {self.mask_token} is outside of the vocabulary of {self.model.vocab_size}")
        if self.model.unembed is None:
            raise UsageError(f"the model {self.model.name} has no `unembed`, which a denoiser reads its window with")

    @property
    def is_causal(self) -> bool:
        """Whether finished blocks are final."""
        return self.attention == "block_causal"

    @property
    def is_shifted(self) -> bool:
        """Whether the row before a column predicts it."""
        return self.alignment == "shifted"

    @property
    def blank(self) -> int:
        """What an open column is shown as; of a model that never meets one, any token."""
        return self.mask_token or 0

    @property
    def target(self) -> Target:
        """The model as everything else knows it."""
        return Target(self.model, self.params)


def autoregressive(target: Target) -> Denoiser:
    """A causal model as a denoiser of blocks of one column."""
    return Denoiser(target.model, target.params, None, "block_causal", 1, "shifted", "seed_and_mask")


class Canvas(NamedTuple):
    """The text of each row: prompt, decided and open columns, then columns that are no part of it."""

    tokens: Array  # int32[B, N]
    open: Array  # bool[B, N], still to be decided
    start: Array  # int32[B], first column behind the prompt
    end: Array  # int32[B], columns that exist; those of a last block behind the text among them
    origin: Array  # int32[B], column that blocks are counted from: 0 of block-causal models, else the first new one
    decided_at: Array  # int32[B, N], the pass that decided a column, from 0; -1: none yet, -2: the prompt
    passes: Array  # int32[B], so far

    @property
    def first_open(self) -> Array:
        """int32[B]: columns before the first open one, which are final if the rule never revises."""
        columns = jnp.arange(self.tokens.shape[1])
        return jnp.min(jnp.where(self.open, columns, self.end[:, None]), 1)

    @property
    def decided(self) -> Array:
        """int32[B]: columns decided so far behind the prompt."""
        return jnp.sum(self.decided_at >= 0, 1, dtype=jnp.int32)


class Window(NamedTuple):
    """Where a pass looks."""

    start: Array  # int32[B], its first column
    entered: Array  # bool[B], the first pass over this window
    active: Array  # bool[B], rows that have not ended
    width: int  # W


class View(NamedTuple):
    """What the parts see of the window in a pass."""

    start: Array  # int32[B], its first column
    columns: Array  # int32[B, W]
    tokens: Array  # int32[B, W]; where `open`, the mask token
    exists: Array  # bool[B, W], columns of it that the canvas has; what is said of others means nothing
    open: Array  # bool[B, W], columns of it that are not decided
    eligible: Array  # bool[B, W], those that may be decided now: predicted, and within the schedule's bounds
    revisable: Array  # bool[B, W], those that were decided in this window, in rows that have not ended
    entered: Array  # bool[B], the first pass over this window
    active: Array  # bool[B], rows that have not ended
    keys: Array  # key[B, W], which tokens are drawn with, by (row key, column, columns decided)
    passes: Array  # int32[B], before this one
    eos: Array | None = None  # int32[E], or per row int32[B, E], tokens that end a row; None: there are none
    canvas: Canvas | None = None  # that the window is part of, before this pass

    def ends(self, token: Array) -> Array:
        """bool[B, T]: which of tokens [B, T] end a row."""
        return jnp.zeros(token.shape, bool) if self.eos is None else is_eos(self.eos, token)

    @property
    def rule_keys(self) -> Array:
        """key[B, W], for what rules draw: independent of the noise of the tokens."""
        return fold_in(self.keys, RULE)


def is_eos(eos: Array, token: Array) -> Array:
    """bool[B, T]: which of tokens [B, T] are among eos [E], or per row [B, E]."""
    ids = eos if eos.ndim > 1 else eos[None]
    return jnp.any(token[:, :, None] == ids[:, None, :], -1)


class Proposal(NamedTuple):
    """What the model proposes for each column of the window. `specjax.diffusion.measures` says how sure it is."""

    token: Array  # int32[B, W], drawn from `warped`, or its largest
    logits: Array  # float32[B, W, V], by which confidence is measured: not warped, without noise, no mask token
    warped: Array  # float32[B, W, V], after temperature, top-k and top-p
    weight: Array | None = None  # float32[B, W], what confidences are multiplied by; None: 1


class Wide(NamedTuple):
    """What the model says of the whole canvas, for controls that ask for it."""

    best: Array  # int32[B, N], likeliest token
    gap: Array  # float32[B, N], between the two largest logits


class Seen(NamedTuple):
    """What a memory's look at the window gives."""

    hidden: Array  # [B, W, D], row i predicts column i of the window, whatever the alignment
    predicted: Array  # bool[B, W], columns for which there is such a row
    columns: Array  # int32[B], columns that were computed, for what a pass costs
    canvas: Array | None = None  # [B, N, D], likewise for the whole canvas, if the memory computes all of it
    against: Array | None = None  # [B, W, D], what `hidden` is weighed against: logits u + (guidance + 1)(l - u)
    guidance: float | Array | None = None


def _nothing(*_: Any) -> PyTree:
    return ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Where to decide, and how much.

    `place(state, canvas) -> (start[B], state)`: the first column of the window, before the pass.
    `bound(state, canvas, proposal, view) -> (end[B], quota[B], state)`, after it: the window's columns below `end` are
    eligible, and a rule that counts should take `quota` of them. `view.eligible` is not bounded yet.
    """

    width: int | None = field(metadata=STATIC)  # W; None: as long as the new text may become
    place: Callable[..., tuple[Array, PyTree]] = field(metadata=STATIC)
    bound: Callable[..., tuple[Array, Array, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width)
    params: PyTree = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What of the canvas is computed in a pass, and what is read as it was computed before.

    `init(denoiser, canvas, width) -> state` may read the prompts. `look(denoiser, state, canvas, window) -> (Seen,
    state)`. `exact`: it says what a pass over the whole canvas without memory would say, so that a promise
    made of that procedure holds with it.

    `several(denoiser, state, canvases, window) -> (Seen, state)` looks in one pass at canvases [d, B, ...] that are
    equal before the window: hidden, predicted and canvas have the leading d too. None: it cannot. The state is that
    of `look`.

    `check(procedure)` raises a UsageError for one that the memory is not made for.
    """

    look: Callable[..., tuple[Seen, PyTree]] = field(metadata=STATIC)
    attention: Attention = field(metadata=STATIC)
    exact: bool = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)
    name: str = field(metadata=STATIC, default="memory")
    axes: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)  # (denoiser, state); None: rows first
    several: Callable[..., tuple[Seen, PyTree]] | None = field(metadata=STATIC, default=None)
    check: Callable[..., None] | None = field(metadata=STATIC, default=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Score:
    """What changes the model's proposals before they are judged.

    `transform(params, state, logits[B, W, V], view) -> (logits, state)`; `weigh(params, state, proposal, view) ->
    float32[B, W]`, what confidences are multiplied by. Either may be None. `learn(params, state, view, take, token) ->
    state` sees what was decided. `check(params, count, eos)` raises a UsageError where no text of `count` tokens can
    be, or none that ends with one of `eos` int32[E].
    """

    transform: Callable[..., tuple[Array, PyTree]] | None = field(metadata=STATIC, default=None)
    weigh: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width, vocab)
    learn: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)
    check: Callable[..., None] | None = field(metadata=STATIC, default=None)
    params: PyTree = ()

    replace = replace


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rule:
    """Which of the eligible columns to decide.

    `select(params, state, proposal, view, quota[B]) -> (take bool[B, W], token int32[B, W], state)`. It takes only
    eligible columns, at least one in each row that has any. One that has `settled(params, state) -> bool[B]` may also
    take columns of the window that it decided before (`view.revisable`), to change their token: the window stays where
    it is, and nothing of it is final, until the rule says that it is settled.
    """

    select: Callable[..., tuple[Array, Array, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width, vocab)
    settled: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    params: PyTree = ()

    replace = replace


class Act(NamedTuple):
    """What a control wants."""

    fill: Array | None = None  # bool[B], decide all open columns now by what is likeliest there
    end: Array | None = None  # int32[B], columns that shall exist from now on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Control:
    """What ends a row early. `act(params, state, canvas, proposal, view, wide) -> (Act, state)`, after the rule;
    `canvas` has what it decided. `wide`: it asks for `Wide`, which only a memory that computes the whole canvas has."""

    act: Callable[..., tuple[Act, PyTree]] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_nothing)  # (params, canvas, width)
    wide: bool = field(metadata=STATIC, default=False)
    params: PyTree = ()

    replace = replace


class Verify(NamedTuple):
    """What decides with passes of its own, in place of `specjax.diffusion.loop.decide`, of whose pieces it is made.

    `decide(parts, state, canvas, window, slots) -> loop.Decided`; its own state is `slots.verify`, at first
    `init(parts, canvas)`. `exact_memory`: what it promises holds only if the memory is exact. `several`: it needs one
    that looks at several canvases. `memory`: it works over no other than this one, whose state it knows.
    `check(procedure)` raises a UsageError for parts that it would not ask.
    """

    decide: Callable[..., Any]
    init: Callable[..., PyTree] = _nothing
    exact_memory: bool = True
    several: bool = False
    memory: Memory | None = None
    check: Callable[..., None] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Procedure:
    """A way to decode: parts that are put together. `specjax.diffusion.denoise` takes one, or the name of a paper's."""

    schedule: Schedule
    rule: Rule
    memory: Memory | None = None  # None: the exact one of the denoiser's attention
    score: Score | None = None
    control: Control | None = None
    verify: Verify | None = field(metadata=STATIC, default=None)

    replace = replace
