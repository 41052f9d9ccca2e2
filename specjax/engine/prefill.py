"""Reading prompts into a cache, in chunks of fixed size."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.arrays.indexing import take_along
from specjax.engine import contract_checks
from specjax.types import Array, Model, Output, PyTree

CHUNK = 128
"""Tokens per pass. SmolLM2 on 2 cores reads a 900-token prompt as fast with 128 as with 512; the scores of one layer,
the largest temporary, are a quarter."""


def prefill(model: Model, params: PyTree, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """Commit the first `count[b]` of `tokens` int32[B, L] to an empty cache of more than max(count) + CHUNK slots.

    The logits are not used, and the compiler removes the head.
    """
    return prefill_reading(model, params, cache, tokens, count, lambda seen, *chunk: seen, ())[0]


def prefill_reading(
    model: Model,
    params: PyTree,
    cache: PyTree,
    tokens: Array,
    count: Array,
    read: Callable[[PyTree, Array, Array, Output], PyTree],
    seen: PyTree,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[PyTree, PyTree]:
    """`prefill` that shows every chunk to `read(seen, tokens[B, T], count[B], output) -> seen`: (cache, seen).

    `count` says how many of the T tokens belong to the row; `output` has the `taps`. Runs only as many
    chunks as the longest row needs, so padding of the buffer costs nothing.
    """
    batch = tokens.shape[0]
    offset = jnp.arange(CHUNK)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (batch, CHUNK, CHUNK))
    path = jnp.broadcast_to(offset, (batch, CHUNK))

    def body(carry):
        start, cache, seen = carry
        window = jnp.take(tokens, start + offset, axis=1, mode="clip")
        positions = jnp.broadcast_to(start + offset, (batch, CHUNK))
        wanted = {"taps": taps} if taps else {}
        output, pending = model.forward(params, window, cache, positions=positions, mask=mask, **wanted)
        here = jnp.clip(count - start, 0, CHUNK)
        committed, after = model.commit(cache, pending, path, here), read(seen, window, here, output)
        contract_checks.check_same(f"commit of the model {model.name}", cache, committed)
        contract_checks.check_same("the drafter's read", seen, after)
        return start + CHUNK, committed, after

    longest = jnp.max(count)
    return jax.lax.while_loop(lambda carry: carry[0] < longest, body, (jnp.int32(0), cache, seen))[1:]


def catch_up(
    model: Model, params: PyTree, cache: PyTree, tokens: Array, held: Array, wanted: Array, dropped: Array, chunk: int
) -> PyTree:
    """The cache of `held` int32[B] tokens of `tokens` int32[B, L] with those up to `wanted` int32[B], in passes of
    `chunk` tokens; no pass runs where it holds them all.

    dropped: int32[B], how many tokens of the text are before the first that this model counts.
    """
    offset = jnp.arange(chunk)
    path = jnp.broadcast_to(offset, (held.shape[0], chunk))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), (*path.shape, chunk))

    def feed(carry):
        cache, held = carry
        positions = held[:, None] + offset
        place = jnp.minimum(positions + dropped[:, None], tokens.shape[1] - 1)
        _, pending = model.forward(params, take_along(tokens, place, 1), cache, positions=positions, mask=mask)
        count = jnp.clip(wanted - held, 0, chunk)
        return model.commit(cache, pending, path, count), held + count

    with jax.named_scope(scopes.CATCH_UP):
        return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < wanted), feed, (cache, held))[0]
