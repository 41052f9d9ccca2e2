"""Draft vocabularies: selection of the target ids that a head drafts, and training on only these ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
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
    """Return int64[size], ascending: the required ids, and the most frequent ids of the responses.

    If the responses have too few different ids, the lowest other ids are added.

    Raises: UsageError if more than `size` ids are required.
    """
    counts = Counter(token for text in texts for token in text.response_tokens)
    required = sorted(set(required))
    if len(required) > size:
        raise UsageError(
            f"a draft vocabulary of {size} has no room for the {len(required)} tokens that end a text; make it larger"
        )
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    order = dict.fromkeys([*required, *frequent, *range(vocab_size)])
    return np.sort(np.fromiter(order, np.int64)[:size])


def check_draft_ids(ids: Any, size: int, vocab_size: int) -> np.ndarray:
    """Check the ids that a head drafts, and return them as int64[size]. Raises: UsageError for invalid ids."""
    array = np.asarray(ids)
    if array.shape != (size,) or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(
            f"ids must be {size} integers, one per token that the head drafts, not {array.dtype}{list(array.shape)}"
        )
    if not np.all(np.diff(array) > 0) or array[0] < 0 or array[-1] >= vocab_size:
        raise UsageError(f"ids must be in ascending order, each from 0 to {vocab_size - 1}")
    return array.astype(np.int64)


def invert_ids(ids: np.ndarray, vocab_size: int) -> Any:
    """Return int32[V], the draft id of each target id, or len(ids), as `DraftVocabulary` stores it."""
    draft_ids = np.full(vocab_size, len(ids), np.int32)
    draft_ids[ids] = np.arange(len(ids))
    return jnp.asarray(draft_ids)


def find_unused_token(texts: Sequence[TrainingText], vocab_size: int, eos: Collection[int] = ()) -> int:
    """Return the largest token that no text contains and that ends none. Raises: UsageError if there is none."""
    used = {token for text in texts for token in text.tokens} | set(map(int, eos))
    unused = next((token for token in reversed(range(vocab_size)) if token not in used), None)
    if unused is None:
        raise UsageError(
            "the texts contain all tokens, so none can be the mask token; give one (`mask_token`, `pad_token`)"
        )
    return unused
