"""Forced tokens: the token at some places of an answer is given, such as the end of the text at its last place.

Rule: x = 0 at a forced place for its token, and -inf for every other one, as in transformers. So the token is possible
even if an earlier processor excludes it. The first token after the prompt has place 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.processors.places.answer_places import add_count, init_count, places_of_nodes
from specjax.types import Array, Processor, TokenTree


class ForcedPlaces(NamedTuple):
    """The forced places of every answer, and their tokens."""

    places: Array  # int32[K]
    tokens: Array  # int32[K]


def forced(tokens: Mapping[int, int]) -> Processor:
    """Build the processor from tokens by place. Other places and tokens of the same number compile no new program.

    BART's files state `forced_eos_token_id`: `forced({max_new_tokens - 1: token})` ends a text at its last place.

    Raises: UsageError for no places, and for places or tokens that are no whole numbers from 0.
    """
    is_number = lambda value: isinstance(value, int | np.integer) and 0 <= value < 1 << 31
    if not (isinstance(tokens, Mapping) and tokens and all(map(is_number, [*tokens, *tokens.values()]))):
        raise UsageError(f"forced needs token ids by place, such as {{0: 2}}, not {quote(tokens)}")
    places, ids = (jnp.asarray(list(values), jnp.int32) for values in (tokens.keys(), tokens.values()))
    params = ForcedPlaces(places, ids)
    return Processor(process=_process, init=init_count, update=add_count, check=_check, by_row=True, params=params)


def _check(processor: Processor, vocab_size: int) -> None:
    tokens = processor.params.tokens
    if not isinstance(tokens, jax.core.Tracer) and np.any(np.asarray(tokens) >= vocab_size):
        raise UsageError(f"forced has token {np.max(tokens)}, outside of the model's vocabulary of {vocab_size}")


def _process(params: ForcedPlaces, count: Array, tree: TokenTree, above: Array, logits: Array) -> Array:
    place = places_of_nodes(count, above)
    is_here = place[..., None] == params.places
    token = jnp.sum(jnp.where(is_here, params.tokens, 0), -1)
    of_place = jnp.where(jnp.arange(logits.shape[2]) == token[..., None], 0.0, -jnp.inf)
    return jnp.where(jnp.any(is_here, -1)[..., None], of_place, logits)
