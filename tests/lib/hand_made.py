"""Windows and proposals written by hand, for parts that are called without a model.

All have VOCAB tokens and, unless they are `narrow`, WIDTH columns, so that operations compile once; columns behind
those that are written are no part of the text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.diffusion.types import Canvas, Proposal, View
from specjax.types import Array

VOCAB, WIDTH = 12, 32


def view(
    opened, *, eligible=None, tokens=None, entered=True, start: int = 1, seed: int = 0, passes: int = 0, eos=None,
    revisable=None, narrow: bool = False,
) -> View:  # fmt: skip
    """Return the view of rows whose window has `opened` bool[B, W] columns, behind a prompt of `start` tokens."""
    wide = (lambda x: x) if narrow else _wide
    opened = np.atleast_2d(np.asarray(opened, bool))
    exists = wide(np.ones(opened.shape, bool))
    mine = lambda value, default: jnp.asarray(wide(default if value is None else np.atleast_2d(np.asarray(value))))
    batch, width = exists.shape
    rows, columns = jnp.arange(batch)[:, None], start + jnp.arange(width)
    keys = jax.vmap(jax.vmap(lambda n: jax.random.fold_in(jax.random.key(seed), n)))(rows * width + columns)
    return View(
        start=jnp.full((batch,), start),
        columns=jnp.broadcast_to(columns, exists.shape),
        tokens=mine(tokens, np.zeros(opened.shape, np.int32)),
        exists=jnp.asarray(exists),
        open=mine(None, opened),
        eligible=mine(eligible, opened).astype(bool),
        revisable=mine(revisable, ~opened).astype(bool),
        entered=jnp.full((batch,), entered),
        active=jnp.ones((batch,), bool),
        keys=keys,
        passes=jnp.full((batch,), passes),
        eos=None if eos is None else jnp.asarray(eos, jnp.int32),
    )


def window(opened, *, entered=False, **more) -> View:
    """Return the view of exactly these columns, in a pass that is not the first over them."""
    return view(opened, entered=entered, narrow=True, **more)


def canvas(rows: int, width: int, start: int = 1) -> Canvas:
    """Return a canvas of which nothing is decided."""
    size = start + width
    column = jnp.broadcast_to(jnp.arange(size), (rows, size))
    filled = lambda n: jnp.full((rows,), n)
    return Canvas(
        column * 0,
        column >= start,
        filled(start),
        filled(size),
        filled(start),
        jnp.where(column < start, -2, -1),
        filled(0),
    )


def proposal(sure, token=None, *, narrow: bool = False) -> Proposal:
    """Greedy: `token` int32[B, W] with probability `sure` float[B, W], the rest spread over the other tokens."""
    sure = np.atleast_2d(np.asarray(sure, np.float32))
    token = np.zeros(sure.shape, np.int32) if token is None else np.atleast_2d(np.asarray(token, np.int32))
    is_token = np.arange(VOCAB) == token[..., None]
    with np.errstate(divide="ignore"):
        return of_logits(
            np.log(np.where(is_token, sure[..., None], (1 - sure[..., None]) / (VOCAB - 1))), narrow=narrow
        )


def uniform(counts) -> Proposal:
    """Greedy: in each column so many tokens are equally likely, so its entropy is log n."""
    counts = np.atleast_2d(np.asarray(counts))
    return of_logits(np.where(np.arange(VOCAB) < counts[..., None], 0.0, -np.inf))


def of_logits(logits, *, narrow: bool = False) -> Proposal:
    """Greedy, with these logits float[B, W, V]."""
    logits = np.asarray(logits, np.float32)
    padding = [(0, 0), (0, 0), (0, VOCAB - logits.shape[-1])]
    logits = np.pad(logits, padding, constant_values=-np.inf)
    logits = logits if narrow else _wide(logits)
    token = np.argmax(logits, -1).astype(np.int32)
    alone = np.where(np.arange(VOCAB) == token[..., None], np.float32(0), np.float32(-np.inf))
    logits = jnp.asarray(logits)
    return Proposal(jnp.asarray(token), logits, jnp.asarray(alone), logits, jnp.ones(len(logits), bool))


def _wide(x: np.ndarray) -> np.ndarray:
    """Pad with zeros behind the columns that exist."""
    return np.pad(x, [(0, 0), (0, WIDTH - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def select(rule, proposed: Proposal, observed: View | None = None, quota=1, state=None) -> tuple[Array, Array, object]:
    """(take, token, state) of a rule; without a view all columns that were written are open."""
    rows = len(proposed.token)
    written = np.any(np.asarray(proposed.logits) != 0, -1)  # those behind have zeros for all tokens
    observed = view(written) if observed is None else observed
    state = rule.init(rule.params, canvas(rows, WIDTH), WIDTH, VOCAB) if state is None else state
    return rule.select(rule.params, state, proposed, observed, jnp.broadcast_to(jnp.asarray(quota), (rows,)))


def taken(rule, proposed: Proposal, observed: View | None = None, quota=1) -> list[list[int]]:
    """The places that a rule takes, of each row."""
    return places(select(rule, proposed, observed, quota)[0])


def places(take) -> list[list[int]]:
    """The columns of each row that bool[B, W] has."""
    return [np.flatnonzero(row).tolist() for row in np.asarray(take)]


def shares(schedule, columns: int) -> list[int]:
    """Return how many of so many columns a schedule has each pass take, if it takes them."""
    state, left, taken = schedule.init(schedule.params, canvas(1, columns), columns), columns, []
    while left:
        observed = view(np.arange(columns) >= columns - left, entered=not taken)
        _, count, state = schedule.bound(state, None, None, observed)
        taken.append(int(count[0]))
        left -= taken[-1]
    return taken
