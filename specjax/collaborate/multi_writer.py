"""A text that several models or samples write: what they share of it, and what each of them knows.

Every writer is the `Parts` of the engine, so any drafter and any rule may work inside of it, and it writes by the
engine's own step. Its cache holds the beginning of the text; what others wrote meanwhile it reads when its turn comes,
by prefill. Rows are ragged, and rows that do not take part idle. Everything here is traced: operations are parts of
one program, and a loop that has nothing to do takes no turn.

Randomness: writer 0 has the row's key, the others keys of their own, and a draw is one of (key, position). So a writer
who writes alone writes what `decode` writes with its key, and what one model proposes says nothing about what another
one writes in its place.
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
"""Tokens per pass of those that others wrote."""
PROMPT = -1
"""In place of a writer: nobody's."""


class Mind(NamedTuple):
    """What a writer knows of the text."""

    cache: PyTree  # of its target
    held: Array  # int32[B], tokens that the cache holds
    draft: PyTree  # of its drafter, when the text had `told` tokens
    told: Array  # int32[B]
    agreed: Array  # int32[B], how many of these are in the text still
    control: PyTree
    processed: tuple[PyTree, ...]  # of its processors, when the text had `told` tokens


class TextState(NamedTuple):
    """B rows of text, and what M writers know of them."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    prompt: Array  # int32[B], tokens of it that were given
    stop: Array  # int32[B], length at which the row is full
    ended: Array  # bool[B], whether its last token is an eos
    keys: Array  # key[B, M]
    author: Array  # int32[B, L], who wrote each token; PROMPT of the prompt, anything behind the end
    minds: tuple[Mind, ...]
    finite: Array  # bool[B], whether all that the models said was
    passes: Array  # int32[B, M], of each target, in which the row took part; without those over the prompt
    read: Array  # int32[B, M], tokens that these passes read, drafted ones too

    @property
    def going(self) -> Array:
        """bool[B]: the rows that may go on."""
        return ~self.ended & (self.length < self.stop)

    @property
    def written(self) -> Array:
        """int32[B]: tokens behind the prompt."""
        return self.length - self.prompt


class Scores(NamedTuple):
    """What a model says of T tokens behind a text, before temperature."""

    logprobs: Array  # float32[B, T], of each after those before it; 0 behind the row's count
    entropies: Array  # float32[B, T], nats, of the distributions that they come from
    logits: Array  # float32[B, V], of what follows the last
    hidden: Array  # [B, D], there


def writer_keys(keys: Array, count: int) -> Array:
    """key[B, M] of keys [B]: the row's own for writer 0, keys folded from it for the others."""
    others = [fold_in(fold_in(keys, writer), -1) for writer in range(1, count)]
    return jnp.stack([keys, *others], 1)


def begin(writers: Writers, tokens: Array, length: Array, keys: Array, stop: Array) -> TextState:
    """The prompts, read by all writers. Arguments as for the engine's `init`; keys [B], or [B, M] of each writer."""
    keys = writer_keys(keys, len(writers)) if keys.ndim == 1 else keys

    def mind(writer: Parts, keys: Array) -> Mind:
        state = writer.loop.init(writer, tokens, length, keys, stop)
        return Mind(
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
        minds=tuple(mind(writer, keys[:, i]) for i, writer in enumerate(writers)),
        finite=jnp.ones(length.shape, bool),
        passes=zero,
        read=zero,
    )


# --- writing ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """What a writer added to each row."""

    start: Array  # int32[B], length before
    complete: Array  # bool[B], whether it is a whole step: the segmenter ended it, or an eos did
    seen: PyTree


