"""A text that several models or samples write: the shared tokens, and the state of each writer.

Every writer is the `Parts` of the engine, so it may use any drafter and any verification rule. It writes with the
engine's own step. Its cache contains the beginning of the text. It prefills the tokens of other writers when its turn
comes. Rows are ragged, and rows that do not take part idle. All operations are traced and are parts of one program.
A loop without active rows runs no iteration.

Randomness: writer 0 uses the row's key, and every other writer has a key derived from it. Each draw depends only on
(key, position). A single writer therefore writes the same text as `decode` with its key. The proposal of one model is
independent of the tokens that another model writes in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.collaborate import segments
from specjax.collaborate.segments import Segmenter
from specjax.engine.job import Parts
from specjax.engine.prefill import catch_up
from specjax.engine.prepare import repeat_per_sample
from specjax.numerics.sampling import entropy, fold_in
from specjax.processors import pipeline
from specjax.types import Array, Context, DecodeState, Info, PyTree

Writers = tuple[Parts, ...]
CHUNK = 16
"""Tokens of other writers that one pass reads."""
PROMPT = -1
"""The author of tokens that no writer wrote."""


class WriterState(NamedTuple):
    """The state of one writer for the shared text."""

    cache: PyTree  # cache of its target
    cached: Array  # int32[B], tokens in the cache
    draft: PyTree  # state of its drafter, after `seen` tokens
    seen: Array  # int32[B], tokens that the drafter and the processors have processed
    agreed_length: Array  # int32[B], tokens of these that the text still contains
    control: PyTree
    processed: tuple[PyTree, ...]  # states of its processors, after `seen` tokens


class TextState(NamedTuple):
    """B rows of text, and the states of M writers."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    prompt: Array  # int32[B], tokens of the prompt
    stop: Array  # int32[B], length at which the row is full
    ended: Array  # bool[B], True: the last token is an eos
    keys: Array  # key[B, M]
    author: Array  # int32[B, L], writer of each token; PROMPT in the prompt, undefined past the end
    writer_states: tuple[WriterState, ...]
    finite: Array  # bool[B], True: all model outputs were finite
    passes: Array  # int32[B, M], passes of each target in which the row took part, without those over the prompt
    read: Array  # int32[B, M], tokens that these passes read, drafted ones too

    @property
    def unfinished(self) -> Array:
        """Return bool[B], True for rows that may continue. A row whose outputs were not finite never does."""
        return ~self.ended & (self.length < self.stop) & self.finite

    @property
    def written(self) -> Array:
        """Return int32[B], the number of tokens after the prompt."""
        return self.length - self.prompt


class Scores(NamedTuple):
    """The evaluation of T tokens after a text by one model, before temperature."""

    logprobs: Array  # float32[B, T], of each token given all earlier ones; 0 past the row's count
    entropies: Array  # float32[B, T], nats, of the distributions that they come from
    logits: Array  # float32[B, V], of the token after the last one
    hidden: Array  # [B, D], at the last token


def writer_keys(keys: Array, count: int) -> Array:
    """Return key[B, M] for keys [B]: the row's own key for writer 0, and keys folded from it for the other writers."""
    derived = [fold_in(fold_in(keys, writer), -1) for writer in range(1, count)]
    return jnp.stack([keys, *derived], 1)


def begin(writers: Writers, tokens: Array, length: Array, keys: Array, stop: Array) -> TextState:
    """Return the text of the prompts after all writers have prefilled them.

    The arguments are those of the engine's `init`. Keys have shape [B], or [B, M] for one key per writer.
    """
    keys = writer_keys(keys, len(writers)) if keys.ndim == 1 else keys

    def writer_state(writer: Parts, keys: Array) -> WriterState:
        state = writer.loop.init(writer, tokens, length, keys, stop)
        return WriterState(
            state.cache, jnp.maximum(length - 1, 0), state.draft, length, length, state.control, state.processed
        )

    zero = jnp.zeros((len(length), len(writers)), jnp.int32)
    return TextState(
        tokens=tokens,
        length=length,
        prompt=length,
        stop=stop,
        ended=jnp.zeros(length.shape, bool),
        keys=keys,
        author=jnp.full_like(tokens, PROMPT),
        writer_states=tuple(writer_state(writer, keys[:, i]) for i, writer in enumerate(writers)),
        finite=jnp.ones(length.shape, bool),
        passes=zero,
        read=zero,
    )


