"""Draft vocabularies: the choice of the target's ids that a head drafts, and training on these ids alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.training.data.packing import TrainingText
from specjax.types import Array, PyTree

VOCABULARY = "vocabulary"  # entry of a head's parameters


def use_draft_ids(params: PyTree) -> tuple[PyTree, Array | None]:
    """Return parameters whose logits are over the draft vocabulary, and int32[V], the draft id of each target id.

    An empty map makes the head return logits over its own ids (`blocks.DraftVocabulary`). The array is None for a head
    that drafts all ids.
    """
    if VOCABULARY not in params:
        return params, None
    draft_ids = params[VOCABULARY]["place"]
    return params | {VOCABULARY: {"place": draft_ids[:0]}}, draft_ids


def most_frequent_ids(
    texts: Iterable[TrainingText], size: int, vocab_size: int, required: Iterable[int] = ()
) -> np.ndarray:
    """Return int64[size], ascending: the required ids and those that are most frequent in the responses.

    The lowest ids fill up the rest.

    Raises: UsageError if more than `size` ids are required.
    """
    counts = Counter(token for text in texts for token in text.tokens[text.prompt_length :])
    required = sorted(set(required))
    if len(required) > size:
        raise UsageError(f"a draft vocabulary of {size} has no room for the {len(required)} tokens that end a text")
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    order = dict.fromkeys([*required, *frequent, *range(vocab_size)])
    return np.sort(np.fromiter(order, np.int64)[:size])


def check_draft_ids(ids: Any, size: int, vocab_size: int) -> np.ndarray:
    """Return int64[size], the ids that a head drafts. Raises: UsageError for invalid ids."""
    array = np.asarray(ids)
    if array.shape != (size,) or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"the head drafts {size} tokens, so ids must be as many whole numbers, not {array.shape}")
    if not np.all(np.diff(array) > 0) or array[0] < 0 or array[-1] >= vocab_size:
        raise UsageError(f"ids must ascend, each from 0 to {vocab_size - 1}")
    return array.astype(np.int64)


def invert_ids(ids: np.ndarray, vocab_size: int) -> Any:
    """Return int32[V], the draft id of each target id, or len(ids), as `DraftVocabulary` stores it."""
    draft_ids = np.full(vocab_size, len(ids), np.int32)
    draft_ids[ids] = np.arange(len(ids))
    return jnp.asarray(draft_ids)
