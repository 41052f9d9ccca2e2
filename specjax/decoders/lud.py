"""Lexical Unit Decoding: a model that was trained for it decodes several adjacent tokens per pass.

Sun, Zhang, Lin, Zhang, Zhang, Wang, Chen, Song, Zhang, Gai, Xiong: Decoding at the Speed of Thought: Harnessing
Parallel Decoding of Lexical Units for LLMs (LREC-COLING 2024), arXiv 2405.15208.

Rule: k tokens [PAD] follow the text in every pass, so it has k + 1 predictions. The first prediction is accepted. The
others are accepted in turn while two conditions are true: the most likely token has a probability of `threshold` or
more, and a token repeats at most `repeats` times in a row of one pass. Keys and values of [PAD] are dropped. The next
pass reads the accepted tokens.
Guarantee: lossy. With k = 0, or a threshold above 1, the text equals plain decoding, at any temperature. The lossless
version is `drafters.ppd` with `specjax.models.heads.ppd.prompts_of_token(target, pad_token, k)`.

`specjax.training.methods.lexical_units` builds training examples from texts, and trains a model.

Deviations: the defaults of `threshold` and `repeats` are our own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import REQUIRED, Method, Option
from specjax.decoders.loop_setup import LoopInputs, build_result, check_rows, init_loop
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.value_checks import are_sound
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, node_keys, warp
from specjax.numerics.validation import MAX_NODES, check_integer, check_range
from specjax.types import Array, PyTree, Target

METHOD = Method(
    name="lud",
    kind="decoder",
    guarantee="lossy",
    summary="decodes several adjacent tokens per pass, up to a confidence, with a model trained for it",
    paper="Sun et al. 2024, arXiv 2405.15208",
    options=(
        Option("pad_token", "int", REQUIRED, "id of the padding token that the model was trained with"),
        Option("slots", "int", 3, "padding tokens per pass"),
        Option("threshold", "float", 0.9, "minimum probability of the most likely token; above 1: never reached"),
        Option("repeats", "int", 2, "maximum number of repetitions of one token in a row, per pass"),
    ),
    arguments=("target",),
    settings=("key", "temperature", "top_k", "top_p"),
)


def lud(
    target: Target,
    prompts: Prompts,
    *,
    pad_token: int,
    key: Array | int = 0,
    max_new_tokens: int,
    slots: int = 3,
    threshold: float = 0.9,
    repeats: int = 2,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> DecodeResult:
    """Decode with a `target` that was trained for lexical units, in one compiled program.

    Args:
      pad_token: id of the padding token that the model was trained with. slots: k.
      threshold: minimum probability of the most likely token; above 1 only the first prediction is accepted.
      repeats: maximum number of repetitions of one token in a row, per pass.
      The other arguments are those of `decode`.

    Returns: DecodeResult, in which `stats.target_passes` counts the passes.

    Raises: UsageError for a setting out of range, or a model that returns NaN or Inf.
    """
    if not 0 <= pad_token < target.model.vocab_size:
        raise UsageError(f"pad_token must be a token of the model, below {target.model.vocab_size}, not {pad_token}")
    settings = check_options(
        pad_token=pad_token, slots=slots, threshold=threshold, repeats=repeats, temperature=temperature, top_k=top_k,
        top_p=top_p,
    )  # fmt: skip
    settings = dataclasses.replace(settings, eos=eos, capacity=capacity)
    loop_inputs = init_loop(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=2 * slots + 1, inputs=inputs
    )  # fmt: skip
    limits = jnp.float32(threshold), jnp.int32(repeats), jnp.int32(pad_token)
    result = _run(target, loop_inputs, *limits, slots=slots, max_new_tokens=int(max_new_tokens))
    return check_rows(result, target)


def check_options(
    *, pad_token: int, slots: int, threshold: float, repeats: int, temperature: float | Array = 0.0,
    top_k: int | Array | None = None, top_p: float | Array | None = None,
) -> Settings:  # fmt: skip
    """Check the options that need no model, and return the settings. Raises: UsageError."""
    check_integer("pad_token", pad_token, 0)
    check_integer("slots", slots, 0, MAX_NODES // 2)  # a pass has 2 k + 1 tokens
    check_integer("repeats", repeats, 0)
    check_range("threshold", threshold, lambda x: x >= 0, "at least 0")
    return Settings(temperature, top_k, top_p)


class State(NamedTuple):
    cache: PyTree  # cache of the first `num_cached` tokens
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    num_cached: Array  # int32[B], number of cached tokens, below the length
    ended: Array  # bool[B], true after an eos
    finite: Array  # bool[B], false for rows that failed
    passes: Array  # int32[B]


@functools.partial(jax.jit, static_argnames=("slots", "max_new_tokens"))
@with_standard_modes
def _run(
    target: Target,
    loop_inputs: LoopInputs,
    threshold: Array,
    repeats: Array,
    pad: Array,
    *,
    slots: int,
    max_new_tokens: int,
) -> DecodeResult:
    model, params, width = target.model, target.params, 2 * slots + 1
    (batch, size), index = loop_inputs.tokens.shape, jnp.arange(slots + 1)
    rows, path = jnp.arange(batch)[:, None], jnp.broadcast_to(jnp.arange(width), (batch, width))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))

    def find_running(state: State) -> Array:
        return ~state.ended & state.finite & (state.length < loop_inputs.stop)

    def step(state: State) -> State:
        is_running = find_running(state)
        unread = state.length - state.num_cached  # from 1 to k + 1
        positions = state.num_cached[:, None] + jnp.arange(width)
        text = take_along(state.tokens, jnp.minimum(positions, size - 1), 1)
        fed = jnp.where(positions < state.length[:, None], text, pad)
        output, pending = model.forward(params, fed, state.cache, positions=positions, mask=mask)
        predictions = take_along(output.logits, ((unread - 1)[:, None] + index)[:, :, None], 1)  # [B, k + 1, V]
        keys = node_keys(loop_inputs.keys, state.length, jnp.broadcast_to(index, (batch, slots + 1)))
        log_p = warp(predictions, loop_inputs.sampling)
        new = jnp.stack([draw(keys[:, i], log_p[:, i]) for i in range(slots + 1)], 1)
        count = num_accepted(predictions, new, take_along(state.tokens, (state.length - 1)[:, None], 1))
        ends = jnp.any(new[:, :, None] == loop_inputs.eos, 2)
        count = jnp.minimum(count, jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, slots + 1))
        finite = jnp.all(are_sound(predictions), 1)
        count = jnp.where(is_running & finite, jnp.minimum(count, loop_inputs.stop - state.length), 0)
        is_accepted = index < count[:, None]
        target_slots = jnp.where(is_accepted, state.length[:, None] + index, size)
        return State(
            cache=model.commit(state.cache, pending, path, jnp.where(is_running, unread, 0)),
            tokens=state.tokens.at[rows, target_slots].set(new, mode="drop"),
            length=state.length + count,
            num_cached=jnp.where(is_running, state.length, state.num_cached),
            ended=state.ended | jnp.any(ends & is_accepted, 1),
            finite=state.finite & (finite | ~is_running),
            passes=state.passes + is_running,
        )

    def num_accepted(logits: Array, new: Array, last: Array) -> Array:
        """Return int32[B], the number of accepted tokens `new` int32[B, k + 1] with logits [B, k + 1, V]."""
        is_confident = jnp.exp(jnp.max(jax.nn.log_softmax(logits), -1)) >= threshold
        is_repeat = new == jnp.concatenate([last, new[:, :-1]], 1)
        run, accepts = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool)
        count = accepts.astype(jnp.int32)
        for i in range(slots + 1):
            run = jnp.where(is_repeat[:, i], run + 1, 0)
            if i:
                accepts &= is_confident[:, i] & (run <= repeats)
                count += accepts
        return count

    cache = model.start_cache(params, loop_inputs.inputs, loop_inputs.prompts, size)
    cache = prefill(model, params, cache, loop_inputs.tokens, loop_inputs.prompts - 1)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = State(
        cache, loop_inputs.tokens, loop_inputs.prompts, loop_inputs.prompts - 1, zeros > 0, loop_inputs.usable, zeros
    )
    state = jax.lax.while_loop(lambda state: jnp.any(find_running(state)), step, state)
    return build_result(
        loop_inputs.prompts, state.tokens, state.length, state.passes, state.ended, state.finite, max_new_tokens
    )
