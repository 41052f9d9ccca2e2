"""Phases of a text with images: which tokens are codes depends on the last token that begins an image.

Rule: after `begin` follow exactly `count` codes and then `end`. At all other places the logits of codes are -inf. An
image can begin in the prompt. Chameleon, Anole and Janus write such texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.types import Array, Processor, TokenTree


class ImageTokens(NamedTuple):
    """The tokens of images."""

    is_code: Array  # bool[W], for the first W tokens of the vocabulary; the others are no codes
    begin: Array  # int32[]
    end: Array  # int32[]
    num_codes: Array  # int32[], codes of an image


def image_phases(codes: Iterable[int], begin: int, end: int, count: int) -> Processor:
    """Build the processor.

    Args:
      codes: token ids of codes, such as range(4, 8196) for Chameleon.
      begin, end: tokens before and after the codes of an image, 8197 and 8196 for Chameleon.
      count: codes of an image, such as 1024.

    Raises: UsageError for invalid ids, for no codes, or for a `begin` or an `end` that is a code.
    """
    try:
        ids = np.asarray([*codes])
    except (TypeError, ValueError):  # a number, or lists of different lengths
        ids = np.zeros(0)
    every = np.append(ids, [begin, end]) if ids.ndim == 1 else ids
    if not ids.size or every.ndim != 1 or every.dtype.kind not in "iu" or np.any((every < 0) | (every >= 1 << 31)):
        raise UsageError(
            f"image_phases needs token ids from 0, not codes {quote(codes)}, begin {begin!r} and end {end!r}"
        )
    is_count = isinstance(count, int | np.integer) and 1 <= count < (1 << 31) - 1  # count + 1 is a state
    if not is_count or begin == end or np.any(np.isin([begin, end], ids)):
        raise UsageError(
            f"image_phases needs a count of at least 1, and a begin and an end that differ and are no codes, not "
            f"{quote(count)}, {begin} and {end}"
        )
    is_code = np.zeros(1 + int(every.max()), bool)
    is_code[ids] = True
    params = ImageTokens(jnp.asarray(is_code), *(jnp.int32(x) for x in (begin, end, count)))
    return Processor(process=_process, init=_init, update=_update, check=_check, by_row=True, params=params)


def _check(processor: Processor, vocab_size: int) -> None:
    width = len(processor.params.is_code)
    if width > vocab_size:
        raise UsageError(f"image_phases has token {width - 1}, outside of the model's vocabulary of {vocab_size}")


def _init(params: ImageTokens, settings, tokens: Array, length: Array, vocab_size: int) -> Array:
    return _tokens_since(params, tokens, length, jnp.full_like(length, params.num_codes + 1))


def _update(params: ImageTokens, since: Array, tokens: Array, added: Array) -> Array:
    return _tokens_since(params, tokens, added, since)


def _tokens_since(params: ImageTokens, tokens: Array, added: Array, previous: Array) -> Array:
    """Return int32[B], the tokens after the last `begin` up to the first `added` of `tokens`; text has count + 1.

    previous: the same before these tokens.
    """
    place = jnp.arange(tokens.shape[1])
    begins = (tokens == params.begin) & (place < added[:, None])
    last = jnp.max(jnp.where(begins, place, -1), 1)
    return jnp.minimum(jnp.where(last < 0, previous + added, added - 1 - last), params.num_codes + 1)


def _process(params: ImageTokens, since: Array, tree: TokenTree, above: Array, logits: Array) -> Array:
    node = jnp.arange(above.shape[2])
    drafted = above & (node > 0)  # the path to each node, without the root
    last = jnp.max(jnp.where(drafted & (tree.tokens == params.begin)[:, None], node, 0), 2)  # int32[B, R]
    behind = jnp.sum(drafted & (node > last[..., None]), 2)
    since = jnp.where(last > 0, behind, since[:, None] + behind)[..., None]
    token = jnp.arange(logits.shape[2])
    is_code = jnp.pad(params.is_code, (0, logits.shape[2] - len(params.is_code)))
    in_image = jnp.where(since == params.num_codes, token == params.end, is_code)
    return jnp.where(jnp.where(since > params.num_codes, ~is_code, in_image), logits, -jnp.inf)
