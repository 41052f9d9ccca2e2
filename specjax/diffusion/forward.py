"""Passes of a denoiser over columns of a canvas."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import gather_at, take_along
from specjax.diffusion.types import Canvas, Denoiser, Seen
from specjax.engine.prefill import CHUNK
from specjax.numerics.sampling import VERIFY, fold_in
from specjax.types import Array, PyTree


def shown(denoiser: Denoiser, canvas: Canvas, columns: Array) -> Array:
    """int32[B, T]: what the model reads at columns [B, T]: the mask token where they are open."""
    columns = jnp.clip(columns, 0, canvas.tokens.shape[1] - 1)
    return jnp.where(take_along(canvas.open, columns, 1), denoiser.blank, take_along(canvas.tokens, columns, 1))


def forward(
    denoiser: Denoiser, cache: PyTree, tokens: Array, columns: Array, mask: Array, earlier: PyTree = None
) -> tuple[Array, PyTree]:
    """(hidden [B, T, D], pending) of tokens [B, T] at columns [B, T] that see each other by mask bool[B, T, P + T]."""
    more = {} if earlier is None else {"earlier": earlier}
    output, pending = denoiser.model.forward(
        denoiser.params, tokens, cache, positions=jnp.maximum(columns, 0), mask=mask, **more
    )
    return output.hidden, pending


def over_canvas(denoiser: Denoiser, cache: PyTree, canvas: Canvas) -> tuple[Array, PyTree]:
    """(hidden [B, N, D], pending) of the whole canvas, each of whose columns sees all that exist. `cache`: empty."""
    batch, size = canvas.tokens.shape
    column = jnp.arange(size)
    columns = jnp.broadcast_to(column, (batch, size))
    exists = column < canvas.end[:, None]
    mask = exists[:, None, :] | jnp.eye(size, dtype=bool)
    return forward(denoiser, cache, shown(denoiser, canvas, columns), columns, mask)


def aligned(denoiser: Denoiser, hidden: Array, start: Array, width: int) -> Array:
    """[B, W, D]: the rows that predict the columns from `start` [B] on, of hidden [B, N, D] of a whole canvas."""
    columns = start[:, None] + jnp.arange(width) - denoiser.is_shifted
    return take_along(hidden, jnp.clip(columns, 0, hidden.shape[1] - 1)[..., None], 1)


def logits_of(denoiser: Denoiser, hidden: Array) -> Array:
    """float32[..., V], -inf for the mask token, which no column may become."""
    assert denoiser.model.unembed is not None
    logits = denoiser.model.unembed(denoiser.params, hidden).astype(jnp.float32)
    if denoiser.mask_token is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) == denoiser.mask_token, -jnp.inf, logits)


def said(denoiser: Denoiser, seen: Seen) -> Array:
    """float32[B, W, V]: the logits of a look at the window."""
    logits = logits_of(denoiser, seen.hidden)
    if seen.against is None or seen.guidance is None:
        return logits
    against = logits_of(denoiser, seen.against)
    mixed = against + (seen.guidance + 1) * (logits - against)
    return jnp.where(logits > -jnp.inf, mixed, -jnp.inf)


def more_than_chunk(denoiser: Denoiser) -> int:
    """Slots that `read_blocks` writes behind the text, beyond those that any buffer of tokens has room for."""
    return _chunk(denoiser) - CHUNK


def _chunk(denoiser: Denoiser) -> int:
    assert denoiser.block is not None
    return -(-CHUNK // denoiser.block) * denoiser.block


def read_blocks(denoiser: Denoiser, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """The cache with the first `count` [B] columns of tokens [B, N], whole blocks, each of which sees itself and what
    is before it; in chunks of whole blocks."""
    assert denoiser.block is not None
    batch, block, model = len(tokens), denoiser.block, denoiser.model
    chunk = _chunk(denoiser)
    offset = jnp.arange(chunk)
    of_block = offset // block
    mask = jnp.broadcast_to(of_block[None, :] <= of_block[:, None], (batch, chunk, chunk))
    path = jnp.broadcast_to(offset, (batch, chunk))

    def body(carry):
        start, cache = carry
        window = jnp.take(tokens, start + offset, axis=1, mode="clip")
        columns = jnp.broadcast_to(start + offset, (batch, chunk))
        _, pending = forward(denoiser, cache, window, columns, mask)
        return start + chunk, model.commit(cache, pending, path, jnp.clip(count - start, 0, chunk))

    return jax.lax.while_loop(lambda carry: carry[0] < jnp.max(count), body, (jnp.int32(0), cache))[1]


def column_keys(keys: Array, columns: Array, start: Array, decided: Array) -> Array:
    """Keys [B, W] of the draws at columns [B, W] of rows that have decided so many columns behind the prompt.

    Of a text that was written from left to right so far they are those of plain decoding at the next column.
    """
    own = fold_in(fold_in(keys[:, None], columns), VERIFY)
    ahead = decided[:, None] - (columns - start[:, None])
    return jnp.where(ahead == 0, own, fold_in(own, ahead))


def put(canvas: Canvas, columns: Array, take: Array, token: Array) -> Canvas:
    """The canvas with `token` int32[B, W] decided at those of `columns` [B, W] that `take` has."""
    row = jnp.arange(len(columns))[:, None]
    place = jnp.where(take, columns, canvas.tokens.shape[1])
    now = jnp.broadcast_to(canvas.passes[:, None], columns.shape)
    first = jnp.where(gather_at(canvas.open, row, jnp.clip(columns, 0, canvas.open.shape[1] - 1)), now, -1)
    return canvas._replace(
        tokens=canvas.tokens.at[row, place].set(token, mode="drop"),
        open=canvas.open.at[row, place].set(False, mode="drop"),
        decided_at=canvas.decided_at.at[row, place].max(first, mode="drop"),
    )
