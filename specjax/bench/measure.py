"""Timed runs. Every program is compiled beforehand by a call of the same shapes, so the clocks see no compilation."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.api import decode, denoise, stream
from specjax.bench.records import Run
from specjax.diffusion import Denoiser, Procedure
from specjax.engine.job import Job
from specjax.engine.prepare import Settings, prepare
from specjax.engine.results import StreamStep
from specjax.engine.statistics import add_stats, zero_stats
from specjax.engine.step import BUCKET
from specjax.engine.value_checks import explain, first_bad_parameter
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, threefry
from specjax.persistence.program_cache import programs_of
from specjax.types import Array, Drafter, Target

Rows = Sequence[Sequence[int]]


def row_keys(seed: int, indices: Sequence[int]) -> Array:
    """One key per prompt, by its place in the input: its text does not depend on how prompts are batched."""
    return fold_in(threefry(seed), jnp.asarray(indices, jnp.int32))


def bucket(rows: Rows) -> tuple[int, int]:
    """(rows, prompt buffer): prompts with the same bucket share a program. `decode` rounds buffers further up."""
    return len(rows), -(-max(map(len, rows)) // BUCKET) * BUCKET


def pack(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as `decode` takes them: (tokens int32[B, P], lengths int32[B])."""
    tokens = np.zeros(bucket(rows), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return tokens, np.asarray([len(row) for row in rows], np.int32)


def spread(target: Target, arrays: tuple[np.ndarray, np.ndarray], keys: Array) -> tuple[tuple, Array]:
    """Packed prompts and their keys over the mesh of the target; its last rows may be copies."""
    mesh = target.model.mesh
    return (arrays, keys) if mesh is None else parallel.spread_rows(mesh, *arrays, keys)


def _cut(step: StreamStep, batch: int) -> StreamStep:
    """Without the copies."""
    accepted, info, earlier = jax.tree.map(lambda x: x[:batch], (step.accepted, step.info, step.earlier))
    return step._replace(tokens=step.tokens[:batch], accepted=accepted, info=info, earlier=earlier)


def run_decode(target: Target, drafter: Drafter, rows: Rows, keys: Array, options: dict) -> Run:
    """The loop on the device, as `decode` runs it."""
    start = time.perf_counter()
    result = jax.block_until_ready(decode(target, drafter, pack(rows), key=keys, **options))
    seconds = time.perf_counter() - start
    _check_finite(target, result.finite, options)
    hit_eos, stats = jax.device_get((result.hit_eos, result.stats))
    return Run(result.to_lists(), hit_eos, stats, seconds)


def run_denoise(denoiser: Denoiser, procedure: Procedure, rows: Rows, keys: Array, options: dict) -> Run:
    """The loop on the device, as `denoise` runs it."""
    start = time.perf_counter()
    result = jax.block_until_ready(denoise(denoiser, procedure, pack(rows), key=keys, **options))
    seconds = time.perf_counter() - start
    _check_finite(denoiser.target, result.finite, options)
    hit_eos, stats, columns = jax.device_get((result.hit_eos, result.stats, result.columns))
    return Run(result.to_lists(), hit_eos, stats, seconds, columns=columns)


def _check_finite(target: Target, finite, options: dict) -> None:
    """Raises: UsageError if there were no numbers to draw from for some prompt: its text would mean nothing."""
    if finite is None or np.all(finite):
        return
    if options.get("processors") and first_bad_parameter(target) is None:
        raise UsageError("--ban, --logit-bias and what the text must be leave no token to draw; leave one of them out")
    raise UsageError(f"--target: {explain(target)}")


def run_stream(
    target: Target,
    drafter: Drafter,
    rows: Rows,
    keys: Array,
    options: dict,
    on_step: Callable[[StreamStep], bool | None] = lambda step: None,
) -> Run:
    """The same step driven from Python, as `stream` runs it; `on_step` is called with each as soon as it is known.

    It ends before its time where that gives True.
    """
    tokens: list[list[int]] = [[] for _ in rows]
    total, resumed = zero_stats(len(rows), drafter.max_depth), 0
    infos, first, start = [], None, time.perf_counter()
    arrays, keys = spread(target, pack(rows), keys)
    for step in stream(target, drafter, arrays, key=keys, **options):
        step = _cut(step, len(rows))
        _check_finite(target, step.info.finite, options)
        if step.earlier is not None:
            total, resumed = step.earlier, sum(map(len, step.tokens))
        elif first is None:
            first = time.perf_counter() - start
        if step.earlier is None:
            infos.append(step.info)
        for row, new in zip(tokens, step.tokens, strict=True):
            row.extend(new)
        if on_step(step):
            break
    seconds = time.perf_counter() - start
    stats = jax.device_get(functools.reduce(jax.jit(add_stats), infos, total))
    return Run(tokens, stats.hit_eos, stats, seconds, first, resumed)


REPEATED = 24
"""Tokens of a prompt on which whatever drafts from the text drafts as deep as it may."""


def warm_stream(target: Target, drafter: Drafter, rows: Rows, options: dict, measured: bool = True) -> float:
    """Compile what `run_stream` runs; returns the seconds of tracing, compiling and a few steps.

    measured: whether seconds are to be compared; else kept programs (`options["programs"]`) are not run beforehand.

    The prompts are stand-ins, one token over and over in buffers of the real size. Prefill runs, and a few steps, so
    that passes of all widths do where the drafter allows it: on CPU, parts of a program are only made ready when they
    are first entered (SmolLM2: 0.4 s per width).
    """
    length = max(min(REPEATED, target.model.max_positions - options["max_new_tokens"]), 1)
    stand_ins = np.full(bucket(rows), rows[0][0], np.int32), np.full((len(rows),), length, np.int32)
    start = time.perf_counter()
    arrays, keys = spread(target, stand_ins, row_keys(0, range(len(rows))))
    programs = options.get("programs")
    if programs is not None:
        programs.of(_job(target, drafter, arrays, keys, options))
        if not measured:
            return time.perf_counter() - start
        programs.finish()
    steps = stream(target, drafter, arrays, key=keys, **options)
    for _ in itertools.islice(steps, 2):
        pass
    steps.close()
    if target.model.mesh is None:
        _enter_widths(target, drafter, arrays, keys, options)
    return time.perf_counter() - start


def _enter_widths(target: Target, drafter: Drafter, prompts, keys: Array, options: dict) -> None:
    """Steps from the same text, with room for more and more tokens, and so for wider and wider drafts."""
    job = _job(target, drafter, prompts, keys, options)
    programs = programs_of(job, options.get("programs"))
    for width in (*drafter.traits.widths, drafter.num_nodes):
        state = programs.start(job)
        jax.block_until_ready(programs.step(job.parts, state._replace(stop=state.length + width)))


def _job(target: Target, drafter: Drafter, prompts, keys: Array, options: dict) -> Job:
    settings = Settings(**{name: options[name] for name in options if name not in ("max_new_tokens", "programs")})
    return prepare(target, drafter, prompts, settings, key=keys, max_new_tokens=options["max_new_tokens"])
