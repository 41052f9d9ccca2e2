"""A running batch whose rows requests enter and leave while the other rows continue (continuous batching)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.arrays.modes import with_standard_modes
from specjax.engine.job import Job, Parts
from specjax.engine.run import export_params, restore_params, step
from specjax.engine.value_checks import explain_failure
from specjax.errors import UsageError
from specjax.numerics.global_arrays import place, replicate
from specjax.numerics.sampling import row_keys, threefry
from specjax.persistence.program_cache import Family, ProgramCache, programs_of, shapes
from specjax.serving.detokenizer import Detokenizer
from specjax.serving.requests import Limits, Request, RowSettings, check_request, processor_settings, row_settings
from specjax.types import Array, DecodeState, Drafter, Info, PyTree


class Served(NamedTuple):
    """The tokens that one step added to one request."""

    request: int  # number of the request, counted from 0 in the order of arrival
    tokens: list[int]
    accepted: int  # number of leading tokens that were drafted
    # At the end of the request: "eos", "length", "stop", "refused" or "failed" (the model returned NaN or Inf, or its
    # processors allowed no token)
    finish_reason: str | None = None
    error: str | None = None  # reason why the request was refused or failed, in one sentence
    text: str = ""  # new text, if `serve` has a tokenizer: whole characters, without eos and stop strings
    drafter: Callable[[], Drafter] | None = None  # at the end: returns the drafter with its learned parameters
    drafted: int = 0  # depth of the step's draft

    def __reduce__(self) -> tuple:
        """Return the fields that pickles and copies have. Functions cannot be pickled, so `drafter` is None there."""
        return type(self), tuple(self._replace(drafter=None))


class RowUpdate(NamedTuple):
    """The values of `Info` for one row, on the host."""

    tokens: list[int]  # added tokens
    accepted: int  # number of leading tokens that were drafted
    drafted: int  # depth of the draft
    is_eos: bool  # True if the last token is an eos
    is_finite: bool  # False if the row failed
    is_done: bool  # True if the row ended, possibly without eos


class Admission(NamedTuple):
    """Arguments of the program that prefills one request into a row."""

    slot: Any  # int32[], row that the request enters
    tokens: np.ndarray  # int32[1, L], the prompt
    length: np.ndarray  # int32[1]
    key: Array  # key[1]
    stop: np.ndarray  # int32[1], length of the text at which the row is full
    inputs: PyTree  # arrays [1, ...]
    processors: list[PyTree]  # settings of the processors


class ServePrograms(NamedTuple):
    """The compiled functions that serve requests."""

    empty: Callable[[Job], tuple[PyTree, DecodeState]]
    step: Callable[..., tuple[DecodeState, Info, Array]]
    admit: Callable[[Parts, DecodeState, Admission], DecodeState]
    end: Callable[..., tuple[PyTree, DecodeState]]


@dataclasses.dataclass
class _Row:
    """The request that occupies a row."""

    request: int
    remaining: int  # number of tokens that may still be added
    text: Detokenizer | None

    def add(self, update: RowUpdate) -> Served:
        """Add the tokens of one step to the request. A row that failed ends with the reason "failed"."""
        tokens = update.tokens
        self.remaining -= len(tokens)
        reason = "eos" if update.is_eos else "length" if update.is_done or not self.remaining else None
        reason = reason if update.is_finite else "failed"
        text = ""
        if self.text is not None:
            text, count = self.text.add_all(tokens[:-1] if update.is_eos else tokens)
            if self.text.stopped:
                tokens, reason = tokens[:count], "stop"
            elif reason is not None:
                text += self.text.flush()
        accepted = min(update.accepted, len(tokens))
        return Served(self.request, tokens, accepted, reason, text=text, drafted=update.drafted)


class _Dispatched(NamedTuple):
    """A step that the device runs, and the rows at the time of its dispatch."""

    info: Info
    rows: list[_Row | None]


class Batch:
    """The rows of a running batch: `admit` requests, dispatch a `step`, and `collect` the results.

    `step` dispatches the next step before `collect` reads the results of the previous step, so the device works while
    Python does.
    """

    def __init__(self, job: Job, limits: Limits, cache: ProgramCache | None = None):
        """Compile the programs and build a batch without requests.

        Args:
          job: a job with the number of rows, the longest prompt and the most tokens that any request may have.
        """
        self.limits = limits
        self._settings = jax.tree.map(lambda x: np.stack([x] * len(job.lengths)), row_settings(limits))
        parts = dataclasses.replace(job.parts, serving=True)
        job = dataclasses.replace(job, parts=_with_settings(parts, self._settings))
        self._programs: ServePrograms = programs_of(job, cache, SERVING)
        exported, self._state = self._programs.empty(job)
        self._parts = _with_exported(job.parts, exported)  # parameters in the form that `Hooks.export` returns
        self._rows: list[_Row | None] = [None] * len(job.lengths)
        self._running: _Dispatched | None = None  # the newest step
        self._finished: _Dispatched | None = None  # the previous step, which `collect` reads
        self._num_requests = 0

    @property
    def has_room(self) -> bool:
        """Return True if a row is free."""
        return None in self._rows

    @property
    def has_results(self) -> bool:
        """Return True if `collect` has a step to read."""
        return self._finished is not None

    @property
    def is_idle(self) -> bool:
        """Return True if no row has a request and `collect` has no step to read."""
        return self._running is None and self._finished is None and not any(self._rows)

    def admit(self, request: Request) -> Served | None:
        """Prefill a request into a free row. Return the refusal of a request that does not fit, else None."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        limits = self.limits
        try:
            count = check_request(request, limits)
            settings, processors = row_settings(limits, request), processor_settings(limits, request)
            key = row_keys(threefry(request.key)[None], 1)
            text = None if limits.tokenizer is None else Detokenizer(limits.tokenizer, request.stop or ())
        except (UsageError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = str(error) if isinstance(error, UsageError) else f"it is not a valid Request ({error})"
            return Served(number, [], 0, "refused", reason)
        slot = self._rows.index(None)
        self._rows[slot] = _Row(number, count, text)
        self._settings = _put_row(self._settings, slot, settings)
        self._parts = _with_settings(self._parts, self._settings)
        admission = pack_request(self._state, slot, request, key, count, processors)
        self._state = self._programs.admit(self._parts, self._state, admission)
        return None

    def step(self) -> bool:
        """Dispatch one step of all rows. Return False if no row has a request."""
        self._finished, self._running = self._running, None
        if not any(self._rows):
            return False
        self._state, info, _ = self._programs.step(self._parts, self._state)
        self._running = _Dispatched(replicate(info), list(self._rows))
        return True

    def collect(self) -> Iterator[Served]:
        """Yield the results of the step before the newest dispatched one, and free the rows that ended."""
        finished, self._finished = self._finished, None
        for slot, row, update in _row_updates(finished) if finished else ():
            served = row.add(update)
            if served.finish_reason == "failed":
                served = served._replace(error=explain_failure(self._parts.target, self._parts.processors))
            if served.finish_reason:
                self._free(slot)
                served = served._replace(drafter=lambda: self._parts.drafter)
            yield served

    def set_params(self, params: PyTree | None) -> None:
        """Replace the drafter's parameters from the next step on. None has no effect.

        Raises: UsageError if their shapes or dtypes differ from those of the current parameters.
        """
        if params is None:
            return
        form = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
        if form(self._parts.drafter.params) != form(params):
            raise UsageError("parameters sent to serve must have the shapes and dtypes of the drafter's parameters")
        self._parts = dataclasses.replace(self._parts, drafter=self._parts.drafter.replace(params=params))

    def _free(self, slot: int) -> None:
        """End the request of a row, and export the parameters that the drafter learned from it."""
        self._rows[slot] = None
        if self._running is not None:
            self._running.rows[slot] = None
        exported, self._state = self._programs.end(self._parts.drafter, self._state, np.int32(slot))
        self._parts = _with_exported(self._parts, exported)


def _row_updates(dispatched: _Dispatched) -> Iterator[tuple[int, _Row, RowUpdate]]:
    """Yield (slot, row, update) for each row that got tokens or ended in the step."""
    info, rows = dispatched
    tokens, emitted, accepted, drafted, hit_eos, finite, done = jax.device_get(
        (info.tokens, info.emitted, info.accepted, info.drafted_depth, info.hit_eos, info.finite, info.done)
    )
    done = np.zeros(len(rows), bool) if done is None else done
    for slot, row in enumerate(rows):
        if row is not None and (emitted[slot] or done[slot] or not finite[slot]):
            yield slot, row, RowUpdate(
                tokens=tokens[slot, : emitted[slot]].tolist(),
                accepted=int(accepted[slot]),
                drafted=int(drafted[slot]),
                is_eos=bool(hit_eos[slot]),
                is_finite=bool(finite[slot]),
                is_done=bool(done[slot]),
            )  # fmt: skip


def _with_settings(parts: Parts, settings: RowSettings) -> Parts:
    """Return the parts with the settings on the devices, so that no step transfers them."""
    mesh = parts.target.model.mesh
    placed = jax.device_put(settings) if mesh is None else place(settings, mesh)
    return dataclasses.replace(parts, **placed._asdict())


def _put_row(settings: RowSettings, slot: int, row: RowSettings) -> RowSettings:
    """Return new arrays with the settings of one row."""
    settings = jax.tree.map(np.copy, settings)
    for array, value in zip(jax.tree.leaves(settings), jax.tree.leaves(row), strict=True):
        array[slot] = value
    return settings


def pack_request(
    state: DecodeState, slot: int, request: Request, key: Array, count: int, processors: list[PyTree]
) -> Admission:
    """Return the arguments of the admission of a request. `key` is [1], `count` the number of new tokens."""
    tokens = np.zeros((1, state.tokens.shape[1]), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    length = np.array([len(request.prompt)], np.int32)
    inputs = jax.tree.map(lambda x: x[None], request.inputs)
    return Admission(np.int32(slot), tokens, length, key, length + np.int32(count), inputs, processors)


@jax.jit
@with_standard_modes
def _empty(job: Job) -> tuple[PyTree, DecodeState]:
    """Return the drafter's exported parameters, and a batch in which all rows have ended."""
    ones = jnp.ones_like(job.lengths)
    state = job.parts.loop.init(job.parts, job.tokens, ones, job.keys, ones, job.inputs)
    return _export_row(job.parts.drafter, state, 0), state


@functools.partial(jax.jit, donate_argnames=("state",))
@with_standard_modes
def _admit(parts: Parts, state: DecodeState, admission: Admission) -> DecodeState:
    """Prefill a request as a batch of one, and write it over its row in every array of `state`."""
    slot, tokens, length, key, stop, inputs, settings = admission
    per_row = parts.sampling, parts.eos
    sampling, eos = batch_axes.take_row(per_row, slot, batch_axes.rows_first(per_row))
    processors = tuple(p.replace(settings=row) for p, row in zip(parts.processors, settings, strict=True))
    parts_of_row = dataclasses.replace(parts, sampling=sampling, eos=eos, processors=processors)
    row = parts.loop.init(parts_of_row, tokens, length, key, stop, inputs, beside=state)
    return batch_axes.put_row(state, row, slot, parts.loop.axes(parts, state))


@functools.partial(jax.jit, donate_argnames=("state",))
@with_standard_modes
def _end(drafter: Drafter, state: DecodeState, slot) -> tuple[PyTree, DecodeState]:
    """Mark a row as ended. Return the drafter's exported parameters and the state."""
    return _export_row(drafter, state, slot), state._replace(done=state.done.at[slot].set(True))


def _export_row(drafter: Drafter, state: DecodeState, slot) -> PyTree:
    return export_params(drafter, batch_axes.take_row(state.draft, slot, drafter.hooks.axes(state.draft))).params


def _with_exported(parts: Parts, exported: PyTree) -> Parts:
    return dataclasses.replace(parts, drafter=parts.drafter.replace(params=restore_params(parts.drafter, exported)))


def _lower(job: Job) -> Iterator[Any]:
    """Yield the lowered programs, in the order of `ServePrograms`."""
    empty = _empty.lower(job)
    yield empty
    exported, state = shapes(empty.out_info)
    parts = _with_exported(job.parts, exported)
    yield step.lower(parts, state)
    request = Request([0], job.keys[0], inputs=jax.tree.map(lambda x: x[0], job.inputs))
    processors = [processor.settings for processor in parts.processors]
    yield _admit.lower(parts, state, pack_request(state, 0, request, job.keys[:1], 1, processors))
    yield _end.lower(parts.drafter, state, np.int32(0))


SERVING = Family("serve", ServePrograms(_empty, step, _admit, _end), _lower)
