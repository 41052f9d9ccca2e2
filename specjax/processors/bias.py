"""Logit bias and banned tokens: constants that are added to the logits of some tokens.

Rule: x + b[token], with b = -inf for a banned token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, Processor, TokenTree

ROOM = 16
"""The number of entries is padded to a multiple of this, so that few programs are compiled."""


def bias(entries: Mapping[int, float] | Sequence[Mapping[int, float]], *, room: int = 0) -> Processor:
    """Add a bias to the logits of tokens. -inf bans a token.

    Args:
      entries: bias by token id, or a list with one such mapping per row.
      room: minimum number of entries. With equal room, other entries need no compilation, and `serve` accepts them.

    Raises: UsageError for an invalid id or number.
    """
    rows = [entries] if isinstance(entries, Mapping) else list(entries)
    size = -(-max(room, 1, *map(len, rows)) // ROOM) * ROOM
    ids = np.full((len(rows), size), -1, np.int32)  # int32[1 or B, K]
    values = np.zeros((len(rows), size), np.float32)
    for row, entries_of_row in enumerate(rows):
        for place, (token, value) in enumerate(entries_of_row.items()):
            if not 0 <= token < 1 << 31 or token != int(token):
                raise UsageError(f"a logit bias needs a token id, not {token!r}")
            if not value < np.inf:  # also rejects NaN
                raise UsageError(f"the logit bias of token {token} must be a number or -inf, not {value!r}")
            ids[row, place], values[row, place] = token, value
    return Processor(process=_process, init=_init, check=_check, by_row=True, settings=(ids, values))


def ban(tokens: Iterable[int], *, room: int = 0) -> Processor:
    """Ban tokens by their ids. Raises: UsageError for an invalid id."""
    return bias(dict.fromkeys(tokens, -np.inf), room=room)


def _check(processor: Processor, vocab_size: int) -> None:
    ids, values = processor.settings
    if isinstance(ids, jax.core.Tracer):
        return
    if np.any(ids >= vocab_size):
        raise UsageError(f"a logit bias has token {ids.max()}, outside of the model's vocabulary of {vocab_size}")
    if np.any(np.sum(values == -np.inf, 1) >= vocab_size):
        raise UsageError(f"all {vocab_size} tokens of the vocabulary are banned; ban fewer")


def _init(params, settings, tokens: Array, length: Array, vocab_size: int) -> Array:
    ids, values = settings
    place = jnp.where(ids < 0, vocab_size, ids)  # an index past the end is dropped
    zeros = jnp.zeros((len(ids), vocab_size))
    return zeros.at[jnp.arange(len(ids))[:, None], place].add(values, mode="drop")  # float32[B, V]


def _process(params, bias: Array, tree: TokenTree, above: Array, logits: Array) -> Array:
    return logits + bias[:, None]
