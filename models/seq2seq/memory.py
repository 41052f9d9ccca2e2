"""Cache of an encoder-decoder: the text's keys and values, and those of the source, which never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.numerics.validation import check_integer
from specjax.types import Array, PyTree

UNIT = 32
"""Lengths of padded sources are multiples of it, so that sources of similar lengths share a program."""


class Source(NamedTuple):
    """The input of a text-to-text encoder."""

    tokens: Array  # int32[B, S], then unspecified values
    length: Array  # int32[B]


def sources(texts: Sequence[Sequence[int]], length: int | None = None) -> Source:
    """Return the input of an encoder for token lists, padded to a common length.

    Args:
      length: tokens of the padded sources, such as those of the longest source of a server. None: the smallest multiple
        of UNIT.

    Raises: UsageError for no texts, and for a text that is empty, longer than `length` or no list of token ids.
    """
    rows = [np.asarray(text) for text in texts]
    if not rows or not all(row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows):
        raise UsageError("sources must be a list of token lists, each with at least one token; encode texts first")
    longest = max(map(len, rows))
    check_integer("length", length, longest)
    width = -(-longest // UNIT) * UNIT if length is None else length
    padded = [np.pad(row, (0, width - len(row))) for row in rows]
    return Source(jnp.asarray(np.stack(padded), jnp.int32), jnp.asarray([len(row) for row in rows], jnp.int32))


class SourceMemory(NamedTuple):
    """Keys and values of the source, which the decoder reads."""

    k: tuple[Array, ...]  # [B, H, S, h] of each layer of the decoder
    v: tuple[Array, ...]
    length: Array  # int32[B]


class Seq2SeqCache(NamedTuple):
    text: kv.KVCache
    source: SourceMemory


def commit(cache: Seq2SeqCache, pending: kv.Pending, path: Array, num_nodes: Array) -> Seq2SeqCache:
    """Append nodes to the text, see `models.cache.commit`."""
    return cache._replace(text=kv.commit(cache.text, pending, path, num_nodes))


def rewind(cache: Seq2SeqCache, length: Array) -> Seq2SeqCache:
    """Forget all but the first `length` int32[B] tokens of the text."""
    return cache._replace(text=kv.rewind(cache.text, length))


def axes(arrays: Any) -> PyTree:
    """Return the index of the row axis of each array of a cache or of pending entries."""
    if not isinstance(arrays, Seq2SeqCache):
        return kv.axes(arrays)
    return Seq2SeqCache(kv.axes(arrays.text), batch_axes.rows_first(arrays.source))