# --- writing ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The result of one turn of a writer, per row."""

    start: Array  # int32[B], length before
    complete: Array  # bool[B], True: a complete step, ended by the segmenter or an eos
    run: segments.Run  # the segmenter's state at the end
    observations: PyTree


def extend(
    writers: Writers,
    text: TextState,
    who: int,
    *,
    segmenter: Segmenter | None = None,
    run: segments.Run | None = None,
    limit: Array | int | None = None,
    active: Array | None = None,
    observe: Callable[[PyTree, Info, Array], PyTree] = lambda observations, info, count: observations,
    observations: PyTree = (),
    halt: Callable[[Array, Array], Array] | None = None,
) -> tuple[TextState, Written]:
    """Continue the rows `active` bool[B] with writer `who` until a step ends, an eos, `limit` new tokens or a full row.

    Tokens past the end of a step are rewound.

    Args:
      run: the segmenter's state after the beginning of the step, which another turn wrote; None: the step begins here.
      limit: tokens per row, int32[] or int32[B].
      observe: `observe(observations, info, count[B]) -> observations`, called after each pass, which added `count`
        tokens.
      halt: `halt(length[B], hit_eos[B]) -> bool[B]`, called after each pass; it returns the rows that stop.
    """
    writer = writers[who]
    writing = text.unfinished if active is None else text.unfinished & active
    text = _attend(writers, text, who, writing)
    writer_state = text.writer_states[who]
    room = text.stop - text.length
    max_length = text.length + (
        room if limit is None else jnp.minimum(room, limit)
    )  # in 32 bits, however large the limit
    state = DecodeState(
        text.tokens, text.length, ~writing | (text.length >= max_length), text.keys[:, who], max_length,
        writer_state.cache, writer_state.draft, writer_state.control, text.finite, writer_state.processed,
    )  # fmt: skip
    zero = jnp.zeros_like(text.length)
    run = segments.start(len(zero)) if run is None else run
    carry = state, run, text.ended, text.length, zero, zero, observations

    def goes_on(carry):
        return ~jnp.all(carry[0].done)

    def body(carry):
        previous, run, ended, seen_length, passes, read, observations = carry
        state, info = writer.loop.step(writer, previous)
        count, seen_length = info.emitted, jnp.where(info.active, state.length, seen_length)
        if segmenter is not None:
            run, count = segments.follow(segmenter, run, info.tokens, info.emitted)
        length = previous.length + count
        hit = info.hit_eos & (count == info.emitted)
        done = previous.done | run.over | hit | (length >= max_length) | ~state.finite
        if halt is not None:
            done |= halt(length, ended | hit)
        cache = state.cache
        if segmenter is not None:
            cache = writer.target.model.rewind_cache(cache, jnp.maximum(length - 1, 0))
        state = state._replace(length=length, done=done, cache=cache)
        read = read + jnp.where(info.active, info.drafted + 1, 0)
        return state, run, ended | hit, seen_length, passes + info.active, read, observe(observations, info, count)

    state, run, ended, seen_length, passes, read, observations = jax.lax.while_loop(goes_on, body, carry)
    cached = jnp.where(writing, state.length - 1, writer_state.cached)
    writer_state = writer_state._replace(
        cache=state.cache, cached=cached, draft=state.draft,
        seen=jnp.where(writing, seen_length, writer_state.seen),
        agreed_length=jnp.where(writing, state.length, writer_state.agreed_length),
        control=state.control, processed=state.processed,
    )  # fmt: skip
    new = text._replace(
        tokens=state.tokens,
        length=state.length,
        ended=ended,
        author=_by(text, state.length, who),
        finite=state.finite,
        passes=text.passes.at[:, who].add(passes),
        read=text.read.at[:, who].add(read),
    )
    return _with(new, who, writer_state), Written(text.length, run.over | (ended & writing), run, observations)


def append(text: TextState, tokens: Array, count: Array, who: Array | int) -> TextState:
    """Append the first `count` int32[B] of `tokens` int32[B, T] to the text, up to a full row.

    who: int32[] or int32[B], the author. Tokens on which several models agreed have one of these models as author.
    """
    offset = jnp.arange(tokens.shape[1])
    count = jnp.where(text.ended, 0, jnp.clip(count, 0, jnp.maximum(text.stop - text.length, 0)))
    place = jnp.where(offset < count[:, None], text.length[:, None] + offset, text.tokens.shape[1])
    length = text.length + count
    return text._replace(
        tokens=text.tokens.at[jnp.arange(len(count))[:, None], place].set(tokens, mode="drop"),
        length=length,
        author=_by(text, length, who),
    )


