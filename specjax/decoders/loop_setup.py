"""Inputs and results of loops over one model that decodes several tokens per pass."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.engine.packing import Prompts, check_new_tokens, pack
from specjax.engine.prepare import Settings, check_inputs, find_usable
from specjax.engine.results import DecodeResult, zero_stats
from specjax.engine.value_checks import find_bad_parameter, raise_failure
from specjax.models.requirements import check_complete_cache
from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree, Sampling, Target

Result = TypeVar("Result", bound=DecodeResult)


class LoopInputs(NamedTuple):
    """Prompts and settings of a loop."""

    tokens: Array  # int32[B, L], prompts, then slots for new tokens
    prompts: Array  # int32[B], lengths of the prompts
    stop: Array  # int32[B], maximum lengths of the texts; those of rows that are not usable are the prompts' lengths
    keys: Array  # key[B]
    sampling: Sampling
    eos: Array  # int32[E]
    inputs: PyTree
    usable: Array  # bool[B], False for rows with an invalid traced prompt or setting, which decode no token


@with_standard_modes
def init_loop(
    target: Target, prompts: Prompts, settings: Settings, *, key, max_new_tokens: int, room: int,
    inputs: PyTree = None, longest: int | None = None,
) -> LoopInputs:  # fmt: skip
    """Pack the prompts and check the settings.

    Args:
      room: maximum number of tokens per pass.
      longest: maximum length of a text for another model of the loop; None: any.

    Raises: UsageError for the same settings as `specjax.decode`.
    """
    model, count = target.model, check_new_tokens(max_new_tokens)
    check_complete_cache(model, "this method")
    settings.check_eos(model.vocab_size)
    capacity = settings.capacity or model.max_positions
    capacity = capacity if longest is None else min(capacity, longest)
    tokens, lengths = pack(prompts, count, room, capacity, model.vocab_size)
    settings.check_batch(len(tokens))
    check_inputs(target, inputs, tokens, lengths, count)
    usable = find_usable(settings, prompts, len(tokens), count, capacity, model.vocab_size)
    usable = jnp.ones((len(tokens),), bool) if usable is None else usable
    stop, keys = lengths + jnp.where(usable, count, 0), row_keys(key, len(tokens))
    return LoopInputs(tokens, lengths, stop, keys, settings.to_sampling(), settings.eos_ids(), inputs, usable)


def check_rows(result: Result, *models: Any) -> Result:
    """Return the result. Traced results pass.

    Raises: UsageError if a row failed, with the name of a parameter of `models` that contains NaN or Inf.
    """
    finite = result.finite
    if finite is not None and not isinstance(finite, jax.core.Tracer) and not bool(jnp.all(finite)):
        raise_failure(finite, next((model for model in models if find_bad_parameter(model)), models[0]))
    return result


def build_result(
    prompts: Array, tokens: Array, length: Array, passes: Array, hit_eos: Array, finite: Array, max_new_tokens: int
) -> DecodeResult:
    """Build the result of texts int32[B, L] of `length` int32[B] tokens after prompts of `prompts` int32[B] tokens.

    finite: bool[B], False for rows that failed.
    """
    positions = prompts[:, None] + jnp.arange(max_new_tokens)
    count = length - prompts
    new = take_along(tokens, jnp.minimum(positions, tokens.shape[1] - 1), 1)
    new = jnp.where(jnp.arange(max_new_tokens) < count[:, None], new, -1)
    stats = zero_stats(len(prompts), 0)._replace(target_passes=passes, hit_eos=hit_eos)
    return DecodeResult(new, count, hit_eos, stats, finite=finite)
