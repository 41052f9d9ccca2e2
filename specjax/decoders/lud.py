"""Lexical Unit Decoding: a model that was tuned for it fills several empty places at once, as far as it is sure.

Sun, Zhang, Lin, Zhang, Zhang, Wang, Chen, Song, Zhang, Gai, Xiong: Decoding at the Speed of Thought: Harnessing
Parallel Decoding of Lexical Units for LLMs (LREC-COLING 2024), arXiv 2405.15208.

Rule: k tokens [PAD] stand behind the text in every pass, which gives k + 1 predictions. The first is taken; the others
in turn, as long as the likeliest token has a probability of `threshold` or more, and repeats the token before it no
more than `repeats` times in a row. Keys and values of [PAD] are forgotten; the tokens taken are read in the next pass.
Guarantee: lossy; with k = 0, or a threshold above 1, the text is the tuned model's own, at any temperature. Without
loss it is `drafters.ppd` with `specjax.models.heads.ppd.prompts_of_token(target, pad_token, k)`.

`specjax.training.methods.lexical_units` makes the lessons of a text, and tunes a model.

Deviations: `threshold` and `repeats` by default are choices of our own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog import REQUIRED, Method, Option
from specjax.decoders.loop_setup import Begun, begin, written
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, node_keys, warp
from specjax.numerics.validation import check_integer
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
        Option("repeats", "int", 2, "maximum number of repetitions of one token in a row"),
        Option("temperature", "float", 0.0, "sampling temperature"),
    ),
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
    """A tuned `target`, in one compiled program.

    Args:
      pad_token: the token that it was tuned with. slots: k. threshold: alpha, above 1 nothing is taken but the first.
      key and what follows: as for `decode`.

    `stats.target_passes` counts the passes. Raises: UsageError for a setting outside its range.
    """
    if not 0 <= pad_token < target.model.vocab_size:
        raise UsageError(f"pad_token must be a token of the model, below {target.model.vocab_size}, not {pad_token}")
    check_integer("slots", slots, 0)
    check_integer("repeats", repeats, 0)
    settings = Settings(temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, capacity=capacity)
    begun = begin(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=2 * slots + 1, inputs=inputs
    )  # fmt: skip
    limits = jnp.float32(threshold), jnp.int32(repeats), jnp.int32(pad_token)
    return _run(target, begun, *limits, slots=slots, max_new_tokens=int(max_new_tokens))


class _State(NamedTuple):
    cache: PyTree  # of the first `held` tokens
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    held: Array  # int32[B], below the length
    ended: Array  # bool[B], by an eos
    passes: Array  # int32[B]


@functools.partial(jax.jit, static_argnames=("slots", "max_new_tokens"))
@without_x64
def _run(
    target: Target, begun: Begun, threshold: Array, repeats: Array, pad: Array, *, slots: int, max_new_tokens: int
) -> DecodeResult:
    model, params, width = target.model, target.params, 2 * slots + 1
    (batch, size), index = begun.tokens.shape, jnp.arange(slots + 1)
    rows, path = jnp.arange(batch)[:, None], jnp.broadcast_to(jnp.arange(width), (batch, width))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))

    def step(state: _State) -> _State:
        going = ~state.ended & (state.length < begun.stop)
        unread = state.length - state.held  # from 1 to k + 1
        positions = state.held[:, None] + jnp.arange(width)
        text = take_along(state.tokens, jnp.minimum(positions, size - 1), 1)
        fed = jnp.where(positions < state.length[:, None], text, pad)
        output, pending = model.forward(params, fed, state.cache, positions=positions, mask=mask)
        said = take_along(output.logits, ((unread - 1)[:, None] + index)[:, :, None], 1)  # [B, k + 1, V]
        keys = node_keys(begun.keys, state.length, jnp.broadcast_to(index, (batch, slots + 1)))
        log_p = warp(said, begun.sampling)
        new = jnp.stack([draw(keys[:, i], log_p[:, i]) for i in range(slots + 1)], 1)
        count = _taken(said, new, take_along(state.tokens, (state.length - 1)[:, None], 1))
        ends = jnp.any(new[:, :, None] == begun.eos, 2)
        count = jnp.minimum(count, jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, slots + 1))
        count = jnp.where(going, jnp.minimum(count, begun.stop - state.length), 0)
        inside = index < count[:, None]
        place = jnp.where(inside, state.length[:, None] + index, size)
        return _State(
            cache=model.commit(state.cache, pending, path, jnp.where(going, unread, 0)),
            tokens=state.tokens.at[rows, place].set(new, mode="drop"),
            length=state.length + count,
            held=jnp.where(going, state.length, state.held),
            ended=state.ended | jnp.any(ends & inside, 1),
            passes=state.passes + going,
        )

    def _taken(said: Array, new: Array, last: Array) -> Array:
        """int32[B]: how many of the predictions [B, k + 1, V], and what was drawn of them, are taken."""
        sure = jnp.exp(jnp.max(jax.nn.log_softmax(said), -1)) >= threshold
        same = new == jnp.concatenate([last, new[:, :-1]], 1)
        run, takes = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool)
        count = takes.astype(jnp.int32)
        for i in range(slots + 1):
            run = jnp.where(same[:, i], run + 1, 0)
            if i:
                takes &= sure[:, i] & (run <= repeats)
                count += takes
        return count

    cache = model.start_cache(params, begun.inputs, begun.prompts, size)
    cache = prefill(model, params, cache, begun.tokens, begun.prompts - 1)
    nothing = jnp.zeros((batch,), jnp.int32)
    state = _State(cache, begun.tokens, begun.prompts, begun.prompts - 1, nothing > 0, nothing)
    state = jax.lax.while_loop(lambda state: jnp.any(~state.ended & (state.length < begun.stop)), step, state)
    return written(begun.prompts, state.tokens, state.length, state.passes, state.ended, max_new_tokens)
