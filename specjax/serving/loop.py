"""`serve`: requests that come and go, in the rows of one running batch (continuous batching).

Yu et al.: Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022).

Rule: the batch has `slots` rows. Where one has ended, the next request is read into its place: its prompt is prefilled
as a batch of one, and this row is written over the old one, in every array of the state that has rows. Then the step
that `decode` loops goes on with all rows. Two programs, the step and the admission, serve every request, whatever its
settings: these are arrays with a row for each slot. What the drafter learnt from a text is there for the next request.
Guarantee: that of `decode` with the same settings. A row's randomness is its request's own key and positions, so a text
does not depend on when its request came, or beside which others; where rows share what they learn or how deep they
draft (`auto`, `choice`, `bass`, goodput, drafters that remember), as in any batch, the draws of rejection rules may.
Deviations: a prompt is read in one go, while the other rows wait.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.arrays.x64 import without_x64
from specjax.engine.carry_over import export_params, restore_params
from specjax.engine.job import Job, Parts
from specjax.engine.run import step
from specjax.errors import UsageError
from specjax.numerics.global_arrays import replicate
from specjax.numerics.sampling import row_keys, threefry
from specjax.persistence.program_cache import Family, ProgramCache, programs_of, shapes
from specjax.serving.detokenizer import Detokenizer
from specjax.serving.requests import Limits, Request, RowSettings, check, processor_settings, row_settings
from specjax.types import Array, DecodeState, Drafter, Info, PyTree

NOT_FINITE = "the model gives NaN or Inf for its prompt; look at its parameters and its config"
IDLE = 0.002
"""Seconds before a source that had nothing is asked again, if nothing is decoded meanwhile."""


class Served(NamedTuple):
    """What one step added to one request."""

    request: int  # which one, counted from 0 in the order in which they came
    tokens: list[int]
    accepted: int  # how many of them, from the front, were drafted
    finish_reason: str | None = None  # at its end "eos", "length", "stop" or "refused"
    error: str | None = None  # of a refused one, in one sentence
    text: str = ""  # that became known, if `serve` has the tokenizer: whole characters, without eos or stop string
    drafter: Callable[[], Drafter] | None = None  # at its end: gives the drafter as it is by then, for a later call
    drafted: int = 0  # how deep the draft was that the tokens came of


@dataclasses.dataclass
class _Row:
    """Whose a slot is."""

    request: int
    left: int  # tokens that may still come
    text: Detokenizer | None

    def add(
        self, tokens: list[int], accepted: int, drafted: int, is_eos: bool, is_finite: bool, is_done: bool
    ) -> Served:
        if not is_finite:
            return Served(self.request, [], 0, "refused", NOT_FINITE)
        self.left -= len(tokens)
        reason = "eos" if is_eos else "length" if is_done or not self.left else None
        text = ""
        if self.text is not None:
            text, taken = self.text.add_all(tokens[:-1] if is_eos else tokens)
            if self.text.stopped:
                tokens, reason = tokens[:taken], "stop"
            elif reason is not None:
                text += self.text.flush()
        return Served(self.request, tokens, min(accepted, len(tokens)), reason, text=text, drafted=drafted)


def serve_requests(
    job: Job, requests: Iterable[Request | None], limits: Limits, kept: ProgramCache | None = None
) -> Generator[Served, PyTree, None]:
    """As `specjax.serve`. `job`: of a batch of as many rows, with the longest prompts and the most tokens."""
    settings = jax.tree.map(lambda x: np.stack([x] * len(job.lengths)), row_settings(limits))
    parts = dataclasses.replace(job.parts, serving=True, **settings._asdict())
    job = dataclasses.replace(job, parts=parts)
    programs = programs_of(job, kept, SERVING)
    learnt, state = programs.empty(job)
    parts = _learnt(parts, learnt)  # from now on with parameters that `remember` gave
    memory = lambda: parts.drafter
    waiting, came = iter(requests), -1
    rows: list[_Row | None] = [None] * len(job.lengths)
    read: tuple[Info, list[_Row | None]] | None = None  # a step that was dispatched, and whose rows these were then
    more = True
    while True:
        while more and None in rows:
            try:
                request = next(waiting)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            came += 1
            try:
                count = check(request, limits)
                own, changes = row_settings(limits, request), processor_settings(limits, request)
                key = row_keys(threefry(request.key)[None], 1)
                text = None if limits.tokenizer is None else Detokenizer(limits.tokenizer, request.stop or ())
            except (UsageError, TypeError, ValueError, OverflowError, AttributeError) as error:
                why = str(error) if isinstance(error, UsageError) else f"it is no whole Request ({error})"
                parts = _with(parts, (yield Served(came, [], 0, "refused", why)))
                continue
            slot = rows.index(None)
            rows[slot] = _Row(came, count, text)
            settings = _put(settings, slot, own)
            parts = dataclasses.replace(parts, **settings._asdict())
            state = programs.admit(*_admission(parts, state, slot, request, key, count, changes))
        before, read = read, None
        if any(rows):
            state, info, _ = programs.step(parts, state)
            read = replicate(info), list(rows)  # the device goes on while the step before is read
        elif more and before is None:
            time.sleep(IDLE)
        for slot, row, news in _news(*before) if before else ():
            served = row.add(*news)
            if served.finish_reason:
                rows[slot] = None
                if read is not None:
                    read[1][slot] = None
                parts, state = _without(programs, parts, state, slot)
                served = served._replace(drafter=memory)
            parts = _with(parts, (yield served))
        if read is None and not any(rows) and not more:
            return


def _news(info: Info, rows: list[_Row | None]):
    """Of the rows that a step added to or ended: slot, row, and (tokens, how many drafted, how deep the draft was,
    whether it ends by eos, finite, whether it ended)."""
    emitted, tokens, accepted, drafted, ends, finite, done = jax.device_get(
        (info.emitted, info.tokens, info.accepted, info.drafted_depth, info.hit_eos, info.finite, info.done)
    )
    done = np.zeros(len(rows), bool) if done is None else done
    for slot, row in enumerate(rows):
        if row is not None and (emitted[slot] or done[slot]):
            news = tokens[slot, : emitted[slot]].tolist(), int(accepted[slot]), int(drafted[slot]), bool(ends[slot])
            yield slot, row, (*news, bool(finite[slot]), bool(done[slot]))


def _with(parts: Parts, learnt: PyTree | None) -> Parts:
    """With other parameters of the drafter, if any were sent. Raises: UsageError for those of other shapes."""
    if learnt is None:
        return parts
    own, new = (jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), x) for x in (parts.drafter.params, learnt))
    if own != new:
        raise UsageError("parameters sent to serve must have the shapes and dtypes of those that its drafter has")
    return dataclasses.replace(parts, drafter=parts.drafter.replace(params=learnt))


def _put(settings: RowSettings, slot: int, own: RowSettings) -> RowSettings:
    """In arrays of their own: a step that was dispatched may still read the old ones."""
    settings = jax.tree.map(np.copy, settings)
    for whole, value in zip(jax.tree.leaves(settings), jax.tree.leaves(own), strict=True):
        whole[slot] = value
    return settings


def _admission(
    parts: Parts, state: DecodeState, slot: int, request: Request, key: Array, count: int,
    changes: Sequence[PyTree] = (),
) -> tuple:  # fmt: skip
    """The arguments of `_admit`."""
    tokens = np.zeros((1, state.tokens.shape[1]), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    length = np.array([len(request.prompt)], np.int32)
    inputs = jax.tree.map(lambda x: x[None], request.inputs)
    return parts, state, np.int32(slot), tokens, length, key, length + np.int32(count), inputs, list(changes)


@jax.jit
@without_x64
def _empty(job: Job) -> tuple[PyTree, DecodeState]:
    """A batch whose rows have all ended, and what the drafter's parameters are after one of these."""
    ones = jnp.ones_like(job.lengths)
    state = job.parts.loop.init(job.parts, job.tokens, ones, job.keys, ones, job.inputs)
    return _lesson(job.parts.drafter, state, 0), state


