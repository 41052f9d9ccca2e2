"""Compiled programs kept whole: a process that decodes as an earlier one did neither traces nor compiles.

XLA's own cache is asked with a program that is traced and lowered already, which for SmolLM2 takes longer than to read
it. This one is asked with what a job is made of (`specjax.persistence.program_key`): the structure, static parts and shapes of its
arguments, the files of specjax, the releases below it, the processor, the devices and the settings of JAX. Of what
cannot be said to be the same nothing is kept, and it is compiled as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.engine import run
from specjax.engine.job import Job, Parts
from specjax.engine.run import TRACED
from specjax.files.atomic import write_atomic
from specjax.persistence import program_key
from specjax.types import Array, DecodeState, Info

GIB = 2**30
DIGEST = hashlib.sha256().digest_size

READING = "reading programs"
"""Begins the names of threads that only read: a process may end without them."""


class Family(NamedTuple):
    """The programs that drive a job together: traced when they are called, or lowered for it, in the same order."""

    name: str
    traced: Any  # a NamedTuple of programs, such as `Programs`
    lowered: Callable[[Job], Iterator[Any]]


def shapes(tree: Any) -> Any:
    """Of what a lowered program gives, to lower the next one for it."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _of_stream(job: Job) -> Iterator[Any]:
    start = run.start.lower(job)
    yield start
    yield run.step.lower(job.parts, shapes(start.out_info))


def plain_step(job: Job) -> Callable[[Any], Any] | None:
    """Of the lowered `start` of a job, a step over one token of what it gives.

    None: there is none, or the text for a key would be another one, by the rule, or by rounding coarser than float32.
    """
    parts = job.parts
    if not isinstance(parts, Parts) or 1 not in parts.drafter.traits.widths or parts.drafter.num_nodes == 1:
        return None
    if parts.verifier.name not in ("greedy", "sample_and_match") or parts.keep.scored:
        return None
    if _is_coarse(parts):
        return None
    return lambda start: run.step.lower(_plain(parts), shapes(start.out_info))


def _is_coarse(parts: Parts) -> bool:
    """Whether the target computes anything in less than float32; by default, TPUs and GPUs multiply so."""
    if any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 for x in jax.tree.leaves(parts.target)):
        return True
    if getattr(parts.target.model.config, "cache_dtype", None) is not None:
        return True
    precision = jax.config.values["jax_default_matmul_precision"]
    return jax.default_backend() != "cpu" and precision not in ("float32", "highest")


def _plain(parts: Parts) -> Parts:
    return dataclasses.replace(parts, plain=True)


class _Meanwhile:
    """Plain steps until the whole ones are there."""

    def __init__(self, plain: Callable, whole: Future):
        self.plain, self.whole = plain, whole

    def __call__(self, parts: Parts, state: DecodeState) -> tuple[DecodeState, Info, Array]:
        return self.whole.result()(parts, state) if self.whole.done() else self.plain(_plain(parts), state)


STREAM = Family("stream", TRACED, _of_stream)


class Stored(NamedTuple):
    """What a file has: serialized programs."""

    programs: list[tuple]
    plain: tuple | None = None  # stands in for the last of them


