"""Prefill of prompts into a cache, in chunks of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import platforms, scopes, texts
from specjax.arrays.indexing import take_along
from specjax.engine import contract_checks
from specjax.types import Array, Model, Output, PyTree

CHUNK = 128
"""Tokens per pass, and the slots that a cache needs after the text. On 2 cores, SmolLM2 reads a prompt of 900 tokens as
fast with 128 as with 512, and the attention scores of one layer, which are the largest temporary, take a quarter of the
memory."""
WIDE_CHUNK = 512
"""Tokens per pass on a TPU or GPU while the prompt lasts. 128 tokens are too few to hide the reads of the weights.

Llama 3 8B on eight v5e chips reads 32,768 tokens in 1.24 s, and in 1.32 s with chunks of 1,024. Without attention and
collectives, that is 0.67 s, 0.64 s, and 0.85 s with chunks of 256 (compiler's schedule, docs/tpu.md)."""
WIDE_TOKENS = 512
"""Maximum number of tokens of a wide pass over all rows. Four rows of CHUNK tokens hide these reads too."""


def prefill(model: Model, params: PyTree, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """Commit the first `count[b]` of `tokens` int32[B, L] to an empty cache of more than max(count) + CHUNK slots.

    The logits are unused, so the compiler removes the output head.
    """
    return prefill_and_read(model, params, cache, tokens, count, lambda state, *chunk: state, ())[0]


def prefill_and_read(
    model: Model,
    params: PyTree,
    cache: PyTree,
    tokens: Array,
    count: Array,
    read: Callable[[PyTree, Array, Array, Output], PyTree],
    state: PyTree,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[PyTree, PyTree]:
    """Prefill, and pass every chunk to `read(state, tokens[B, T], count[B], output) -> state`.

    Within a chunk, `count` is the number of the T tokens that belong to the row. `output` includes the `taps`. T is
    `wide_chunk` or CHUNK. Only the chunks that the longest row needs are read, so padding of the buffer has no cost.

    Returns: the cache and the final state.
    """
    read_chunk = chunk_reader(model, params, tokens, count, read, taps=taps)
    wide = wide_chunk(len(tokens), slots=tokens.shape[1])
    return in_chunks(read_chunk, (cache, state), jnp.max(count), wide, CHUNK)


def chunk_reader(
    model: Model,
    params: PyTree,
    tokens: Array,
    count: Array,
    read: Callable[[PyTree, Array, Array, Output], PyTree],
    *,
    taps: tuple[int, ...] = (),
) -> Callable[[Array, int, tuple[PyTree, PyTree]], tuple[PyTree, PyTree]]:
    """Return `read_chunk(start, size, (cache, state))`, which commits `size` tokens of the prompts from `start` on.

    The arguments are those of `prefill_and_read`. `start` is int32[].
    """
    options = {"taps": taps} if taps else {}

    def read_chunk(start: Array, size: int, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        cache, state = carry
        offset = jnp.arange(size)
        window = jnp.take(tokens, start + offset, axis=1, mode="clip")
        mask, places = _text(model, len(tokens), size)
        output, pending = model.forward(params, window, cache, positions=start + places, mask=mask, **options)
        num_new = jnp.clip(count - start, 0, size)
        committed, new_state = model.commit(cache, pending, places, num_new), read(state, window, num_new, output)
        contract_checks.check_same(f"commit of the model {model.name}", cache, committed)
        contract_checks.check_same("the drafter's prefill", state, new_state)
        return committed, new_state

    return read_chunk


def in_chunks(
    read_chunk: Callable[[Array, int, PyTree], PyTree], carry: PyTree, longest: Array, wide: int, narrow: int
) -> PyTree:
    """Apply `carry = read_chunk(start, size, carry)` to chunks that cover `longest` int32[] tokens.

    There are as many wide chunks as possible, then narrow ones. The last chunk of either size exceeds the tokens by
    less than `narrow`.
    """

    def chunks_of(size: int, end: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        body = lambda carry: (carry[0] + size, read_chunk(carry[0], size, carry[1]))
        return jax.lax.while_loop(lambda carry: carry[0] < end, body, carry)

    carry = jnp.int32(0), carry
    if wide > narrow:
        with jax.named_scope(scopes.WIDE_CHUNKS):
            carry = chunks_of(wide, (longest + narrow - 1) // wide * wide, carry)
    with jax.named_scope(scopes.CHUNKS):
        return chunks_of(narrow, longest, carry)[1]


def wide_chunk(batch: int, platform: str | None = None, slots: int | None = None) -> int:
    """Return the tokens per row of a wide pass over `batch` rows, or CHUNK if there are no wide passes.

    Args:
      platform: a JAX backend; the default is that of the program that is traced.
      slots: size of the token buffer; no pass over a smaller one is wide. None: it is large.
    """
    if (platform or platforms.of_program()) == "cpu":
        return CHUNK
    size = max(CHUNK, min(WIDE_CHUNK, WIDE_TOKENS // batch // CHUNK * CHUNK))
    return size if slots is None or size <= slots else CHUNK


def count_chunks(longest: int, wide: int) -> tuple[int, int]:
    """Return the numbers of wide and narrow chunks of a prompt of `longest` tokens, with wide ones of `wide` tokens."""
    num_wide = (longest + CHUNK - 1) // wide if wide > CHUNK else 0
    return num_wide, -(-max(longest - num_wide * wide, 0) // CHUNK)


def catch_up(
    model: Model, params: PyTree, cache: PyTree, tokens: Array, cached: Array, target_length: Array, dropped: Array,
    chunk: int,
) -> PyTree:  # fmt: skip
    """Extend a cache of `cached` int32[B] tokens to `target_length` int32[B] tokens of `tokens` int32[B, L].

    The loop runs passes of `chunk` tokens, and none if the cache already contains all tokens.

    Args:
      dropped: int32[B], number of tokens at the start of the text that this model does not read.
    """
    offset = jnp.arange(chunk)
    mask, path = _text(model, len(cached), chunk)

    def read_chunk(carry):
        cache, cached = carry
        positions = cached[:, None] + offset
        place = jnp.minimum(positions + dropped[:, None], tokens.shape[1] - 1)
        _, pending = model.forward(params, take_along(tokens, place, 1), cache, positions=positions, mask=mask)
        count = jnp.clip(target_length - cached, 0, chunk)
        return model.commit(cache, pending, path, count), cached + count

    with jax.named_scope(scopes.CATCH_UP):
        return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < target_length), read_chunk, (cache, cached))[0]


def _text(model: Model, batch: int, size: int) -> tuple[Any, Any]:
    """Return the mask bool[B, T, T] and the path int32[B, T] of a text.

    Both are constants for models that read texts in a form of their own, and the mask also for those that see ahead.
    The path is one for all models of `specjax.models`, whose commit then writes the tokens without a gather. Other
    models get arrays.
    """
    mask, path = texts.causal_mask(batch, size), texts.in_order(batch, size)
    if model.capabilities.reads_in_order:
        return mask, path
    visible = mask if model.capabilities.sees_ahead else texts.traced_mask(mask)
    return visible, path if model.config is not None else jnp.asarray(path)