def extend(
    writers: Writers,
    text: TextState,
    who: int,
    *,
    segmenter: Segmenter | None = None,
    limit: Array | int | None = None,
    active: Array | None = None,
    see: Callable[[PyTree, Info, Array], PyTree] = lambda seen, info, kept: seen,
    seen: PyTree = (),
    halt: Callable[[Array, Array], Array] | None = None,
) -> tuple[TextState, Written]:
    """Writer `who` goes on, in the rows `active` bool[B], until a step ends, an eos, `limit` new tokens or a full row.

    Where a drafter's tokens reach beyond the end of a step, they are taken back.

    Args:
      limit: tokens per row, int32[] or int32[B].
      see: `see(seen, info, kept[B]) -> seen` after each pass, of which the first `kept` tokens were added.
      halt: `halt(length[B], hit_eos[B]) -> bool[B]` after each pass: rows that stop where they are.
    """
    writer = writers[who]
    going = text.going if active is None else text.going & active
    text = _attend(writers, text, who, going)
    mind = text.minds[who]
    left = text.stop - text.length
    most = text.length + (left if limit is None else jnp.minimum(left, limit))  # in 32 bits, however large the limit
    state = DecodeState(
        text.tokens, text.length, ~going | (text.length >= most), text.keys[:, who], most, mind.cache, mind.draft,
        mind.control, text.finite, mind.processed,
    )  # fmt: skip
    zero = jnp.zeros_like(text.length)
    carry = state, segments.start(len(zero)), text.ended, text.length, zero, zero, seen

    def goes_on(carry):
        return ~jnp.all(carry[0].done)

    def body(carry):
        before, run, ended, told, passes, read, seen = carry
        state, info = writer.loop.step(writer, before)
        kept, told = info.emitted, jnp.where(info.active, state.length, told)
        if segmenter is not None:
            run, kept = segments.follow(segmenter, run, info.tokens, info.emitted)
        length = before.length + kept
        hit = info.hit_eos & (kept == info.emitted)
        done = before.done | run.over | hit | (length >= most)
        if halt is not None:
            done |= halt(length, ended | hit)
        cache = state.cache
        if segmenter is not None and writer.drafter.num_nodes > 1:
            cache = writer.target.model.rewind_cache(cache, jnp.maximum(length - 1, 0))
        state = state._replace(length=length, done=done, cache=cache)
        read = read + jnp.where(info.active, info.drafted + 1, 0)
        return state, run, ended | hit, told, passes + info.active, read, see(seen, info, kept)

    state, run, ended, told, passes, read, seen = jax.lax.while_loop(goes_on, body, carry)
    held = jnp.where(going, state.length - 1, mind.held)
    mind = mind._replace(
        cache=state.cache, held=held, draft=state.draft, told=jnp.where(going, told, mind.told),
        agreed=jnp.where(going, state.length, mind.agreed), control=state.control, processed=state.processed,
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
    return _with(new, who, mind), Written(text.length, run.over | (ended & going), seen)


def append(text: TextState, tokens: Array, count: Array, who: Array | int) -> TextState:
    """The first `count` int32[B] of `tokens` int32[B, T] added behind the text, up to a full row.

    who: int32[] or int32[B], their author; of tokens that several models agreed on, the one that counts as it.
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
    """One token int32[B] more in the rows `active` that may go on; an eos, as all writers know it, ends them."""
    active &= text.going
    eos = writers[0].eos
    is_eos = active & jnp.any(token[:, None] == eos, 1)
    text = append(text, token[:, None], active.astype(jnp.int32), who)
    return text._replace(ended=text.ended | is_eos)


def _by(text: TextState, length: Array, who: Array | int) -> Array:
    """The authors, where a text grows to `length` int32[B]."""
    place = jnp.arange(text.tokens.shape[1])
    new = (place >= text.length[:, None]) & (place < length[:, None])
    return jnp.where(new, jnp.asarray(who, jnp.int32).reshape(-1, 1), text.author)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(writers: Writers, text: TextState, who: int, active: Array | None = None) -> TextState:
    """The cache of writer `who` with all but the last token of the text, in the rows `active` bool[B]."""
    model, mind = writers[who].target.model, text.minds[who]
    active = jnp.ones(text.length.shape, bool) if active is None else active
    held, cache = mind.held, mind.cache
    wanted = jnp.where(active, text.length - 1, held)
    if model.rewind is not None:  # it may hold the last token already
        held = jnp.minimum(held, wanted)
        cache = model.rewind(cache, held)
    cache = catch_up(model, writers[who].target.params, cache, text.tokens, held, wanted, jnp.zeros_like(held), CHUNK)
    missed = wanted - held
    new = text._replace(passes=text.passes.at[:, who].add(-(-missed // CHUNK)), read=text.read.at[:, who].add(missed))
    return _with(new, who, mind._replace(cache=cache, held=wanted))


def look(writers: Writers, text: TextState, who: int, active: Array | None = None) -> tuple[TextState, Array, Array]:
    """What writer `who` says follows the text: the text, read, logits float32[B, V] before temperature and hidden
    [B, D]. Those of rows that are not `active` mean nothing; without any no pass runs.

    The last token is read too: in a loop of looks, each is one pass over one token.
    """
    target, batch = writers[who].target, len(text.length)
    active = jnp.ones((batch,), bool) if active is None else active
    text = read(writers, text, who, active)
    mind = text.minds[who]
    alone, zero = jnp.ones((batch, 1, 1), bool), jnp.zeros((batch, 1), jnp.int32)
    root = last(text)

    def one(cache: PyTree):
        output, pending = target.model.forward(
            target.params, root, cache, positions=text.length[:, None] - 1, mask=alone
        )
        cache = target.model.commit(cache, pending, zero, active.astype(jnp.int32))
        return cache, output.logits[:, 0].astype(jnp.float32), output.hidden[:, 0]

    shapes = jax.eval_shape(one, mind.cache)[1:]
    carry = (mind.cache, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    # A loop of one turn or none, whose cache is written in place; a branch would copy it.
    turns = jnp.any(active).astype(jnp.int32)
    cache, logits, hidden = jax.lax.fori_loop(0, turns, lambda _, carry: one(carry[0]), carry)
    finite = text.finite & (jnp.any(logits > -jnp.inf, 1) & ~jnp.any(jnp.isnan(logits), 1) | ~active)
    new = text._replace(finite=finite, passes=text.passes.at[:, who].add(active), read=text.read.at[:, who].add(active))
    return _with(new, who, mind._replace(cache=cache, held=mind.held + active)), logits, hidden


def last(text: TextState) -> Array:
    """int32[B, 1]: the last token of each row."""
    return take_along(text.tokens, text.length[:, None] - 1, 1)


def score(
    writers: Writers, text: TextState, who: int, appended: Array, count: Array, active: Array | None = None
) -> tuple[TextState, Scores]:
    """What writer `who` says of the first `count` int32[B] of `appended` int32[B, T], were they behind the text.

    One pass over T + 1 tokens, of which nothing is kept: there is nothing to take back.
    """
    target, (batch, width) = writers[who].target, appended.shape
    active = jnp.ones((batch,), bool) if active is None else active
    text = read(writers, text, who, active)
    root = last(text)
    tokens = jnp.concatenate([root, appended], 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width + 1, width + 1), bool)), (batch, width + 1, width + 1))
    positions = text.length[:, None] - 1 + jnp.arange(width + 1)

    def one():
        output, _ = target.model.forward(target.params, tokens, text.minds[who].cache, positions=positions, mask=mask)
        log_p = jax.nn.log_softmax(output.logits[:, :-1].astype(jnp.float32), -1)
        inside = jnp.arange(width) < count[:, None]
        logprobs = take_along(log_p, jnp.where(inside, appended, 0)[:, :, None], 2)[:, :, 0]
        behind = lambda x: take_along(x, count[:, None, None], 1)[:, 0]
        zero = lambda x: jnp.where(inside, x, 0.0)
        return Scores(
            zero(logprobs), zero(entropy(log_p)), behind(output.logits).astype(jnp.float32), behind(output.hidden)
        )

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
    scores = jax.lax.cond(jnp.any(active), one, lambda: nothing)
    new = text._replace(
        passes=text.passes.at[:, who].add(active),
        read=text.read.at[:, who].add(jnp.where(active, count + 1, 0)),
    )
    return new, scores


# --- rows and lengths -------------------------------------------------------------------------------------------------


def rewind(writers: Writers, text: TextState, length: Array) -> TextState:
    """All but the first `length` int32[B] tokens of each row taken back; never any of the prompt."""
    length = jnp.clip(length, text.prompt, text.length)

    def forget(writer: Parts, mind: Mind) -> Mind:
        held = jnp.minimum(mind.held, length)
        cache = writer.target.model.rewind_cache(mind.cache, held)
        return mind._replace(cache=cache, held=held, agreed=jnp.minimum(mind.agreed, length))

    minds = tuple(forget(writer, mind) for writer, mind in zip(writers, text.minds, strict=True))
    return text._replace(length=length, ended=text.ended & (length == text.length), minds=minds)


def axes(writers: Writers, text: TextState) -> TextState:
    """The place of the rows in the shape of each array; `buffers.SHARED` of what all rows share."""

    def of(writer: Parts, mind: Mind) -> Mind:
        return batch_axes.rows_first(mind)._replace(
            cache=writer.target.model.axes(mind.cache),
            draft=writer.drafter.hooks.axes(mind.draft),
            control=writer.controller.axes(mind.control),
        )

    minds = tuple(of(writer, mind) for writer, mind in zip(writers, text.minds, strict=True))
    return batch_axes.rows_first(text)._replace(minds=minds)


def select(writers: Writers, text: TextState, rows: Array) -> TextState:
    """The rows at `rows` int32[R], with all that is known of them. Twice the same row writes twice the same text,
    unless it is given other `keys`."""
    return batch_axes.take_rows(text, rows, axes(writers, text))


def fork(writers: Writers, text: TextState, times: int) -> TextState:
    """Each row `times` times in a row, each with keys of its own, as `decode` has those of `samples_per_prompt`."""
    if times == 1:
        return text
    new = batch_axes.repeat_rows(text, times, axes(writers, text))
    number = jnp.tile(jnp.arange(times), len(text.length))[:, None]
    return new._replace(keys=fold_in(new.keys, number))


def forked(writers: Writers, times: int) -> Writers:
    """The writers, for a text that was forked: settings of rows are repeated too."""

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


def _attend(writers: Writers, text: TextState, who: int, going: Array) -> TextState:
    """Writer `who` as its own step expects it in the rows `going`, whatever others did to the text."""
    text, writer = read(writers, text, who, going), writers[who]
    mind, is_new = text.minds[who], _is_new(text, who, going)
    draft = _drafter_anew(writer, text, who, is_new) if jax.tree.leaves(mind.draft) else mind.draft
    processed = known_to_processors(writers, text, who, going)
    knows = lambda x: jnp.where(is_new, text.length, x)
    return _with(
        text,
        who,
        mind._replace(draft=draft, processed=processed, told=knows(mind.told), agreed=knows(mind.agreed)),
    )


def _is_new(text: TextState, who: int, active: Array) -> Array:
    """bool[B]: the rows `active` that are not as the drafter and the processors of writer `who` know them."""
    mind = text.minds[who]
    return active & ((mind.told != text.length) | (mind.agreed != text.length))


def _drafter_anew(writer: Parts, text: TextState, who: int, is_new: Array) -> PyTree:
    """The drafter's state after the text as it is now, in the rows `is_new` bool[B]."""
    drafter, mind = writer.drafter, text.minds[who]
    if drafter.hooks.resume is not None:
        return drafter.hooks.resume(drafter.params, mind.draft, jnp.where(is_new, mind.agreed, text.length))
    keys = text.keys[:, who]
    noise = keys if writer.coupled else None

    def anew():
        if drafter.hooks.prefill is None:
            context = Context(text.tokens, text.length, writer.sampling, noise, target=writer.target)
            fresh = drafter.init(drafter.params, context)
        else:  # it learns from what the target says of all tokens
            fresh = writer.loop.init(writer, text.tokens, text.length, keys, text.stop).draft
        return batch_axes.where_rows(is_new, fresh, mind.draft, drafter.hooks.axes(mind.draft))

    return jax.lax.cond(jnp.any(is_new), anew, lambda: mind.draft)


def known_to_processors(writers: Writers, text: TextState, who: int, active: Array) -> tuple[PyTree, ...]:
    """What the processors of writer `who` know of the text, in the rows `active` bool[B]: its prompt, and what was
    written since."""
    writer, known = writers[who], text.minds[who].processed
    if not writer.processors:
        return known
    is_new, size = _is_new(text, who, active), text.tokens.shape[1]

    def anew() -> tuple[PyTree, ...]:
        states = pipeline.init_states(writer.processors, text.tokens, text.prompt, writer.target.model.vocab_size)
        place = jnp.minimum(text.prompt[:, None] + jnp.arange(size), size - 1)
        states = pipeline.update_states(writer.processors, states, take_along(text.tokens, place, 1), text.written)
        return batch_axes.where_rows(is_new, states, known, batch_axes.rows_first(known))

    return jax.lax.cond(jnp.any(is_new), anew, lambda: known)


def _with(text: TextState, who: int, mind: Mind) -> TextState:
    return text._replace(minds=(*text.minds[:who], mind, *text.minds[who + 1 :]))
