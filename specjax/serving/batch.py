"""A running batch whose rows requests enter and leave while the other rows continue (continuous batching)."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
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
from specjax.models.layout import splits_slots
from specjax.numerics.global_arrays import place, replicate, spans_hosts
from specjax.numerics.sampling import row_keys, threefry
from specjax.persistence.program_cache import Family, ProgramCache, programs_of, shapes
from specjax.processors.automaton import Automaton
from specjax.processors.constraint import FREE
from specjax.serving import admission
from specjax.serving.admission import ServePrograms
from specjax.serving.automata import AutomatonTable, num_pieces
from specjax.serving.detokenizer import Detokenizer
from specjax.serving.prefixes import PrefixStore
from specjax.serving.reading import PromptReader, next_to_read
from specjax.serving.requests import (
    Limits,
    Request,
    RowSettings,
    check_request,
    make_detokenizer,
    processor_settings,
    row_settings,
)
from specjax.types import DecodeState, Drafter, Info, PyTree, TokenLogprobs


class Served(NamedTuple):
    """The tokens that one step added to one request."""

    request: int  # number of the request, counted from 0 in the order of arrival
    tokens: list[int]
    accepted: int  # number of leading tokens that were drafted
    # At the end of the request: "eos", "length", "stop", "cancelled", "refused" or "failed" (the model returned NaN or
    # Inf, or its processors allowed no token)
    finish_reason: str | None = None
    error: str | None = None  # reason why the request was refused or failed, in one sentence
    text: str = ""  # new text, if `serve` has a tokenizer: whole characters, without eos and stop strings
    drafter: Callable[[], Drafter] | None = None  # at the end: returns the drafter with its learned parameters
    drafted: int = 0  # depth of the step's draft
    cached: int = 0  # number of tokens of the prompt that were not read, because an earlier prompt began with them
    logprobs: TokenLogprobs | None = None  # NumPy arrays for `tokens`, if the request has `alternatives`
    # tokens of the request so far whose text was returned; not those that ended it, or that may begin a stop string
    num_shown: int = 0
    # In the first update of a request with `scores_prompt`: for all tokens of the prompt except the first one
    prompt_logprobs: TokenLogprobs | None = None

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
    logprobs: TokenLogprobs | None = None  # of `tokens`


@dataclasses.dataclass
class _Row:
    """The request that occupies a row."""

    request: int
    remaining: int  # number of tokens that may still be added
    text: Detokenizer | None
    tokens: list[int]  # the prompt and the text
    alternatives: int | None = None  # as in `Request`
    salt: str | None = None  # as in `Request`
    includes_stop: bool = False  # as in `Request`
    is_read: bool = False  # True if the prompt was read, so that the row decodes
    num_stored: int = 0  # number of tokens of the prompt that were copied from the store of prefixes
    automaton: Automaton | None = None  # in the table, with this row as a user
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the chunks of the prompt, until the first update

    def served(self, tokens: list[int], accepted: int, reason: str | None, **fields: Any) -> Served:
        """Return an update of this request."""
        return Served(self.request, tokens, accepted, reason, cached=self.num_stored, **fields)

    def add(self, update: RowUpdate) -> Served:
        """Add the tokens of one step to the request. A row that failed ends with the reason "failed"."""
        tokens = update.tokens
        self.remaining -= len(tokens)
        reason = "eos" if update.is_eos else "length" if update.is_done or not self.remaining else None
        reason = reason if update.is_finite else "failed"
        text = ""
        if self.text is not None:
            hides_eos = update.is_eos and not self.includes_stop
            text, count = self.text.add_all(tokens[:-1] if hides_eos else tokens)
            if self.text.stopped:
                tokens, reason = tokens[:count], "stop"
            elif reason is not None:
                text += self.text.flush()
        self.tokens += tokens
        accepted, logprobs = min(update.accepted, len(tokens)), None
        if self.alternatives is not None and update.logprobs is not None:
            logprobs = _cut(update.logprobs, len(tokens), self.alternatives)
        return self.served(
            tokens, accepted, reason, text=text, drafted=update.drafted, logprobs=logprobs,
            prompt_logprobs=self._take_prompt_logprobs(len(self.tokens) - len(tokens)),
            num_shown=0 if self.text is None else self.text.num_shown,
        )  # fmt: skip

    def _take_prompt_logprobs(self, num_prompt: int) -> TokenLogprobs | None:
        """Return the log-probabilities of a prompt of `num_prompt` tokens once, if the request needs them."""
        chunks, self.prompt_logprobs = self.prompt_logprobs, None
        if chunks is None or self.alternatives is None:
            return None
        shape = 1, 0, self.alternatives
        empty: Any = np.zeros(shape[:2], np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        alternatives = lambda x: x[..., : self.alternatives]
        parts = [TokenLogprobs(*empty)]  # a prompt of one token has no chunk
        parts += [TokenLogprobs(chunk[0], *map(alternatives, chunk[1:])) for chunk in jax.device_get(chunks)]
        return _cut(jax.tree.map(lambda *x: np.concatenate(x, 1)[0], *parts), num_prompt - 1, self.alternatives)


def _cut(logprobs: TokenLogprobs, size: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of the first `size` tokens, with `count` alternatives."""
    of_tokens, *of_likeliest = (x[:size] for x in logprobs)
    return TokenLogprobs(of_tokens, *(x[:, :count] for x in of_likeliest))


