"""HAMburger: the base model reads several tokens as one, and a small decoder writes the next few tokens.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

Rule: a macro step is one pass of the base model over the last segment y_1 ... y_s. The segment has 1 to 4 tokens,
merged into one embedding. It takes one slot of the cache and has the position of y_s. The base model writes the first
token of the next segment. The micro-step decoder writes the others, until 1 - p_stop is below `confidence` or the
segment is full (`specjax.models.heads.hamburger`). The prompt is read token by token.
Guarantee: lossy. If `confidence` is above 1, all segments have one token, and the text is the base model's own at any
temperature. The lossless version is `drafters.hamburger`.

Only a base model that was trained with segments can read them; `specjax.training.train_hamburger` trains all parts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import LoopInputs, build_result, check_rows, init_loop
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.value_checks import are_sound
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind
from specjax.models.heads.contract import DraftedNodes, DraftHead
from specjax.models.heads.hamburger import Hamburger
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import node_keys
from specjax.numerics.validation import check_range
from specjax.types import Array, Context, DraftOutput, PyTree, Stream, Target

METHOD = Method(
    name="hamburger_decoding",
    kind="decoder",
    guarantee="lossy",
    summary="reads several tokens as one position of the base model, and writes the next few with a small decoder",
    paper="Liu, Zhang 2025, arXiv 2505.20438",
    needs=frozenset({"head"}),
    options=(Option("confidence", "float", 0.9, "minimum probability at which a segment continues; above 1: never"),),
    arguments=("target", "draft"),
    settings=("key", "temperature", "top_k", "top_p"),
    factory="hamburger",
)


def hamburger(
    target: Target,
    head: DraftHead,
    prompts: Prompts,
    *,
    key: Array | int = 0,
    max_new_tokens: int,
    confidence: float = 0.9,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> DecodeResult:
    """Decode with a base model `target` and the other parts `head`, trained together, in one compiled program.

    Args:
      confidence: a segment continues while 1 - p_stop is at least this value. With 0.5 it continues while that is more
        likely than stopping.
      The other arguments are those of `decode`.

    Returns: DecodeResult, in which `stats.target_passes` counts the macro steps. Each takes one slot of the cache.

    Raises: UsageError for a head that is not a HAMburger head, or does not fit the base model. It is also raised for a
      setting out of range, and for parts that return NaN or Inf.
    """
    check(target, head)
    settings = check_options(confidence=confidence, temperature=temperature, top_k=top_k, top_p=top_p)
    settings = dataclasses.replace(settings, eos=eos, capacity=capacity)
    segment_size = head.head.config.segment
    loop_inputs = init_loop(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=segment_size, inputs=inputs
    )  # fmt: skip
    result = _run(target, head, loop_inputs, jnp.float32(confidence), max_new_tokens=int(max_new_tokens))
    return check_rows(result, target, head)


def check_options(
    *, confidence: float, temperature: float | Array = 0.0, top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Settings:  # fmt: skip
    """Check the options that need no model, and return the settings. Raises: UsageError."""
    check_range("confidence", confidence, lambda x: x >= 0, "at least 0")
    return Settings(temperature, top_k, top_p)


def check(target: Target, head: DraftHead) -> None:
    """Raise UsageError for a head that is not a HAMburger head, or does not fit the base model."""
    model = target.model
    if head.head.kind != "hamburger":
        raise UsageError(f"hamburger needs a head of kind hamburger, not {head.head.kind}")
    capabilities, config = model.capabilities, head.head.config
    if not (capabilities.streams and capabilities.taps) or getattr(model.config, "window", None) is not None:
        raise UsageError(
            f"{model.name} cannot read segments: it has windows or accepts only token ids; choose another model"
        )
    if max(config.taps) > capabilities.num_layers:
        raise UsageError(
            f"the head reads layer {max(config.taps)}, but {model.name} has {capabilities.num_layers} layers"
        )
    if model.config is not None and model.config.width != config.layer.width:
        raise UsageError(
            f"the head reads hidden states of width {config.layer.width}, but {model.name} has {model.config.width}; "
            "use the base model that the head was trained with"
        )


class State(NamedTuple):
    cache: PyTree
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    size: Array  # int32[B], number of tokens of the last segment, which the base model has not read
    ended: Array  # bool[B], true after an eos
    finite: Array  # bool[B], false for rows that failed
    passes: Array  # int32[B]


class SegmentState(NamedTuple):
    """State of the segment that is being written."""

    tokens: Array
    length: Array
    size: Array
    ended: Array
    finite: Array
    is_running: Array  # bool[B]


@functools.partial(jax.jit, static_argnames="max_new_tokens")
@with_standard_modes
def _run(
    target: Target, head: DraftHead, loop_inputs: LoopInputs, confidence: Array, *, max_new_tokens: int
) -> DecodeResult:
    model, params, config = target.model, target.params, head.head.config
    (batch, room), max_size = loop_inputs.tokens.shape, config.segment
    rows, zero, self_mask = jnp.arange(batch), jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch, 1, 1), bool)
    merge = bind(Hamburger, config)(head.params).merge

    def write_token(segment_state: SegmentState, logits: Array) -> SegmentState:
        """Add one token to the running rows. Rows with logits that are no numbers fail."""
        keys = node_keys(loop_inputs.keys, segment_state.length, zero)[:, 0]
        token = draw_warped(keys, logits, loop_inputs.sampling)
        finite = segment_state.finite & (are_sound(logits) | ~segment_state.is_running)
        writes = segment_state.is_running & finite
        tokens = segment_state.tokens.at[rows, jnp.where(writes, segment_state.length, room)].set(token, mode="drop")
        length = segment_state.length + writes
        ended = segment_state.ended | (writes & jnp.any(token[:, None] == loop_inputs.eos, 1))
        is_running = writes & ~ended & (length < loop_inputs.stop)
        return SegmentState(tokens, length, segment_state.size + writes, ended, finite, is_running)

    def write_segment(segment_state: SegmentState, last: Array) -> SegmentState:
        """Add the other tokens of a segment, from the base model's hidden states [B, F] of the last segment."""
        context = Context(segment_state.tokens, segment_state.length, target=target)
        scratch, output = head.head.start(head.params, last.astype(config.layer.dtype), context, max_size)
        assert isinstance(output, DraftOutput)
        carry = stop_if_unsure(segment_state, output), scratch, output
        for depth in range(1, max_size):
            carry = jax.lax.cond(
                jnp.any(carry[0].is_running), functools.partial(micro_step, depth), lambda carry: carry, carry
            )
        return carry[0]

    def stop_if_unsure(segment_state: SegmentState, output: DraftOutput) -> SegmentState:
        assert output.confidence is not None
        return segment_state._replace(is_running=segment_state.is_running & (output.confidence >= confidence))

    def micro_step(depth: int, carry):
        segment_state, scratch, output = carry
        segment_state = write_token(segment_state, output.logits)
        if depth == max_size - 1:
            return segment_state, scratch, output
        slots = jnp.arange(max_size)
        visible = jnp.broadcast_to((slots > 0) & (slots < depth), (batch, 1, max_size))
        token = take_along(segment_state.tokens, segment_state.length[:, None] - 1, 1)
        drafted = DraftedNodes(token, zero + depth, jnp.int32(depth), zero + depth - 1, visible)
        context = Context(segment_state.tokens, segment_state.length, target=target)
        scratch, output = head.head.follow(head.params, scratch, drafted, context)
        output = jax.tree.map(lambda x: x[:, 0], output)
        return stop_if_unsure(segment_state, output), scratch, output

    def find_running(state: State) -> Array:
        return ~state.ended & state.finite & (state.length < loop_inputs.stop)

    def step(state: State) -> State:
        is_running = find_running(state)
        positions = (state.length - state.size)[:, None] + jnp.arange(max_size)
        text = take_along(state.tokens, jnp.minimum(positions, room - 1), 1)
        assert model.embed is not None
        merged = merge(model.embed(params, text), state.size)[:, None]
        output, pending = model.forward(
            params, Stream(merged), state.cache, positions=state.length[:, None] - 1, mask=self_mask, taps=config.taps
        )
        cache = model.commit(state.cache, pending, zero, is_running.astype(jnp.int32))
        segment_state = SegmentState(
            state.tokens, state.length, jnp.where(is_running, 0, state.size), state.ended, state.finite, is_running
        )
        segment_state = write_token(segment_state, output.logits[:, 0])
        last = head.head.features_of(output)[:, 0]
        segment_state = jax.lax.cond(
            jnp.any(segment_state.is_running), lambda: write_segment(segment_state, last), lambda: segment_state
        )
        return State(
            cache,
            segment_state.tokens,
            segment_state.length,
            segment_state.size,
            segment_state.ended,
            segment_state.finite,
            state.passes + is_running,
        )

    cache = model.start_cache(params, loop_inputs.inputs, loop_inputs.prompts, room)
    cache = prefill(model, params, cache, loop_inputs.tokens, loop_inputs.prompts - 1)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = State(cache, loop_inputs.tokens, loop_inputs.prompts, zeros + 1, zeros > 0, loop_inputs.usable, zeros)
    state = jax.lax.while_loop(lambda state: jnp.any(find_running(state)), step, state)
    return build_result(
        loop_inputs.prompts, state.tokens, state.length, state.passes, state.ended, state.finite, max_new_tokens
    )
