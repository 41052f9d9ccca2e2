"""Inputs and results of loops over one model that decodes several tokens per pass."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.engine.packing import Prompts, check_new_tokens, pack
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult, zero_stats
from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree, Sampling, Target


class LoopInputs(NamedTuple):
    """Prompts and settings of a loop."""

    tokens: Array  # int32[B, L], prompts, then slots for new tokens
    prompts: Array  # int32[B], lengths of the prompts
    stop: Array  # int32[B], maximum lengths of the texts
    keys: Array  # key[B]
    sampling: Sampling
    eos: Array  # int32[E]
    inputs: PyTree


def init_loop(
    target: Target, prompts: Prompts, settings: Settings, *, key, max_new_tokens: int, room: int, inputs: PyTree = None
) -> LoopInputs:
    """Pack the prompts and check the settings.

    Args:
      room: maximum number of tokens per pass.

    Raises: UsageError for the same settings as `specjax.decode`.
    """
    count, capacity = check_new_tokens(max_new_tokens), settings.capacity or target.model.max_positions
    tokens, lengths = pack(prompts, count, room, capacity, target.model.vocab_size)
    settings.check_batch(len(tokens))
    keys = row_keys(key, len(tokens))
    return LoopInputs(tokens, lengths, lengths + count, keys, settings.to_sampling(), settings.eos_ids(), inputs)


def build_result(
    prompts: Array, tokens: Array, length: Array, passes: Array, hit_eos: Array, max_new_tokens: int
) -> DecodeResult:
    """Build the result of texts int32[B, L] of `length` int32[B] tokens after prompts of `prompts` int32[B] tokens."""
    positions = prompts[:, None] + jnp.arange(max_new_tokens)
    count = length - prompts
    new = take_along(tokens, jnp.minimum(positions, tokens.shape[1] - 1), 1)
    new = jnp.where(jnp.arange(max_new_tokens) < count[:, None], new, -1)
    stats = zero_stats(len(prompts), 0)._replace(target_passes=passes, hit_eos=hit_eos)
    return DecodeResult(new, count, hit_eos, stats)