class _Admitted(NamedTuple):
    """A request that has a row, and whose prompt is not read yet."""

    row: _Row
    slot: int
    request: Request
    key: Any  # key[1]
    num_tokens: int  # new tokens
    processors: list[PyTree]  # their settings


class _Dispatched(NamedTuple):
    """A step that the device runs, and the rows at the time of its dispatch."""

    info: Info
    rows: list[_Row | None]


class Batch:
    """The rows of a running batch: `admit` requests, dispatch a `step`, and `collect` the results.

    `step` dispatches the next step before `collect` reads the results of the previous step, so the device works while
    Python does.
    """

    def __init__(self, job: Job, limits: Limits, cache: ProgramCache | None = None, prefix_bytes: int = 0):
        """Compile the programs and build a batch without requests.

        Args:
          job: a job with the number of rows, the longest prompt and the most tokens that any request may have.
          prefix_bytes: memory for chunks of prompts, which later prompts with the same beginning do not read again.
        """
        if splits_slots(job.parts.target.model):  # a stored chunk is a range of slots, which a part may end within
            prefix_bytes = 0
        self.limits = limits
        self._settings = jax.tree.map(lambda x: np.stack([x] * len(job.lengths)), row_settings(limits))
        keep = job.parts.keep._replace(alternatives=limits.max_alternatives)
        parts = dataclasses.replace(job.parts, serving=True, keep=keep)
        job = dataclasses.replace(job, parts=_with_settings(parts, self._settings))
        self._programs: ServePrograms = programs_of(job, cache, SERVING)
        exported, self._state = self._programs.empty(job)
        self._parts = _with_exported(job.parts, exported)  # parameters in the form that `Hooks.export` returns
        self._rows: list[_Row | None] = [None] * len(job.lengths)
        self._running: _Dispatched | None = None  # the newest step
        self._finished: _Dispatched | None = None  # the previous step, which `collect` reads
        self._num_requests = self._turn = 0
        self.num_changes = 0  # requests that came or ended, whose programs run beside the steps
        self._prefixes = PrefixStore(prefix_bytes)
        self._readers: list[PromptReader] = []
        # hosts would start to read at different times
        self._keeps_ended = bool(prefix_bytes) and limits.inputs is None and not spans_hosts(job.parts.target.params)
        self._ended: deque[tuple[list[int], str | None]] = deque(maxlen=len(self._rows))  # texts and their salts
        self._ended_reader: PromptReader | None = None
        self._automata: AutomatonTable | None = None
        self._blocked: list[_Admitted] = []  # requests with a row that wait for room for their automata
        if num_pieces(limits.constraint_mib):
            self._automata = AutomatonTable(limits.constraint_mib, limits.vocab_size, job.parts.target.model.mesh)
            self._place_automata()

    @property
    def has_room(self) -> bool:
        """Return True if a row is free."""
        return None in self._rows

    @property
    def is_reading(self) -> bool:
        """Return True if a prompt is being read."""
        return bool(self._readers)

    @property
    def has_ended_texts(self) -> bool:
        """Return True if `read_ended` has a text to read."""
        return bool(self._ended) or self._ended_reader is not None

    @property
    def is_decoding(self) -> bool:
        """Return True if a row adds tokens in the next step."""
        return any(row is not None and row.is_read for row in self._rows)

    @property
    def is_idle(self) -> bool:
        """Return True if no row has a request and `collect` has no step to read."""
        return self._running is None and self._finished is None and not any(self._rows)

    def admit(self, request: Request) -> Served | None:
        """Give a request a free row. Return the refusal of a request that does not fit, else None.

        Its prompt is read by `read`.
        """
        number, self._num_requests = self._num_requests, self._num_requests + 1
        limits = self.limits
        try:
            count = check_request(request, limits)
            settings, processors = row_settings(limits, request), processor_settings(limits, request)
            key = row_keys(threefry(request.key)[None], 1)
            text = make_detokenizer(limits, request)
        except (UsageError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = str(error) if isinstance(error, UsageError) else f"it is not a valid Request ({error})"
            return Served(number, [], 0, "refused", reason)
        self.num_changes += 1
        slot = self._rows.index(None)
        prompt = [*map(int, request.prompt)]
        row = _Row(number, count, text, prompt, request.alternatives, request.salt, request.includes_stop)
        self._rows[slot] = row
        self._settings = _put_row(self._settings, slot, settings)
        self._parts = _with_settings(self._parts, self._settings)
        self._blocked.append(_Admitted(row, slot, request, key, count, processors))
        self._start_blocked()
        self._drop_ended_reader()
        return None

    def _start_blocked(self) -> None:
        """Begin to read the prompts of new requests. Those whose automata have no room yet wait, in their order."""
        blocked, self._blocked = self._blocked, []
        for admitted in blocked:
            row, slot, request, key, count, processors = admitted
            address, automaton = FREE, request.constraint
            if automaton is not None and self._automata is not None:
                place = None if self._blocked else self._automata.acquire(automaton)
                if place is None:
                    self._blocked.append(admitted)
                    continue
                address, row.automaton = place, automaton
                self._place_automata()
            settings = self._with_address(processors, address)
            packed = admission.pack_request(self._state.tokens.shape[1], slot, request, key, count, settings)
            # the store has no log-probabilities
            is_stored = request.inputs is None and not request.scores_prompt
            root = self._prefixes.root(request.salt) if is_stored else None
            self._readers.append(PromptReader(row, packed, root))

    def _with_address(self, processors: list[PyTree], address: int) -> list[PyTree]:
        """Return the settings of all processors of a row, whose automaton has an address."""
        return processors if self._automata is None else [*processors, np.array([address], np.int32)]

    def _place_automata(self) -> None:
        """Pass the array of the automata to the next step."""
        assert self._automata is not None
        *first, last = self._parts.processors
        processors = (*first, last.replace(params=last.params._replace(words=self._automata.words)))
        self._parts = dataclasses.replace(self._parts, processors=processors)

    def _clear(self, slot: int) -> None:
        """Give the row and its automaton to other requests."""
        row, self._rows[slot] = self._rows[slot], None
        self._blocked = [admitted for admitted in self._blocked if admitted.row is not row]
        if row is not None and row.automaton is not None and self._automata is not None:
            self._automata.release(row.automaton)
        self._start_blocked()

    def read(self, *, wait: bool = False) -> None:
        """Read one chunk of a prompt. A prompt that was read completely enters its row.

        wait: return when the device has read it.
        """
        self._turn += 1
        reader = next_to_read(self._readers, self._turn)
        reader.advance(self._parts, self._programs, self._prefixes, wait=wait)
        if not reader.unread and reader.row is not None:
            self._stop_reading(reader)
            reader.request.is_read, reader.request.num_stored = True, reader.num_stored
            reader.request.prompt_logprobs = reader.logprobs if reader.packed.scores else None
            self._state = self._programs.enter(self._parts, self._state, reader.row, reader.packed.slot)

    def read_ended(self) -> None:
        """Read one chunk of a text that ended, if there is one, so that the next turn of its chat need not."""
        chunk = admission.chunk_size(self._parts)
        if self._ended_reader is None and self._ended and chunk is not None:
            tokens, salt = self._ended.popleft()
            request, key = Request(tokens, 0, salt=salt), row_keys(threefry(0)[None], 1)
            settings = self._with_address(processor_settings(self.limits), FREE)
            size = self._state.tokens.shape[1]
            packed = admission.pack_request(size, 0, request, key, 1, settings)
            self._ended_reader = PromptReader(None, packed, self._prefixes.root(salt))
        reader = self._ended_reader
        if reader is not None and chunk is not None:
            if reader.unread >= chunk:
                reader.advance(self._parts, self._programs, self._prefixes, wait=True)
            else:
                self._drop_ended_reader()

    def _drop_ended_reader(self) -> None:
        if self._ended_reader is not None:
            self._ended_reader.leave()
            self._ended_reader = None

    def _stop_reading(self, reader: PromptReader) -> None:
        reader.leave()
        self._readers.remove(reader)

    def cancel(self, number: int) -> Served | None:
        """End a request. Return its last update, or None if it has no row."""
        for slot, row in enumerate(self._rows):
            if row is not None and row.request == number:
                for reader in [reader for reader in self._readers if reader.request is row]:
                    self._stop_reading(reader)
                if row.is_read:
                    self._free(slot)
                else:
                    self._clear(slot)
                return row.served([], 0, "cancelled")
        return None

    def step(self) -> bool:
        """Dispatch one step of all rows. Return False if no row has a request."""
        self._finished, self._running = self._running, None
        if not self.is_decoding:
            return False
        self._state, info, _ = self._programs.step(self._parts, self._state)
        rows = [row if row is not None and row.is_read else None for row in self._rows]
        self._running = _Dispatched(replicate(info), rows)
        return True

    def collect(self) -> Iterator[Served]:
        """Yield the results of the step before the newest dispatched one, and free the rows that ended."""
        finished, self._finished = self._finished, None
        for slot, row, update in _row_updates(finished) if finished else ():
            if self._rows[slot] is not row:  # it was cancelled after an update of this step
                continue
            served = row.add(update)
            if served.finish_reason == "failed":
                served = served._replace(error=explain_failure(self._parts.target, self._parts.processors))
            if served.finish_reason:
                if served.finish_reason != "failed" and self._keeps_ended:
                    self._ended.append((row.tokens, row.salt))
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
        self._ended.clear()
        self._drop_ended_reader()
        self._prefixes.clear()  # it has the memory of a head with the old parameters

    def _free(self, slot: int) -> None:
        """End the request of a row, and export the parameters that the drafter learned from it."""
        self._clear(slot)
        self.num_changes += 1
        if self._running is not None:
            self._running.rows[slot] = None
        exported, self._state = self._programs.end(self._parts.drafter, self._state, np.int32(slot))
        self._parts = _with_exported(self._parts, exported)


def _row_updates(dispatched: _Dispatched) -> Iterator[tuple[int, _Row, RowUpdate]]:
    """Yield (slot, row, update) for each row that got tokens or ended in the step."""
    info, rows = dispatched
    fields = info.tokens, info.emitted, info.accepted, info.drafted_depth, info.hit_eos, info.finite, info.done
    tokens, emitted, accepted, drafted, hit_eos, finite, done = jax.device_get(fields)
    reported = any(row is not None and row.alternatives is not None for row in rows)
    logprobs = jax.device_get(info.raw_logprobs) if reported else None
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
                logprobs=None if logprobs is None else TokenLogprobs(*(x[slot] for x in logprobs)),
            )  # fmt: skip


