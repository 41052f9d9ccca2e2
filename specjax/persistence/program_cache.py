"""A cache of compiled programs on disk. A process that repeats an earlier decode neither traces nor compiles.

The compilation cache of XLA looks up a program after it was traced and lowered. For SmolLM2 that takes longer than
reading the compiled program. This cache looks up a program by its arguments (`specjax.persistence.program_key`): their
structure, static parts and shapes, the files of specjax, the versions of its libraries, the processor, the devices and
the settings of JAX. If no key can be computed, the program is compiled as usual and not cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.engine import run
from specjax.engine.job import Job, Parts
from specjax.engine.run import TRACED
from specjax.numerics.text_identity import NEAR_TIES, text_identity
from specjax.persistence import program_key
from specjax.persistence.program_files import ProgramFolder, StoredPrograms
from specjax.persistence.xla_cache import without_xla_cache
from specjax.types import Array, DecodeState, Info

READING = "reading programs"
"""Prefix of the names of threads that only read. A process may exit without waiting for them."""


class Family(NamedTuple):
    """The programs of one kind of job, such as `stream` or `serve`."""

    name: str
    traced: Any  # NamedTuple of jitted functions, such as `engine.run.StepPrograms`
    lower: Callable[[Job], Iterator[Any]]  # yields the lowered programs of a job, in the same order


def shapes(tree: Any) -> Any:
    """Return the shapes of the outputs of a lowered program, as arguments to lower the next program."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _lower_stream(job: Job) -> Iterator[Any]:
    start = run.start.lower(job)
    yield start
    yield run.step.lower(job.parts, shapes(start.out_info))


def plain_step(job: Job) -> Callable[[Any], Any] | None:
    """Return a function that lowers a plain step of a job, which decodes one token, from its lowered `start`.

    It returns None if the job has no plain step, or if plain steps would change the text. The verifier can change it,
    and so can rounding coarser than float32.
    """
    parts = job.parts
    if not isinstance(parts, Parts) or 1 not in parts.drafter.traits.widths or parts.drafter.num_nodes == 1:
        return None
    if parts.verifier.name not in ("greedy", "sample_and_match") or parts.keep.scored:
        return None
    if text_identity(parts.target) == NEAR_TIES:
        return None
    return lambda start: run.step.lower(_as_plain(parts), shapes(start.out_info))


def _as_plain(parts: Parts) -> Parts:
    return dataclasses.replace(parts, plain=True)


class _PlainUntilReady:
    """A step function that runs plain steps until the full step is compiled or loaded."""

    def __init__(self, plain: Callable, full: Future):
        self.plain, self.full = plain, full

    def __call__(self, parts: Parts, state: DecodeState) -> tuple[DecodeState, Info, Array]:
        return self.full.result()(parts, state) if self.full.done() else self.plain(_as_plain(parts), state)


STREAM = Family("stream", TRACED, _lower_stream)


