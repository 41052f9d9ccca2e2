"""Compiled programs kept whole: a process that decodes as an earlier one did neither traces nor compiles.

XLA's own cache is asked with a program that is traced and lowered already, which for SmolLM2 takes longer than to read
it. This one is asked with what a job is made of (`specjax.identity`): the structure, static parts and shapes of its
arguments, the files of specjax, the releases below it, the processor, the devices and the settings of JAX. Of what
cannot be said to be the same nothing is kept, and it is compiled as ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax import identity
from specjax.engine import run
from specjax.engine.parts import Job, Looped
from specjax.folders import write_whole
from specjax.types import Array, DecodeState, Info

GIB = 2**30
DIGEST = hashlib.sha256().digest_size


class Programs(NamedTuple):
    """What drives a job from Python."""

    start: Callable[[Job], DecodeState]
    step: Callable[[Looped, DecodeState], tuple[DecodeState, Info, Array]]


TRACED = Programs(run.start, run.step)


class Kept:
    """A folder of compiled programs, for `specjax.stream(..., programs=Kept(folder))`.

    What lies in it is run, so nobody else should be able to write there.
    """

    def __init__(self, folder: str | Path, gib: float = 2.0):
        """gib: how much it may hold; what was not used for longest goes."""
        self.folder, self.gib = Path(folder), gib
        self.found: bool | None = None  # whether the last programs asked for were there; None: they are not kept
        self._ready: dict[Any, Programs] = {}
        self._label: str | None = None
        self._expected: tuple[str, Future] | None = None

    def expect(self, label: str) -> None:
        """Begin to read what was asked for last after the same `label`, while the caller loads a model or so.

        SmolLM2 on two CPU cores: 3.2 s, without the interpreter's lock.
        """
        self._label = identity.digest(label + identity.of_files())
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = (self.folder / f"{self._label}.last").read_text(encoding="ascii")
            pool = ThreadPoolExecutor(1)
            self._expected = name, pool.submit(self._read, name)
            pool.shutdown(wait=False)

    def of(self, job: Job) -> Programs:
        """The programs of a job: kept ones, or new ones, which are kept."""
        self.found = None
        if not _is_here(job):
            return TRACED
        settings = identity.of_settings()
        here = identity.outline(job), settings
        if here in self._ready:
            self.found = True
            return self._ready[here]
        try:
            made_of = identity.of_arguments(job), identity.of_files(), identity.of_releases(), settings
        except identity.Unknown:
            return TRACED
        name = identity.digest("".join(made_of))
        programs = self._found(name)
        self.found = programs is not None
        self._ready[here] = programs = programs or self._compiled(name, job)
        return programs

    def _found(self, name: str) -> Programs | None:
        """What is expected, if that is it; else read now, and expected the next time."""
        expected, self._expected = self._expected, None
        if expected and expected[0] == name:
            return expected[1].result()
        if self._label is not None:
            with contextlib.suppress(OSError):
                write_whole(self.folder / f"{self._label}.last", name.encode())
        return self._read(name)

    def _read(self, name: str) -> Programs | None:
        """Whatever is wrong with the file, it is as if there were none."""
        with contextlib.suppress(Exception):
            path = self.folder / name
            content = path.read_bytes()
            if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
                return None
            with ThreadPoolExecutor() as pool:
                programs = Programs(*pool.map(_loaded, pickle.loads(content[DIGEST:])))
            os.utime(path)
            return programs
        return None

    def _compiled(self, name: str, job: Job) -> Programs:
        """Both at once, and written down where that can be done."""
        lowered = run.start.lower(job)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)
        with ThreadPoolExecutor() as pool:
            begun = pool.submit(lowered.compile)
            step = run.step.lower(job.parts, state).compile()
            start = begun.result()
        with contextlib.suppress(Exception):  # a program that cannot be written is still one
            self._write(name, [_stored(start), _stored(step)])
        return Programs(start, step)

    def _write(self, name: str, programs: list[tuple]) -> None:
        content = pickle.dumps(programs)
        write_whole(self.folder / name, hashlib.sha256(content).digest() + content)
        room = self.gib * GIB
        for path in sorted(self.folder.iterdir(), key=lambda path: -path.stat().st_mtime):
            room -= path.stat().st_size
            if room < 0:
                path.unlink(missing_ok=True)


def _stored(program: Any) -> tuple:
    from jax.experimental.serialize_executable import serialize

    payload, arguments, result = serialize(program)
    return payload, arguments.num_leaves, result


def _loaded(stored: tuple) -> Callable[..., Any]:
    """Of flat arguments, whose structure need not be known yet: `Kept.of` has compared it."""
    from jax.experimental.serialize_executable import deserialize_and_load

    payload, count, result = stored
    program = deserialize_and_load(
        payload, jax.tree.structure(((0,) * count, {})), result, execution_devices=jax.devices()[:1]
    )
    return lambda *arguments: program(*jax.tree.leaves(arguments))


def _is_here(job: Job) -> bool:
    """Whether it is of arrays of the first device, in one process."""
    if job.parts.target.model.mesh is not None or jax.process_count() > 1:
        return False
    arrays = [leaf for leaf in jax.tree.leaves(job) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        return False
    return all(leaf.devices() == {jax.devices()[0]} for leaf in arrays)


def programs_of(job: Job, kept: Kept | None) -> Programs:
    """Those of `kept`, or without it the traced ones."""
    return TRACED if kept is None else kept.of(job)