@functools.partial(jax.jit, donate_argnames=("state",))
@without_x64
def _admit(
    parts: Parts, state: DecodeState, slot, tokens, length, key, stop, inputs: PyTree, changes: list[PyTree]
) -> DecodeState:
    """`state` with the prompt int32[1, L] read into row `slot`; `changes` are the settings of its processors."""
    own = batch_axes.take_row((parts.sampling, parts.eos), slot, batch_axes.rows_first((parts.sampling, parts.eos)))
    processors = tuple(p.replace(settings=mine) for p, mine in zip(parts.processors, changes, strict=True))
    of_row = dataclasses.replace(parts, sampling=own[0], eos=own[1], processors=processors)
    alone = parts.loop.init(of_row, tokens, length, key, stop, inputs, beside=state)
    return batch_axes.put_row(state, alone, slot, parts.loop.axes(parts, state))


@functools.partial(jax.jit, donate_argnames=("state",))
@without_x64
def _ended(drafter: Drafter, state: DecodeState, slot) -> tuple[PyTree, DecodeState]:
    """The batch without row `slot`, and the drafter's parameters after it."""
    return _lesson(drafter, state, slot), state._replace(done=state.done.at[slot].set(True))


def _lesson(drafter: Drafter, state: DecodeState, slot) -> PyTree:
    return export_params(drafter, batch_axes.take_row(state.draft, slot, drafter.hooks.axes(state.draft))).params


class Programs(NamedTuple):
    """What serves requests."""

    empty: Callable[[Job], tuple[PyTree, DecodeState]]
    step: Callable[..., tuple[DecodeState, Info, Array]]
    admit: Callable[..., DecodeState]
    ended: Callable[..., tuple[PyTree, DecodeState]]


def _lowered(job: Job) -> Iterator[Any]:
    empty = _empty.lower(job)
    yield empty
    learnt, state = shapes(empty.out_info)
    parts = _learnt(job.parts, learnt)
    yield step.lower(parts, state)
    request = Request([0], job.keys[0], inputs=jax.tree.map(lambda x: x[0], job.inputs))
    changes = [processor.settings for processor in parts.processors]
    yield _admit.lower(*_admission(parts, state, 0, request, job.keys[:1], 1, changes))
    yield _ended.lower(parts.drafter, state, np.int32(0))


SERVING = Family("serve", Programs(_empty, step, _admit, _ended), _lowered)


def _without(programs: Programs, parts: Parts, state: DecodeState, slot: int) -> tuple[Parts, DecodeState]:
    """Row `slot` ended, and the drafter with what it taught it."""
    learnt, state = programs.ended(parts.drafter, state, np.int32(slot))
    return _learnt(parts, learnt), state


def _learnt(parts: Parts, learnt: PyTree) -> Parts:
    return dataclasses.replace(parts, drafter=parts.drafter.replace(params=restore_params(parts.drafter, learnt)))
