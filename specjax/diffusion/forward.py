"""Forward passes of a denoiser over columns of a canvas."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.arrays.indexing import gather_at, take_along
from specjax.diffusion.types import Canvas, Denoiser, WindowOutput
from specjax.engine.prefill import CHUNK, in_chunks, wide_chunk
from specjax.numerics.sampling import VERIFY, fold_in
from specjax.types import Array, PyTree


def input_tokens(denoiser: Denoiser, canvas: Canvas, columns: Array) -> Array:
    """Return the model's input int32[B, T] at columns [B, T]: the mask token where a column is open."""
    columns = jnp.clip(columns, 0, canvas.tokens.shape[1] - 1)
    return jnp.where(take_along(canvas.open, columns, 1), denoiser.blank, take_along(canvas.tokens, columns, 1))


def forward(
    denoiser: Denoiser, cache: PyTree, tokens: Array, columns: Array, mask: Array, earlier: PyTree = None
) -> tuple[Array, PyTree]:
    """Run the model on tokens [B, T] at columns [B, T], with attention mask bool[B, T, P + T].

    earlier: keys and values of an earlier pass, to attend to in addition to the cache.

    Returns: (hidden [B, T, D], pending).
    """
    more = {} if earlier is None else {"earlier": earlier}
    output, pending = denoiser.model.forward(
        denoiser.params, tokens, cache, positions=jnp.maximum(columns, 0), mask=mask, **more
    )
    return output.hidden, pending


def forward_canvas(denoiser: Denoiser, cache: PyTree, canvas: Canvas) -> tuple[Array, PyTree]:
    """Run the model on the whole canvas with full attention. `cache` must be empty.

    Returns: (hidden [B, N, D], pending).
    """
    batch, size = canvas.tokens.shape
    column = jnp.arange(size)
    columns = jnp.broadcast_to(column, (batch, size))
    exists = column < canvas.end[:, None]
    mask = exists[:, None, :] | jnp.eye(size, dtype=bool)
    return forward(denoiser, cache, input_tokens(denoiser, canvas, columns), columns, mask)


def align_rows(denoiser: Denoiser, hidden: Array, start: Array, width: int) -> Array:
    """Return the rows [B, W, D] of hidden [B, N, D] that predict the `width` columns from `start` [B] on."""
    columns = start[:, None] + jnp.arange(width) - denoiser.is_shifted
    return take_along(hidden, jnp.clip(columns, 0, hidden.shape[1] - 1)[..., None], 1)


def compute_logits(denoiser: Denoiser, hidden: Array) -> Array:
    """Return logits float32[..., V]. The mask token has -inf, because it is never proposed."""
    assert denoiser.model.unembed is not None
    logits = denoiser.model.unembed(denoiser.params, hidden).astype(jnp.float32)
    if denoiser.mask_token is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) == denoiser.mask_token, -jnp.inf, logits)


def window_logits(denoiser: Denoiser, output: WindowOutput) -> Array:
    """Return the logits float32[B, W, V] of the window, with classifier-free guidance if the output has it."""
    logits = compute_logits(denoiser, output.hidden)
    if output.against is None or output.guidance is None:
        return logits
    against = compute_logits(denoiser, output.against)
    mixed = against + (output.guidance + 1) * (logits - against)
    return jnp.where(logits > -jnp.inf, mixed, -jnp.inf)


def extra_slots(denoiser: Denoiser) -> int:
    """Return the number of slots that `read_blocks` needs after the text, beyond the free slots of every buffer."""
    return _whole_blocks(denoiser, CHUNK) - CHUNK


def _whole_blocks(denoiser: Denoiser, columns: int) -> int:
    """Return the number of columns, rounded up to whole blocks."""
    assert denoiser.block is not None
    return -(-columns // denoiser.block) * denoiser.block


def read_blocks(denoiser: Denoiser, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """Commit the first `count` [B] columns of tokens [B, N] to the cache, in chunks of whole blocks.

    Each block attends to itself and to earlier blocks.
    """
    assert denoiser.block is not None
    batch, block, model = len(tokens), denoiser.block, denoiser.model

    def read_chunk(start: Array, size: int, cache: PyTree) -> PyTree:
        offset = jnp.arange(size)
        of_block = offset // block
        mask = jnp.broadcast_to(of_block[None, :] <= of_block[:, None], (batch, size, size))
        places = jnp.broadcast_to(offset, (batch, size))
        window = jnp.take(tokens, start + offset, axis=1, mode="clip")
        _, pending = forward(denoiser, cache, window, start + places, mask)
        return model.commit(cache, pending, places, jnp.clip(count - start, 0, size))

    sizes = _whole_blocks(denoiser, wide_chunk(batch, slots=tokens.shape[1])), _whole_blocks(denoiser, CHUNK)
    return in_chunks(read_chunk, cache, jnp.max(count), *sizes)


def column_keys(keys: Array, columns: Array, start: Array, decided: Array) -> Array:
    """Return keys [B, W] for draws at columns [B, W], given the number of decided columns after the prompt.

    If columns are decided from left to right, they equal the keys of plain decoding at the next column.
    """
    column_noise = fold_in(fold_in(keys[:, None], columns), VERIFY)
    ahead = decided[:, None] - (columns - start[:, None])
    return jnp.where(ahead == 0, column_noise, fold_in(column_noise, ahead))


def decide_columns(canvas: Canvas, columns: Array, take: Array, token: Array) -> Canvas:
    """Return the canvas with `token` int32[B, W] decided at the `columns` [B, W] where `take` is true."""
    row = jnp.arange(len(columns))[:, None]
    place = jnp.where(take, columns, canvas.tokens.shape[1])
    pass_index = jnp.broadcast_to(canvas.passes[:, None], columns.shape)
    first = jnp.where(gather_at(canvas.open, row, jnp.clip(columns, 0, canvas.open.shape[1] - 1)), pass_index, -1)
    return canvas._replace(
        tokens=canvas.tokens.at[row, place].set(token, mode="drop"),
        open=canvas.open.at[row, place].set(False, mode="drop"),
        decided_at=canvas.decided_at.at[row, place].max(first, mode="drop"),
    )
