"""Heads that draft some of the target's ids: which these are, and how such a head is trained on them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.training.data.packing import Text
from specjax.types import Array, PyTree

NAME = "vocabulary"


def own_ids(params: PyTree) -> tuple[PyTree, Array | None]:
    """Parameters of a head that says logits of its own ids, and int32[V], the place of each of the target's among them.

    A map of no entries is what says so (`blocks.DraftVocabulary`). None: the head drafts all.
    """
    if NAME not in params:
        return params, None
    place = params[NAME]["place"]
    return params | {NAME: {"place": place[:0]}}, place


def likeliest_ids(texts: Iterable[Text], size: int, vocab: int, needed: Iterable[int] = ()) -> np.ndarray:
    """int64[size], ascending: the ids that answers have most often, `needed` among them, the lowest where few are.

    Raises: UsageError if more are needed than there is room for.
    """
    counts = Counter(token for text in texts for token in text.tokens[text.answer :])
    needed = sorted(set(needed))
    if len(needed) > size:
        raise UsageError(f"a draft vocabulary of {size} has no room for the {len(needed)} tokens that end a text")
    often = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    order = dict.fromkeys([*needed, *often, *range(vocab)])
    return np.sort(np.fromiter(order, np.int64)[:size])


def checked_ids(ids: Any, size: int, vocab: int) -> np.ndarray:
    """int64[size]: ids that a head drafts of so many. Raises: UsageError for others."""
    found = np.asarray(ids)
    if found.shape != (size,) or not np.issubdtype(found.dtype, np.integer):
        raise UsageError(f"the head drafts {size} tokens, so ids must be as many whole numbers, not {found.shape}")
    if not np.all(np.diff(found) > 0) or found[0] < 0 or found[-1] >= vocab:
        raise UsageError(f"ids must ascend, each from 0 to {vocab - 1}")
    return found.astype(np.int64)


def place_of(ids: np.ndarray, vocab: int) -> Any:
    """int32[V], as `DraftVocabulary` has it."""
    place = np.full(vocab, len(ids), np.int32)
    place[ids] = np.arange(len(ids))
    return jnp.asarray(place)
