"""What the loops over one model share that write several tokens a pass by themselves: their beginning and their end."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import zero_stats
from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree, Sampling, Target


class Begun(NamedTuple):
    """Prompts, and how to go on."""

    tokens: Array  # int32[B, L], with room behind the text
    prompts: Array  # int32[B], their lengths
    stop: Array  # int32[B], where the texts end at the latest
    keys: Array  # key[B]
    sampling: Sampling
    eos: Array  # int32[E]
    inputs: PyTree


def begin(
    target: Target, prompts: Prompts, settings: Settings, *, key, max_new_tokens: int, room: int, inputs: PyTree = None
) -> Begun:
    """room: tokens of a pass at most. Raises: UsageError as `specjax.decode` does."""
    count, capacity = new_tokens(max_new_tokens), settings.capacity or target.model.max_positions
    tokens, lengths = pack(prompts, count, room, capacity, target.model.vocab_size)
    settings.check_batch(len(tokens))
    keys = row_keys(key, len(tokens))
    return Begun(tokens, lengths, lengths + count, keys, settings.warping(), settings.ends(), inputs)


def written(
    prompts: Array, tokens: Array, length: Array, passes: Array, hit_eos: Array, max_new_tokens: int
) -> DecodeResult:
    """What stands behind the prompts int32[B] in tokens int32[B, L], of which `length` int32[B] are text."""
    place = prompts[:, None] + jnp.arange(max_new_tokens)
    count = length - prompts
    new = take_along(tokens, jnp.minimum(place, tokens.shape[1] - 1), 1)
    new = jnp.where(jnp.arange(max_new_tokens) < count[:, None], new, -1)
    stats = zero_stats(len(prompts), 0)._replace(target_passes=passes, hit_eos=hit_eos)
    return DecodeResult(new, count, hit_eos, stats)
