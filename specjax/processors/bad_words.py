"""Bad words: sequences of tokens that a text never contains.

Rule: x = -inf for the last token of a word if the text ends with the tokens before it. Only decoded tokens count, so a
word may begin in the prompt (as in vLLM; transformers matches the prompt too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.types import Array, Processor, TokenTree

ROOM = 8
"""The number of words is padded to a multiple of this, so that few programs are compiled."""

Words = Sequence[Sequence[int]]


class Recent(NamedTuple):
    """The last decoded tokens, and the words."""

    tokens: Array  # int32[B, M - 1], -1 before the first decoded token
    words: Array  # int32[B, K, M], with -1 in front of shorter words; all -1 for no word


def bad_words(words: Words | Sequence[Words], *, room: int = 0, longest: int = 0) -> Processor:
    """Build the processor.

    Args:
      words: lists of token ids, or one such list of words per row.
      room, longest: minimum number of words, and of tokens per word. With equal ones, other words need no compilation,
        and `serve` accepts them.

    Raises: UsageError for a word without tokens, or an invalid id.
    """
    per_row: Any = words if _is_per_row(words) else [words]
    rows: list[list[Sequence[int]]] = [list(row) for row in per_row]
    lengths = [np.size(word) for row in rows for word in row]
    if 0 in lengths:
        raise UsageError("a bad word has no tokens; leave it out")
    size = -(-max(room, 1, *map(len, rows)) // ROOM) * ROOM
    padded = np.full((len(rows), size, max(longest, 1, *lengths)), -1, np.int32)
    for row, words_of_row in enumerate(rows):
        for place, word in enumerate(words_of_row):
            if wrong := [token for token in word if not 0 <= token < 1 << 31 or token != int(token)]:
                raise UsageError(f"a bad word needs token ids, not {wrong[0]!r}")
            padded[row, place, padded.shape[2] - len(word) :] = word
    return Processor(process=_process, init=_init, update=_update, check=_check, by_row=True, settings=padded)


def encode_words(texts: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the tokens of each text without and with a space in front, as vLLM does.

    The second form is left out if it only adds a token for the space. Other tokenizations of a text are not covered.

    Args:
      encode: a tokenizer without special tokens.
    """
    words = []
    for text in texts:
        inside, spaced = encode(text.lstrip()), encode(f" {text.lstrip()}")
        words.append(inside)
        if len(spaced) == len(inside) and spaced[:1] != inside[:1]:
            words.append(spaced)
    return [word for word in words if word]


def _is_per_row(words: Any) -> bool:
    """Return True for lists of words, and False for one list of words, which are lists of ids."""
    return any(np.ndim(token) for word in words for token in word)


def _check(processor: Processor, vocab_size: int) -> None:
    words = processor.settings
    if isinstance(words, jax.core.Tracer):
        return
    if np.any(words >= vocab_size):
        raise UsageError(f"a bad word has token {np.max(words)}, outside of the model's vocabulary of {vocab_size}")
    for row in np.asarray(words):
        is_token = np.all(row[:, :-1] < 0, 1) & (row[:, -1] >= 0)
        if len(np.unique(row[is_token, -1])) >= vocab_size:
            raise UsageError(f"all {vocab_size} tokens of the vocabulary are bad words; leave some out")


def _init(params, words: Array, tokens: Array, length: Array, vocab_size: int) -> Recent:
    return Recent(jnp.full((len(words), words.shape[2] - 1), -1, jnp.int32), words)


def _process(params, state: Recent, tree: TokenTree, above: Array, logits: Array) -> Array:
    (batch, num_rows, vocab), words = logits.shape, state.words
    recent = _recent_tokens(state.tokens, tree, above)  # int32[B, R, M - 1]
    prefix, last = words[:, None, :, :-1], words[:, :, -1]  # [B, 1, K, M - 1], [B, K]
    matches = jnp.all((prefix == recent[:, :, None]) | (prefix < 0), 3) & (last >= 0)[:, None]  # bool[B, R, K]
    rows, nodes = jnp.arange(batch)[:, None, None], jnp.arange(num_rows)[:, None]
    return logits.at[rows, nodes, jnp.where(matches, last[:, None], vocab)].set(-jnp.inf, mode="drop")


def _recent_tokens(committed: Array, tree: TokenTree, above: Array) -> Array:
    """Return the last M - 1 tokens int32[B, R, M - 1] of the text that ends at the node of each row."""
    drafted = above & (jnp.arange(above.shape[2]) > 0)  # bool[B, R, N]: ancestors of each row, without the root
    depth = jnp.sum(drafted, 2, dtype=jnp.int32)  # int32[B, R]
    distance = depth[:, :, None] - jnp.cumsum(drafted, 2, dtype=jnp.int32)  # 0 at the last token, 1 at its parent
    count = committed.shape[1]
    if not count:
        return jnp.zeros((*depth.shape, 0), jnp.int32)
    back = jnp.arange(count)[::-1]  # int32[M - 1], the distance of each recent token from the last one
    is_there = drafted[:, :, None] & (distance[:, :, None] == back[:, None])  # bool[B, R, M - 1, N]
    on_path = jnp.sum(jnp.where(is_there, tree.tokens[:, None, None], 0), 3, dtype=jnp.int32)
    place = jnp.minimum(depth[:, :, None] + jnp.arange(count), count - 1)  # in the committed tokens, if it is there
    earlier = take_along(jnp.broadcast_to(committed[:, None], place.shape), place, 2)
    return jnp.where(back < depth[:, :, None], on_path, earlier)


def _update(params, state: Recent, tokens: Array, count: Array) -> Recent:
    size = state.tokens.shape[1]
    text = jnp.concatenate([state.tokens, tokens.astype(jnp.int32)], 1)
    return state._replace(tokens=take_along(text, count[:, None] + jnp.arange(size), 1))
