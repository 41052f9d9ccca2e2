"""Allowed tokens by place: the tokens of an image, whose layout determines what each of its places can contain.

Rule: x = -inf at place i of the answer for every token outside of the set of place i. The first token after the prompt
has place 0. Places behind the last one are free. A set of one token forces it: every exact rule accepts a draft of this
token, see `forced_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.processors.places.answer_places import add_count, init_count, places_of_nodes
from specjax.types import Array, Processor, TokenTree


class AllowedSets(NamedTuple):
    """The sets of allowed tokens, and the set of each place."""

    is_allowed: Array  # bool[S, W], for the first W tokens of the vocabulary; the others are not allowed
    set_of: Array  # int32[P]


def by_place(sets: Sequence[Iterable[int]], places: Sequence[int]) -> Processor:
    """Build the processor. Token i of an answer must be in `sets[places[i]]`.

    Args:
      sets: token ids, such as range(8192) for the codes of an image and [8803] for the newline behind a row.

    Raises: UsageError for an empty set, an invalid id, no places, or a place without a set.
    """
    ids = [_ids_of_set(number, tokens) for number, tokens in enumerate(sets)]
    set_of = np.asarray(places)
    if (
        set_of.ndim != 1
        or not set_of.size
        or set_of.dtype.kind not in "iu"
        or np.any((set_of < 0) | (set_of >= len(ids)))
    ):
        raise UsageError(f"places must be a list of numbers of the {len(ids)} sets, from 0, not {places!r}")
    is_allowed = np.zeros((len(ids), 1 + max(int(tokens.max()) for tokens in ids)), bool)
    for row, tokens in zip(is_allowed, ids, strict=True):
        row[tokens] = True
    params = AllowedSets(jnp.asarray(is_allowed), jnp.asarray(set_of, jnp.int32))
    return Processor(process=_process, init=init_count, update=add_count, check=_check, by_row=True, params=params)


def _ids_of_set(number: int, tokens: Iterable[int]) -> np.ndarray:
    """Return the ids of a set. Raises: UsageError for an empty set, and for entries that are no ids."""
    try:
        ids = np.asarray([*tokens])
    except (TypeError, ValueError):  # a number, or lists of different lengths
        ids = np.zeros(0)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or np.any((ids < 0) | (ids >= 1 << 31)):
        raise UsageError(f"set {number} must be one or more token ids from 0, not {tokens!r}")
    return ids


def forced_tokens(processor: Processor) -> tuple[int, ...]:
    """Return the token that a processor of `by_place` forces at each place, or -1 at places with a choice.

    `jacobi(forced=...)` drafts these tokens. Raises: UsageError for another processor.
    """
    if not isinstance(processor.params, AllowedSets):
        raise UsageError("only processors of by_place force tokens by place; give the result of by_place(...)")
    sets = np.asarray(processor.params.is_allowed)
    single = np.where(sets.sum(1) == 1, sets.argmax(1), -1)
    return tuple(single[np.asarray(processor.params.set_of)].tolist())


def _check(processor: Processor, vocab_size: int) -> None:
    width = processor.params.is_allowed.shape[1]
    if width > vocab_size:
        raise UsageError(f"by_place has token {width - 1}, outside of the model's vocabulary of {vocab_size}")


def _process(params: AllowedSets, count: Array, tree: TokenTree, above: Array, logits: Array) -> Array:
    place = places_of_nodes(count, above)
    last = len(params.set_of) - 1
    rows = params.is_allowed[params.set_of[jnp.minimum(place, last)]]
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, logits.shape[2] - rows.shape[2])))
    return jnp.where(rows | (place > last)[..., None], logits, -jnp.inf)
