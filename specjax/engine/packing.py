"""Packing of prompts into one token buffer with slots for the text that follows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.engine.step import buffer_size
from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.numerics.validation import pad_rows
from specjax.types import Array, Source

Prompts = Sequence[Sequence[int]] | tuple[Array | np.ndarray, Array | np.ndarray]
"""A list of token lists, or (tokens int32[B, P], lengths int32[B]) padded on the right."""


def batches_of(prompts: Prompts, size: int) -> list[Prompts]:
    """Return the prompts in batches of at most `size` rows, in order."""
    if isinstance(prompts, tuple):
        tokens, lengths = prompts
        return [(tokens[start : start + size], lengths[start : start + size]) for start in range(0, len(tokens), size)]
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def pack(
    prompts: Prompts, max_new_tokens: int, num_nodes: int, capacity: int, vocab_size: int | None = None
) -> tuple[Array, Array]:
    """Return (tokens int32[B, L], lengths int32[B]) with slots for the new tokens and a tree.

    Traced lengths and ids are clipped to their ranges; `find_usable_rows` marks their rows.

    Raises: UsageError if the prompts are not token ids. If values are not traced, also for a prompt that is empty or
      exceeds `capacity`, and for ids outside of the vocabulary.
    """
    if isinstance(prompts, tuple) and len(prompts) == 2 and hasattr(prompts[0], "ndim"):
        array: Any = prompts[0]
        tokens, lengths = _check_integers(jnp.asarray(array)), _check_integers(jnp.asarray(prompts[1]))
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise UsageError(f"prompts must be (tokens[B, P], lengths[B]), not {tokens.shape} and {lengths.shape}")
        check_prompts(array, lengths, max_new_tokens, capacity, vocab_size)  # before the conversion to 32 bits
        if is_traced(tokens, lengths):
            lengths = jnp.clip(lengths, 1, tokens.shape[1])
            tokens = tokens if vocab_size is None else jnp.clip(tokens, 0, vocab_size - 1)
        size = buffer_size(tokens.shape[1], max_new_tokens, num_nodes, capacity)
        return jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, size - tokens.shape[1]))), lengths.astype(jnp.int32)
    rows = to_rows(prompts)
    lengths = np.asarray([len(row) for row in rows], np.int32)
    _check_lengths(lengths, max_new_tokens, capacity)
    padded = pad_rows(rows, buffer_size(int(lengths.max()), max_new_tokens, num_nodes, capacity))
    _check_ids(padded, lengths, vocab_size)
    return jnp.asarray(padded), jnp.asarray(lengths)


def check_prompts(tokens: Any, lengths: Any, max_new_tokens: int, capacity: int, vocab_size: int | None) -> None:
    """Check prompts int[B, P] of `lengths` int[B] tokens; traced values pass. Raises: UsageError as `pack` does."""
    _check_lengths(_check_integers(lengths), max_new_tokens, capacity, tokens.shape[1])
    _check_ids(_check_integers(tokens), lengths, vocab_size)


def check_source(source: Source, vocab_size: int) -> None:
    """Check the texts that an encoder reads; traced values pass. Raises: UsageError as `pack` does for prompts."""
    tokens, lengths = (_check_integers(jnp.asarray(part)) for part in source)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise UsageError(f"a source must have tokens[B, S] and length[B], not {tokens.shape} and {lengths.shape}")
    _check_lengths(lengths, 0, tokens.shape[1], tokens.shape[1], kind="source")
    _check_ids(tokens, lengths, vocab_size, kind="source")


def find_usable_rows(prompts: Prompts, max_new_tokens: int, capacity: int, vocab_size: int) -> Array | None:
    """Return True for prompts that `pack` would accept, bool[R], or None if their values are not traced."""
    tokens, lengths = prompts if isinstance(prompts, tuple) and len(prompts) == 2 else (None, None)
    if not is_traced(tokens, lengths):
        return None
    tokens, lengths = _check_integers(jnp.asarray(tokens)), _check_integers(jnp.asarray(lengths))
    longest = min(tokens.shape[1], capacity - max_new_tokens)
    is_padding = jnp.arange(tokens.shape[1]) >= lengths[:, None]
    is_token = (tokens >= 0) & (tokens < vocab_size)
    return (lengths >= 1) & (lengths <= longest) & jnp.all(is_token | is_padding, 1)


def is_traced(*values: Any) -> bool:
    """Return True if any of the values is traced by `jit` or another transformation."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def check_new_tokens(count) -> int:
    """Return `max_new_tokens` as an int. Raises: UsageError unless it is a concrete integer of at least 1."""
    if isinstance(count, jax.core.Tracer):
        raise UsageError("max_new_tokens is an array size, so it cannot be traced; make it a static argument of jit")
    try:
        number = operator.index(count)
    except TypeError:
        raise UsageError(f"max_new_tokens must be an int, not {count!r}") from None
    if number < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {number}")
    return number


def to_rows(prompts: Prompts) -> list[np.ndarray]:
    """Return each prompt as integers [P]. Raises: UsageError for an empty list, text, or a prompt outside of a list."""
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__iter__"):
        raise UsageError(f"prompts must be a list of token lists, not {type(prompts).__name__}")
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("prompts are lists of token ids, not text; encode it with the model's tokenizer first")
    if not len(prompts):
        raise UsageError("prompts is empty; give at least one prompt")
    try:
        is_flat = any(np.ndim(prompt) != 1 for prompt in prompts)
    except ValueError:
        raise UsageError("prompts must be a list of token lists, not lists of lists") from None
    if is_flat:
        raise UsageError("prompts must be a list of token lists; put a single prompt into a list: [prompt]")
    return [_check_integers(np.asarray(prompt)) if len(prompt) else np.zeros(0, np.int32) for prompt in prompts]


def _check_integers(ids):
    """Return integers of at least 32 bits, which can be compared with any id. Raises: UsageError for other arrays."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise UsageError(f"token ids and lengths must be integers, not {ids.dtype}")
    return ids.astype(np.int32) if ids.dtype.itemsize < 4 else ids


def _check_lengths(
    lengths: Array | np.ndarray, max_new_tokens: int, capacity: int, width: int | None = None, kind: str = "prompt"
) -> None:
    """Check the lengths of the prompts or sources. `width` is the width of their array. Raises: UsageError."""
    if is_traced(lengths):
        return
    for row, length in enumerate(gather(lengths)):
        if width is not None and length > width:
            raise UsageError(f"{kind} {row} has the length {length}, but the array of {kind}s has {width} columns")
        if length < 1:
            raise UsageError(f"{kind} {row} is empty; a {kind} needs at least one token (such as bos)")
        if length + max_new_tokens > capacity:
            raise UsageError(
                f"prompt {row} has {length} tokens and max_new_tokens is {max_new_tokens}, more than the capacity of "
                f"{capacity} positions; shorten the prompt, lower max_new_tokens or raise capacity"
            )


def _check_ids(
    tokens: Array | np.ndarray, lengths: Array | np.ndarray, vocab_size: int | None, kind: str = "prompt"
) -> None:
    """Check that all tokens are in the vocabulary. Raises: UsageError."""
    if vocab_size is None or is_traced(tokens, lengths):
        return
    tokens, lengths = gather(tokens), gather(lengths)
    wrong = ((tokens < 0) | (tokens >= vocab_size)) & (np.arange(tokens.shape[1]) < lengths[:, None])
    for row, place in np.argwhere(wrong)[:1]:
        raise UsageError(
            f"{kind} {row} has the token {tokens[row, place]} at place {place}, outside of the model's vocabulary of "
            f"{vocab_size}; was it encoded with another tokenizer?"
        )