class ProgramCache:
    """A folder of compiled programs, for `specjax.stream(..., programs=ProgramCache(folder))` and `specjax.serve`.

    What lies in it is run, so nobody else should be able to write there.
    """

    def __init__(self, folder: str | Path, gib: float = 2.0, plain_first: bool = False):
        """gib: how much it may hold; what was not used for longest goes.

        plain_first: `stream` begins with steps over one token, whose program is soon there, and drafts as soon as the
        wider passes are compiled, or read, too; `finish` waits for these, as the end of the process does.
        """
        self.folder, self.gib, self.plain_first = Path(folder), gib, plain_first
        self.compiling: Future | None = None  # what is still to come, if anything is
        self._reading: list[Future] = []
        self.found: bool | None = None  # whether the last programs asked for were there; None: they are not kept
        self._ready: dict[Any, tuple] = {}
        self._label: str | None = None
        self._expected: tuple[str, Future] | None = None

    def expect(self, label: str) -> None:
        """Begin to read what was asked for last after the same `label`, while the caller loads a model or so.

        SmolLM2 on two CPU cores: 3.2 s, without the interpreter's lock.
        """
        self._label = program_key.digest(label + program_key.of_files())
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = (self.folder / f"{self._label}.last").read_text(encoding="ascii")
            self._expected = name, _beside(lambda: self._read(name), READING)

    def of(self, job: Job, family: Family = STREAM) -> Any:
        """The programs of a job: kept ones, or new ones, which are kept."""
        self.found = None
        if not _is_here(job):
            return family.traced
        settings = program_key.of_settings()
        here = family.name, program_key.outline(job), settings
        if here not in self._ready:
            try:
                made_of = program_key.of_arguments(job), program_key.of_files(), program_key.of_releases(), settings
            except program_key.Unknown:
                return family.traced
            name = program_key.digest("".join((family.name, *made_of)))
            programs = self._found(name)
            self.found = programs is not None
            if programs is not None:
                self._reading += [program.whole for program in programs if isinstance(program, _Meanwhile)]
            else:
                plain = plain_step(job) if self.plain_first and family.name == STREAM.name else None
                programs = self._compiled(name, family.lowered(job), plain)
            self._ready[here] = type(family.traced)(*programs)
        else:
            self.found = True
        return self._ready[here]

    def _found(self, name: str) -> list[Callable] | None:
        """What is expected, if that is it; else read now, and expected the next time."""
        expected, self._expected = self._expected, None
        if expected and expected[0] == name:
            return expected[1].result()
        if self._label is not None:
            with contextlib.suppress(OSError):
                write_atomic(self.folder / f"{self._label}.last", name.encode())
        return self._read(name)

    def _read(self, name: str) -> list[Callable] | None:
        """Whatever is wrong with the file, it is as if there were none.

        Plain first, of SmolLM2 on two CPU cores: the first character after 5.7 s in place of 12.1 (medians of five).
        """
        with contextlib.suppress(Exception):
            path = self.folder / name
            content = path.read_bytes()
            if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
                return None
            stored: Stored = pickle.loads(content[DIGEST:])
            if self.plain_first and stored.plain is not None:
                *first, whole = stored.programs
                *programs, plain = map(_loaded, [*first, stored.plain])
                programs.append(_Meanwhile(plain, _beside(lambda: _loaded_step(whole), READING)))
            else:
                with ThreadPoolExecutor() as pool:
                    programs = list(pool.map(_loaded, stored.programs))
            os.utime(path)
            return programs
        return None

    def finish(self) -> None:
        """Wait until all is read, or compiled and written down."""
        for coming in (self.compiling, *self._reading):
            if coming is not None:
                coming.result()
        self.compiling, self._reading = None, []

    def _compiled(self, name: str, lowered: Iterator[Any], plain: Callable[[Any], Any] | None = None) -> list[Callable]:
        """Each while the next is traced, and written down where that can be done.

        plain: gives, of the lowered first one, what stands in for the second until that is compiled.
        """
        self.finish()
        if plain is None:
            with _without_xla_cache(), ThreadPoolExecutor() as pool:
                begun = [pool.submit(program.compile) for program in lowered]
                programs = [program.result() for program in begun]
            with contextlib.suppress(Exception):  # a program that cannot be written is still one
                self._write(name, Stored(list(map(_stored, programs))))
            return programs
        first = next(lowered)
        with _without_xla_cache(), ThreadPoolExecutor() as pool:
            begun = [pool.submit(first.compile), pool.submit(plain(first).compile)]
            start, step = [program.result() for program in begun]
        stored = None
        with contextlib.suppress(Exception):  # now: on CPU, XLA cannot write down a sort that has run
            stored = Stored([_stored(start)], _stored(step))

        def rest() -> Callable:
            with _without_xla_cache():
                whole = next(lowered).compile()
            with contextlib.suppress(Exception):
                if stored is not None:
                    self._write(name, Stored([*stored.programs, _stored(whole)], stored.plain))
            return whole

        self.compiling = _beside(rest)
        return [start, _Meanwhile(step, self.compiling)]

    def _write(self, name: str, stored: Stored) -> None:
        content = pickle.dumps(stored)
        write_atomic(self.folder / name, hashlib.sha256(content).digest() + content)
        room = self.gib * GIB
        for path in sorted(self.folder.iterdir(), key=lambda path: -path.stat().st_mtime):
            room -= path.stat().st_size
            if room < 0:
                path.unlink(missing_ok=True)


def _beside(work: Callable[[], Any], name: str = "") -> Future:
    """In a thread of its own, which ends with it."""
    pool = ThreadPoolExecutor(1, name)
    begun = pool.submit(work)
    pool.shutdown(wait=False)
    return begun


@contextlib.contextmanager
def _without_xla_cache() -> Iterator[None]:
    """A program that came from there can on CPU be written down, but what is written cannot be read; and one that is
    kept here need not be there too."""
    from jax.experimental.compilation_cache import compilation_cache

    name = "jax_enable_compilation_cache"
    before = jax.config.values[name]
    try:
        jax.config.update(name, False)
        compilation_cache.reset_cache()  # it asks for the setting once
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


def _stored(program: Any) -> tuple:
    from jax.experimental.serialize_executable import serialize

    payload, arguments, result = serialize(program)
    return payload, arguments.num_leaves, result


def _loaded(stored: tuple) -> Callable[..., Any]:
    """Of flat arguments, whose structure need not be known yet: `ProgramCache.of` has compared it."""
    from jax.experimental.serialize_executable import deserialize_and_load

    payload, count, result = stored
    program = deserialize_and_load(
        payload, jax.tree.structure(((0,) * count, {})), result, execution_devices=jax.devices()[:1]
    )
    return lambda *arguments: program(*jax.tree.leaves(arguments))


def _loaded_step(stored: tuple) -> Callable[..., Any]:
    """By now the text runs, so what cannot be read is compiled."""
    try:
        return _loaded(stored)
    except Exception:  # XLA's are of many classes
        return run.step


def _is_here(job: Job) -> bool:
    """Whether it is of arrays of the first device, in one process."""
    if job.parts.target.model.mesh is not None or jax.process_count() > 1:
        return False
    arrays = [leaf for leaf in jax.tree.leaves(job) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        return False
    return all(leaf.devices() == {jax.devices()[0]} for leaf in arrays)


def programs_of(job: Job, kept: ProgramCache | None, family: Family = STREAM) -> Any:
    """Those of `kept`, or without it the traced ones."""
    return family.traced if kept is None else kept.of(job, family)