def append_one(writers: Writers, text: TextState, token: Array, who: Array | int, active: Array) -> TextState:
    """Append one token int32[B] to the unfinished rows among `active`. An eos of the writers ends the row."""
    active &= text.unfinished
    eos = writers[0].eos
    is_eos = active & jnp.any(token[:, None] == eos, 1)
    text = append(text, token[:, None], active.astype(jnp.int32), who)
    return text._replace(ended=text.ended | is_eos)


def _by(text: TextState, length: Array, who: Array | int) -> Array:
    """Return the authors int32[B, L] after the text grows to `length` int32[B]."""
    place = jnp.arange(text.tokens.shape[1])
    new = (place >= text.length[:, None]) & (place < length[:, None])
    return jnp.where(new, jnp.asarray(who, jnp.int32).reshape(-1, 1), text.author)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(writers: Writers, text: TextState, who: int, active: Array | None = None) -> TextState:
    """Prefill the cache of writer `who` with all but the last token of the text, in the rows `active` bool[B]."""
    model, writer_state = writers[who].target.model, text.writer_states[who]
    active = jnp.ones(text.length.shape, bool) if active is None else active
    cached, cache = writer_state.cached, writer_state.cache
    target_length = jnp.where(active, text.length - 1, cached)
    if model.rewind is not None:  # the cache may already contain the last token
        cached = jnp.minimum(cached, target_length)
        cache = model.rewind(cache, cached)
    cache = catch_up(
        model, writers[who].target.params, cache, text.tokens, cached, target_length, jnp.zeros_like(cached), CHUNK
    )
    missed = target_length - cached
    new = text._replace(passes=text.passes.at[:, who].add(-(-missed // CHUNK)), read=text.read.at[:, who].add(missed))
    return _with(new, who, writer_state._replace(cache=cache, cached=target_length))


def look(writers: Writers, text: TextState, who: int, active: Array | None = None) -> tuple[TextState, Array, Array]:
    """Return the text, and writer `who`'s logits float32[B, V] before temperature and hidden states [B, D] at its end.

    The outputs of rows that are not `active` are undefined. If no row is active, no pass runs. The last token is read
    too, so each look in a loop is one pass over one token.
    """
    target, batch = writers[who].target, len(text.length)
    active = jnp.ones((batch,), bool) if active is None else active
    text = read(writers, text, who, active)
    writer_state = text.writer_states[who]
    alone, zero = jnp.ones((batch, 1, 1), bool), jnp.zeros((batch, 1), jnp.int32)
    root = last(text)

    def one(cache: PyTree):
        output, pending = target.model.forward(
            target.params, root, cache, positions=text.length[:, None] - 1, mask=alone
        )
        cache = target.model.commit(cache, pending, zero, active.astype(jnp.int32))
        return cache, output.logits[:, 0].astype(jnp.float32), output.hidden[:, 0]

    shapes = jax.eval_shape(one, writer_state.cache)[1:]
    carry = (writer_state.cache, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    # A loop of one turn or none, whose cache is written in place; a branch would copy it.
    turns = jnp.any(active).astype(jnp.int32)
    cache, logits, hidden = jax.lax.fori_loop(0, turns, lambda _, carry: one(carry[0]), carry)
    finite = text.finite & (jnp.any(logits > -jnp.inf, 1) & ~jnp.any(jnp.isnan(logits), 1) | ~active)
    new = text._replace(finite=finite, passes=text.passes.at[:, who].add(active), read=text.read.at[:, who].add(active))
    return _with(new, who, writer_state._replace(cache=cache, cached=writer_state.cached + active)), logits, hidden


def hidden_after(
    writers: Writers, text: TextState, who: int, suffix: Array, active: Array | None = None
) -> tuple[TextState, Array]:
    """Return the text, and writer `who`'s hidden states [B, D] after it and `suffix` int32[S], which may be empty.

    The cache afterwards has all but the last token of the text, and nothing of the suffix. The states of rows that are
    not `active` are undefined. If no row is active, no pass runs.
    """
    target, batch, width = writers[who].target, len(text.length), len(suffix) + 1
    active = jnp.ones((batch,), bool) if active is None else active
    text = read(writers, text, who, active)
    cache = text.writer_states[who].cache
    tokens = jnp.concatenate([last(text), jnp.broadcast_to(suffix, (batch, width - 1))], 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    positions = text.length[:, None] - 1 + jnp.arange(width)

    def one() -> Array:
        return target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)[0].hidden[:, -1]

    shape = jax.eval_shape(one)
    hidden = jax.lax.cond(jnp.any(active), one, lambda: jnp.zeros(shape.shape, shape.dtype))
    passes = text.passes.at[:, who].add(active)
    return text._replace(passes=passes, read=text.read.at[:, who].add(jnp.where(active, width, 0))), hidden


def last(text: TextState) -> Array:
    """Return int32[B, 1], the last token of each row."""
    return take_along(text.tokens, text.length[:, None] - 1, 1)


def score(
    writers: Writers, text: TextState, who: int, appended: Array, count: Array, active: Array | None = None
) -> tuple[TextState, Scores]:
    """Score the first `count` int32[B] of `appended` int32[B, T] with writer `who`, as if they followed the text.

    This is one pass over T + 1 tokens. It leaves the cache unchanged, so no rewind is needed.
    """
    target, (batch, width) = writers[who].target, appended.shape
    active = jnp.ones((batch,), bool) if active is None else active
    text = read(writers, text, who, active)
    root = last(text)
    tokens = jnp.concatenate([root, appended], 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width + 1, width + 1), bool)), (batch, width + 1, width + 1))
    positions = text.length[:, None] - 1 + jnp.arange(width + 1)

    def one():
        output, _ = target.model.forward(
            target.params, tokens, text.writer_states[who].cache, positions=positions, mask=mask
        )
        log_p = jax.nn.log_softmax(output.logits[:, :-1].astype(jnp.float32), -1)
        inside = jnp.arange(width) < count[:, None]
        logprobs = take_along(log_p, jnp.where(inside, appended, 0)[:, :, None], 2)[:, :, 0]
        behind = lambda x: take_along(x, count[:, None, None], 1)[:, 0]
        zero = lambda x: jnp.where(inside, x, 0.0)
        return Scores(
            zero(logprobs), zero(entropy(log_p)), behind(output.logits).astype(jnp.float32), behind(output.hidden)
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
    scores = jax.lax.cond(jnp.any(active), one, lambda: zeros)
    new = text._replace(
        passes=text.passes.at[:, who].add(active),
        read=text.read.at[:, who].add(jnp.where(active, count + 1, 0)),
    )
    return new, scores


# --- rows and lengths -------------------------------------------------------------------------------------------------


def rewind(writers: Writers, text: TextState, length: Array) -> TextState:
    """Truncate each row to its first `length` int32[B] tokens. The prompt is never truncated."""
    length = jnp.clip(length, text.prompt, text.length)

    def forget(writer: Parts, writer_state: WriterState) -> WriterState:
        cached = jnp.minimum(writer_state.cached, length)
        cache = writer.target.model.rewind_cache(writer_state.cache, cached)
        return writer_state._replace(
            cache=cache, cached=cached, agreed_length=jnp.minimum(writer_state.agreed_length, length)
        )

    writer_states = tuple(
        forget(writer, writer_state) for writer, writer_state in zip(writers, text.writer_states, strict=True)
    )
    return text._replace(length=length, ended=text.ended & (length == text.length), writer_states=writer_states)


def axes(writers: Writers, text: TextState) -> TextState:
    """Return the batch axis of each array; it is `batch_axes.SHARED` for arrays that all rows share."""

    def state_axes(writer: Parts, writer_state: WriterState) -> WriterState:
        return batch_axes.rows_first(writer_state)._replace(
            cache=writer.target.model.axes(writer_state.cache),
            draft=writer.drafter.hooks.axes(writer_state.draft),
            control=writer.controller.axes(writer_state.control),
        )

    writer_states = tuple(
        state_axes(writer, writer_state) for writer, writer_state in zip(writers, text.writer_states, strict=True)
    )
    return batch_axes.rows_first(text)._replace(writer_states=writer_states)


def select(writers: Writers, text: TextState, rows: Array) -> TextState:
    """Return the rows at `rows` int32[R], with all states.

    A row that is selected twice writes the same text twice, unless its copies get different `keys`.
    """
    return batch_axes.take_rows(text, rows, axes(writers, text))


def fork(writers: Writers, text: TextState, times: int) -> TextState:
    """Repeat each row `times` times. The copies get different keys, as in `decode` with `samples_per_prompt`."""
    if times == 1:
        return text
    new = batch_axes.repeat_rows(text, times, axes(writers, text))
    number = jnp.tile(jnp.arange(times), len(text.length))[:, None]
    return new._replace(keys=fold_in(new.keys, number))


def forked(writers: Writers, times: int) -> Writers:
    """Return the writers for a forked text: settings of rows are repeated too."""

    def more(writer: Parts) -> Parts:
        per_row = lambda x: x if len(x) == 1 else jnp.repeat(x, times, 0)
        again = lambda processor: processor.replace(settings=jax.tree.map(per_row, processor.settings))
        return dataclasses.replace(
            writer,
            sampling=repeat_per_sample(writer.sampling, times),
            processors=tuple(again(processor) for processor in writer.processors),
        )

    return tuple(more(writer) for writer in writers)


# --- a writer's turn --------------------------------------------------------------------------------------------------


def _attend(writers: Writers, text: TextState, who: int, writing: Array) -> TextState:
    """Bring writer `who` up to date in the rows `writing`, after any changes by other writers."""
    text, writer = read(writers, text, who, writing), writers[who]
    writer_state, is_new = text.writer_states[who], _is_new(text, who, writing)
    draft = _drafter_anew(writer, text, who, is_new) if jax.tree.leaves(writer_state.draft) else writer_state.draft
    processed = processor_states(writers, text, who, writing)
    refresh = lambda x: jnp.where(is_new, text.length, x)
    return _with(
        text,
        who,
        writer_state._replace(
            draft=draft,
            processed=processed,
            seen=refresh(writer_state.seen),
            agreed_length=refresh(writer_state.agreed_length),
        ),
    )


def _is_new(text: TextState, who: int, active: Array) -> Array:
    """Return bool[B], the rows `active` in which writer `who` has not processed the current text."""
    writer_state = text.writer_states[who]
    return active & ((writer_state.seen != text.length) | (writer_state.agreed_length != text.length))


def _drafter_anew(writer: Parts, text: TextState, who: int, is_new: Array) -> PyTree:
    """Return the drafter's state for the current text, recomputed in the rows `is_new` bool[B]."""
    drafter, writer_state = writer.drafter, text.writer_states[who]
    if drafter.hooks.resume is not None:
        return drafter.hooks.resume(
            drafter.params, writer_state.draft, jnp.where(is_new, writer_state.agreed_length, text.length)
        )
    keys = text.keys[:, who]
    noise = keys if writer.coupled else None

    def anew():
        if drafter.hooks.prefill is None:
            context = Context(text.tokens, text.length, writer.sampling, noise, target=writer.target)
            fresh = drafter.init(drafter.params, context)
        else:  # the drafter reads the target's outputs for all tokens
            fresh = writer.loop.init(writer, text.tokens, text.length, keys, text.stop).draft
        return batch_axes.where_rows(is_new, fresh, writer_state.draft, drafter.hooks.axes(writer_state.draft))

    return jax.lax.cond(jnp.any(is_new), anew, lambda: writer_state.draft)


def processor_states(writers: Writers, text: TextState, who: int, active: Array) -> tuple[PyTree, ...]:
    """Return the processor states of writer `who`, with the rows `active` bool[B] updated to the current text.

    They contain the prompt and the new tokens.
    """
    writer, old_states = writers[who], text.writer_states[who].processed
    if not writer.processors:
        return old_states
    is_new, size = _is_new(text, who, active), text.tokens.shape[1]

    def anew() -> tuple[PyTree, ...]:
        states = pipeline.init_states(writer.processors, text.tokens, text.prompt, writer.target.model.vocab_size)
        place = jnp.minimum(text.prompt[:, None] + jnp.arange(size), size - 1)
        states = pipeline.update_states(writer.processors, states, take_along(text.tokens, place, 1), text.written)
        return batch_axes.where_rows(is_new, states, old_states, batch_axes.rows_first(old_states))

    return jax.lax.cond(jnp.any(is_new), anew, lambda: old_states)


def _with(text: TextState, who: int, writer_state: WriterState) -> TextState:
    return text._replace(writer_states=(*text.writer_states[:who], writer_state, *text.writer_states[who + 1 :]))