class ProgramCache:
    """A folder of compiled programs, for `specjax.stream(..., programs=ProgramCache(folder))` and `specjax.serve`.

    The files are executed. So the folder must belong to this user, and no other user may be able to write to it.
    Otherwise nothing is read or written, and a warning gives the reason. A new folder gets mode 0700. Several threads
    may share the object.
    """

    def __init__(self, folder: str | Path, gib: float = 2.0, plain_first: bool = False):
        """Open a cache.

        Args:
          folder: `~` is the user's home.
          gib: size limit in GiB. The least recently used programs are deleted first. Other files stay.
          plain_first: `stream` starts with plain steps, whose program is ready early, and drafts once the wider passes
            are compiled or loaded. `finish` and the exit of the process wait for them.
        """
        self.files, self.plain_first = ProgramFolder(folder, gib), plain_first
        self.compiling: Future | None = None  # full step that is being compiled, if any
        self._reading: list[Future] = []
        self.hit: bool | None = None  # True if the last requested programs were in the cache; None: not cacheable
        self._ready: dict[Any, tuple] = {}
        self._label: str | None = None
        self._expected: tuple[str, Future] | None = None
        self._lock = threading.RLock()

    def expect(self, label: str) -> None:
        """Start to load the programs that were last used with the same `label`, while the caller loads a model.

        For SmolLM2 on two CPU cores it takes 3.2 s, without the interpreter lock.
        """
        self._label = program_key.digest(label + program_key.digest_package())
        name = self.files.read_last(self._label)
        if name is not None:
            self._expected = name, _start_thread(lambda: self._read(name), READING)

    def programs(self, job: Job, family: Family = STREAM) -> Any:
        """Return the programs of a job, from the cache if possible. New programs are added to the cache."""
        with self._lock:
            return self._programs(job, family)

    def _programs(self, job: Job, family: Family) -> Any:
        self.hit = None
        if not _is_cacheable(job):
            return family.traced
        settings = program_key.digest_settings()
        key = family.name, program_key.outline(job), settings
        if key not in self._ready:
            try:
                parts = (
                    program_key.digest_arguments(job),
                    program_key.digest_package(),
                    program_key.digest_releases(),
                    settings,
                )
            except program_key.UnknownValueError:
                return family.traced
            name = program_key.digest("".join((family.name, *parts)))
            programs = self._load(name)
            self.hit = programs is not None
            if programs is not None:
                self._reading += [program.full for program in programs if isinstance(program, _PlainUntilReady)]
            else:
                plain = plain_step(job) if self.plain_first and family.name == STREAM.name else None
                programs = self._compile(name, family.lower(job), plain)
            self._ready[key] = type(family.traced)(*programs)
        else:
            self.hit = True
        return self._ready[key]

    def _load(self, name: str) -> list[Callable] | None:
        """Return the programs that `expect` loads, if they have this name. Otherwise load them and store the name."""
        expected, self._expected = self._expected, None
        if expected and expected[0] == name:
            return expected[1].result()
        if self._label is not None:
            self.files.write_last(self._label, name)
        return self._read(name)

    def _read(self, name: str) -> list[Callable] | None:
        """Read a file of programs. Return None if it is missing or broken in any way.

        With plain_first, the first character of SmolLM2 on two CPU cores appears after 5.7 s instead of 12.1 (medians
        of five).
        """
        with contextlib.suppress(Exception):
            stored = self.files.read(name)
            if stored is None:
                return None
            if self.plain_first and stored.plain is not None:
                *first, full = stored.programs
                *programs, plain = map(_deserialize, [*first, stored.plain])
                programs.append(_PlainUntilReady(plain, _start_thread(lambda: _deserialize_step(full), READING)))
            else:
                with ThreadPoolExecutor() as pool:
                    programs = list(pool.map(_deserialize, stored.programs))
            return programs
        return None

    def finish(self) -> None:
        """Wait until all programs are loaded, or compiled and written."""
        for future in (self.compiling, *self._reading):
            if future is not None:
                future.result()
        self.compiling, self._reading = None, []

    def _compile(self, name: str, lowered: Iterator[Any], plain: Callable[[Any], Any] | None = None) -> list[Callable]:
        """Compile each program while the next one is traced, and write them if possible.

        Args:
          plain: function that lowers the plain step from the first lowered program. The plain step runs until the
            second program is compiled.
        """
        self.finish()
        if plain is None:
            with without_xla_cache(), ThreadPoolExecutor() as pool:
                futures = [pool.submit(program.compile) for program in lowered]
                programs = [future.result() for future in futures]
            with contextlib.suppress(Exception):  # a program that cannot be written still runs
                self.files.write(name, StoredPrograms(list(map(_serialize, programs))))
            return programs
        first = next(lowered)
        with without_xla_cache(), ThreadPoolExecutor() as pool:
            futures = [pool.submit(first.compile), pool.submit(plain(first).compile)]
            start, step = [future.result() for future in futures]
        stored = None
        with contextlib.suppress(Exception):  # before they run: on CPU, XLA cannot serialize a sort that has run
            stored = StoredPrograms([_serialize(start)], _serialize(step))

        def compile_full() -> Callable:
            with without_xla_cache():
                full = next(lowered).compile()
            with contextlib.suppress(Exception):
                if stored is not None:
                    self.files.write(name, StoredPrograms([*stored.programs, _serialize(full)], stored.plain))
            return full

        self.compiling = _start_thread(compile_full)
        return [start, _PlainUntilReady(step, self.compiling)]


def _start_thread(work: Callable[[], Any], name: str = "") -> Future:
    """Run `work` in a new thread, which ends when `work` returns."""
    pool = ThreadPoolExecutor(1, name)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def _serialize(program: Any) -> tuple:
    from jax.experimental.serialize_executable import serialize

    payload, arguments, result = serialize(program)
    return payload, arguments.num_leaves, result


def _deserialize(stored: tuple) -> Callable[..., Any]:
    """Load a program that takes flat arguments. `ProgramCache.programs` has already compared their structure."""
    from jax.experimental.serialize_executable import deserialize_and_load

    payload, count, result = stored
    program = deserialize_and_load(
        payload, jax.tree.structure(((0,) * count, {})), result, execution_devices=jax.devices()[:1]
    )
    return lambda *arguments: program(*jax.tree.leaves(arguments))


def _deserialize_step(stored: tuple) -> Callable[..., Any]:
    """Load a step. The text is already running, so a step that cannot be loaded is compiled."""
    try:
        return _deserialize(stored)
    except Exception:  # XLA raises errors of many classes
        return run.step


def _is_cacheable(job: Job) -> bool:
    """Return True if all arrays of a job are on the first device of a single process."""
    if job.parts.target.model.mesh is not None or jax.process_count() > 1:
        return False
    arrays = [leaf for leaf in jax.tree.leaves(job) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        return False
    return all(leaf.devices() == {jax.devices()[0]} for leaf in arrays)


def programs_of(job: Job, cache: ProgramCache | None, family: Family = STREAM) -> Any:
    """Return the programs of a job from a cache, or the jitted functions if there is no cache."""
    return family.traced if cache is None else cache.programs(job, family)
