"""Minimum length: tokens that end a text are impossible until enough tokens are decoded.

Rule: x = -inf for the end tokens while fewer than n tokens are decoded. The prompt does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, Processor, TokenTree


class Unfinished(NamedTuple):
    """The number of tokens that are still needed, and the tokens that end a text."""

    remaining: Array  # int32[B]
    is_end: Array  # bool[B, V]


def min_length(count: int | Sequence[int], ends: Iterable[int], *, room: int = 0) -> Processor:
    """Build the processor. Texts have at least `count` tokens before one of the `ends`, such as the ids of `eos`.

    Args:
      count: a number, or one per row. 0 has no effect.
      room: minimum number of ends. With equal room, other ends need no compilation, and `serve` accepts them.

    Raises: UsageError for a negative count or id.
    """
    counts, ids = np.atleast_1d(np.asarray(count)), np.asarray([*ends]).reshape(-1)
    if any(np.any((x < 0) | (x >= 1 << 31)) for x in (counts, ids)):
        raise UsageError(f"min_length needs counts and token ids from 0, not {count} and {ids.tolist()}")
    counts = counts.astype(np.int32)
    padded = np.pad(ids.astype(np.int32), (0, max(room - len(ids), 0)), constant_values=-1)
    settings = counts, np.broadcast_to(padded, (len(counts), len(padded)))  # int32[B], int32[B, E]
    return Processor(process=_process, init=_init, update=_update, check=_check, by_row=True, settings=settings)


def _check(processor: Processor, vocab_size: int) -> None:
    ids = processor.settings[1]
    if not isinstance(ids, jax.core.Tracer) and np.any(ids >= vocab_size):
        raise UsageError(f"min_length has token {np.max(ids)}, outside of the model's vocabulary of {vocab_size}")


def _init(params, settings, tokens: Array, length: Array, vocab_size: int) -> Unfinished:
    count, ids = settings
    place = jnp.where(ids < 0, vocab_size, ids)  # an index past the end is dropped
    is_end = jnp.zeros((len(ids), vocab_size), bool)
    return Unfinished(count, is_end.at[jnp.arange(len(ids))[:, None], place].set(True, mode="drop"))


def _process(params, state: Unfinished, tree: TokenTree, above: Array, logits: Array) -> Array:
    depth = jnp.sum(above & (jnp.arange(above.shape[2]) > 0), 2)  # int32[B, R], decoded tokens up to each node
    is_early = depth < state.remaining[:, None]
    return jnp.where(is_early[..., None] & state.is_end[:, None], -jnp.inf, logits)


def _update(params, state: Unfinished, tokens: Array, count: Array) -> Unfinished:
    return state._replace(remaining=state.remaining - count)