def _with_settings(parts: Parts, settings: RowSettings) -> Parts:
    """Return the parts with the settings on the devices, so that no step transfers them."""
    mesh = parts.target.model.mesh
    placed = jax.device_put(settings) if mesh is None else place(settings, mesh)
    return dataclasses.replace(parts, **{name: x for name, x in placed._asdict().items() if x is not None})


def _put_row(settings: RowSettings, slot: int, row: RowSettings) -> RowSettings:
    """Return new arrays with the settings of one row."""
    settings = jax.tree.map(np.copy, settings)
    for array, value in zip(jax.tree.leaves(settings), jax.tree.leaves(row), strict=True):
        array[slot] = value
    return settings


@jax.jit
@with_standard_modes
def _empty(job: Job) -> tuple[PyTree, DecodeState]:
    """Return the drafter's exported parameters, and a batch in which all rows have ended."""
    ones = jnp.ones_like(job.lengths)
    state = job.parts.loop.init(job.parts, job.tokens, ones, job.keys, ones, job.inputs)
    return _export_row(job.parts.drafter, state, 0), state


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
    yield _end.lower(parts.drafter, state, np.int32(0))
    request = Request([0], job.keys[0], inputs=jax.tree.map(lambda x: x[0], job.inputs))
    processors = [processor.settings for processor in parts.processors]
    packed = admission.pack_request(job.tokens.shape[1], 0, request, job.keys[:1], 1, processors)
    begin = admission.begin.lower(parts, packed)
    yield begin
    row = shapes(begin.out_info)
    yield admission.enter.lower(parts, state, row, np.int32(0))
    if admission.chunk_size(parts) is not None:
        yield admission.read.lower(parts, row, packed, np.int32(0))
        take = admission.take_chunk.lower(parts, row, packed, np.int32(0))
        yield take
        yield admission.put_chunk.lower(parts, row, packed, np.int32(0), shapes(take.out_info))


SERVING = Family(
    "serve",
    ServePrograms(
        _empty, step, _end, admission.begin, admission.enter, admission.read, admission.take_chunk, admission.put_chunk
    ),
    _lower,
)
