"""HAMburger: the base reads several tokens as one, and a small decoder writes the next few from what it says of them.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

Rule: a macro step is one pass of the base over the last segment y_1 ... y_s, 1 to 4 tokens merged into one embedding,
which takes one slot of the cache and stands at the position of y_s. The first token of the next segment is the base's;
the micro-step decoder writes the others, until 1 - p_stop is below `confidence` or the segment is full
(`specjax.models.heads.hamburger`). The prompt is read token by token.
Guarantee: lossy; above a confidence of 1 all segments are of one token, and the text is the base's own, at any
temperature. Without loss it is `drafters.hamburger`.

A base that was not trained to read segments cannot: `specjax.training.train_hamburger` trains all parts together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import Begun, begin, written
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind
from specjax.models.heads.contract import DraftedNodes, DraftHead
from specjax.models.heads.hamburger import Hamburger
from specjax.numerics.sampling import draw, node_keys, warp
from specjax.types import Array, Context, DraftOutput, PyTree, Stream, Target

METHOD = Method(
    name="hamburger_decoding",
    kind="decoder",
    guarantee="lossy",
    summary="reads several tokens as one position of the base model, and writes the next few with a small decoder",
    paper="Liu, Zhang 2025, arXiv 2505.20438",
    needs=frozenset({"head"}),
    options=(
        Option("confidence", "float", 0.9, "probability at which a segment continues; above 1: never"),
        Option("temperature", "float", 0.0, "sampling temperature"),
    ),
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
    """The base `target` and its other parts, trained together, in one compiled program.

    Args:
      confidence: a segment goes on where 1 - p_stop is as much; 0.5 where it is likelier than not.
      key and what follows: as for `decode`.

    `stats.target_passes` counts the macro steps, each of which takes one slot of the cache. Raises: UsageError for
    parts that are no HAMburger's, or do not fit the base.
    """
    check(target, head)
    settings = Settings(temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, capacity=capacity)
    segment = head.head.config.segment
    begun = begin(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=segment, inputs=inputs
    )  # fmt: skip
    return _run(target, head, begun, jnp.float32(confidence), max_new_tokens=int(max_new_tokens))


def check(target: Target, head: DraftHead) -> None:
    """Raises: UsageError for parts that are no HAMburger's, or a base that they do not fit."""
    model = target.model
    if head.head.kind != "hamburger":
        raise UsageError(f"hamburger needs a head of its own kind, and this is one of {head.head.kind}")
    able, config = model.capabilities, head.head.config
    if not (able.streams and able.taps) or getattr(model.config, "window", None) is not None:
        raise UsageError(f"{model.name} cannot read segments: it has windows, or reads tokens alone; choose another")
    if max(config.taps) > able.num_layers:
        raise UsageError(f"the head reads stream {max(config.taps)}, and {model.name} has {able.num_layers} layers")
    if model.config is not None and model.config.width != config.layer.width:
        raise UsageError(
            f"the head reads streams of width {config.layer.width}, and {model.name} has {model.config.width}; give it "
            "the base that it was trained with"
        )


class _State(NamedTuple):
    cache: PyTree
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    size: Array  # int32[B], tokens of the last segment, which the base has not read
    ended: Array  # bool[B], by an eos
    passes: Array  # int32[B]


class _Micro(NamedTuple):
    """A segment while it is written."""

    tokens: Array
    length: Array
    size: Array
    ended: Array
    going: Array  # bool[B]


@functools.partial(jax.jit, static_argnames="max_new_tokens")
@without_x64
def _run(target: Target, head: DraftHead, begun: Begun, confidence: Array, *, max_new_tokens: int) -> DecodeResult:
    model, params, config = target.model, target.params, head.head.config
    (batch, room), most = begun.tokens.shape, config.segment
    rows, zero, alone = jnp.arange(batch), jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch, 1, 1), bool)
    merge = bind(Hamburger, config)(head.params).merge

    def write(now: _Micro, logits: Array) -> _Micro:
        """One more token of the rows that are going."""
        keys = node_keys(begun.keys, now.length, zero)[:, 0]
        token = draw(keys, warp(logits, begun.sampling))
        tokens = now.tokens.at[rows, jnp.where(now.going, now.length, room)].set(token, mode="drop")
        length, ended = now.length + now.going, now.ended | (now.going & jnp.any(token[:, None] == begun.eos, 1))
        return _Micro(tokens, length, now.size + now.going, ended, now.going & ~ended & (length < begun.stop))

    def segment(now: _Micro, last: Array) -> _Micro:
        """The tokens behind the first, where the base said the streams [B, F] of the segment before."""
        context = Context(now.tokens, now.length, target=target)
        scratch, said = head.head.start(head.params, last.astype(config.layer.dtype), context, most)
        assert isinstance(said, DraftOutput)
        carry = sure(now, said), scratch, said
        for depth in range(1, most):
            carry = jax.lax.cond(jnp.any(carry[0].going), functools.partial(micro, depth), lambda carry: carry, carry)
        return carry[0]

    def sure(now: _Micro, said: DraftOutput) -> _Micro:
        assert said.confidence is not None
        return now._replace(going=now.going & (said.confidence >= confidence))

    def micro(depth: int, carry):
        now, scratch, said = carry
        now = write(now, said.logits)
        if depth == most - 1:
            return now, scratch, said
        place = jnp.arange(most)
        seen = jnp.broadcast_to((place > 0) & (place < depth), (batch, 1, most))
        token = take_along(now.tokens, now.length[:, None] - 1, 1)
        drafted = DraftedNodes(token, zero + depth, jnp.int32(depth), zero + depth - 1, seen)
        context = Context(now.tokens, now.length, target=target)
        scratch, said = head.head.follow(head.params, scratch, drafted, context)
        said = jax.tree.map(lambda x: x[:, 0], said)
        return sure(now, said), scratch, said

    def step(state: _State) -> _State:
        going = ~state.ended & (state.length < begun.stop)
        place = (state.length - state.size)[:, None] + jnp.arange(most)
        text = take_along(state.tokens, jnp.minimum(place, room - 1), 1)
        assert model.embed is not None
        merged = merge(model.embed(params, text), state.size)[:, None]
        output, pending = model.forward(
            params, Stream(merged), state.cache, positions=state.length[:, None] - 1, mask=alone, taps=config.taps
        )
        cache = model.commit(state.cache, pending, zero, going.astype(jnp.int32))
        now = _Micro(state.tokens, state.length, jnp.where(going, 0, state.size), state.ended, going)
        now = write(now, output.logits[:, 0])
        last = head.head.features_of(output)[:, 0]
        now = jax.lax.cond(jnp.any(now.going), lambda: segment(now, last), lambda: now)
        return _State(cache, now.tokens, now.length, now.size, now.ended, state.passes + going)

    cache = model.start_cache(params, begun.inputs, begun.prompts, room)
    cache = prefill(model, params, cache, begun.tokens, begun.prompts - 1)
    nothing = jnp.zeros((batch,), jnp.int32)
    state = _State(cache, begun.tokens, begun.prompts, nothing + 1, nothing > 0, nothing)
    state = jax.lax.while_loop(lambda state: jnp.any(~state.ended & (state.length < begun.stop)), step, state)
    return written(begun.prompts, state.tokens, state.length, state.passes, state.ended, max_new_tokens)
