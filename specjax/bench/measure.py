"""Timed runs. A call with the same shapes compiles every program beforehand, so the clocks exclude compilation."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.api import job_of, stream_job
from specjax.bench.compilation import Stopwatch
from specjax.bench.records import MeasuredRun
from specjax.diffusion import Denoiser, Procedure
from specjax.engine.job import Job
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult, StreamStep, add_stats, zero_stats
from specjax.engine.run import run
from specjax.engine.step import BUCKET
from specjax.engine.value_checks import explain_failure, find_bad_parameter
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, threefry
from specjax.persistence.checkpoint import Checkpoints
from specjax.persistence.program_cache import ProgramCache, programs_of
from specjax.types import Array, Drafter, PyTree, Target

Rows = Sequence[Sequence[int]]


class DecodeTask(NamedTuple):
    """A batch of prompts, and how it is decoded."""

    target: Target | Denoiser
    drafter: Drafter | Procedure
    rows: Rows
    keys: Array  # key[B]
    settings: Settings
    max_new_tokens: int
    inputs: PyTree = None  # of a model that reads more than tokens, one entry per prompt

    def job(self) -> Job:
        """Check the settings and lay out the prompts, over the mesh of the target if it has one."""
        return self.job_of(pack(self.rows), self.keys)

    def job_of(self, prompts: tuple[np.ndarray, np.ndarray], keys: Array) -> Job:
        """Lay out other prompts of the same shape."""
        mesh = self.target.model.mesh
        arrays, keys = (prompts, keys) if mesh is None else parallel.spread_rows(mesh, *prompts, keys)
        inputs = self.inputs if mesh is None else parallel.spread_inputs(mesh, self.inputs)
        return job_of(
            self.target, self.drafter, arrays, self.settings, key=keys, max_new_tokens=self.max_new_tokens,
            inputs=inputs,
        )  # fmt: skip


def row_keys(seed: int, indices: Sequence[int]) -> Array:
    """Return one key per prompt from its position in the input, so its text does not depend on the batches."""
    return fold_in(threefry(seed), jnp.asarray(indices, jnp.int32))


def bucket(rows: Rows) -> tuple[int, int]:
    """Return (rows, size of the prompt buffer). Prompts of one bucket share a program; `decode` rounds further up."""
    return len(rows), -(-max(map(len, rows)) // BUCKET) * BUCKET


def pack(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts in the form that `decode` accepts: (tokens int32[B, P], lengths int32[B])."""
    tokens = np.zeros(bucket(rows), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, np.asarray([len(row) for row in rows], np.int32)


def run_decode(task: DecodeTask) -> MeasuredRun:
    """Time the loop on the device, which `decode` and `denoise` run."""
    start = time.perf_counter()
    result = jax.block_until_ready(run(task.job()).cut(task.max_new_tokens))
    seconds = time.perf_counter() - start
    _check_finite(task, result.finite)
    counts = getattr(result, "columns", None), getattr(result, "computed", None)
    hit_eos, stats, (columns, computed) = jax.device_get((result.hit_eos, result.stats, counts))
    return MeasuredRun(result.to_lists(), hit_eos, stats, seconds, columns=columns, computed=computed)


def run_loop(loop: Callable[..., DecodeResult], rows: Rows, keys: Array, max_new_tokens: int) -> MeasuredRun:
    """Time a loop of its own, a function `(prompts, *, key, max_new_tokens) -> DecodeResult`, without compilation."""
    return run_call(lambda: loop(pack(rows), key=keys, max_new_tokens=max_new_tokens))[0]


def run_call(call: Callable[[], Any]) -> tuple[MeasuredRun, Any]:
    """Time a call of a loop of its own, without compilation. Return the run, and the result of the call."""
    with Stopwatch() as watch:
        result = jax.block_until_ready(call())
    hit_eos, stats = jax.device_get((result.hit_eos, result.stats))
    run = MeasuredRun(result.to_lists(), hit_eos, stats, watch.seconds, compile_seconds=watch.compile_seconds)
    return run, result


def run_stream(
    task: DecodeTask,
    on_step: Callable[[StreamStep], bool | None] = lambda step: None,
    *,
    checkpoint: Checkpoints | None = None,
    programs: ProgramCache | None = None,
) -> MeasuredRun:
    """Time the steps that `stream` runs from Python. `on_step` is called with each step, and True ends the run."""
    assert isinstance(task.drafter, Drafter)
    count = len(task.rows)
    tokens: list[list[int]] = [[] for _ in task.rows]
    total, resumed = zero_stats(count, task.drafter.max_depth), 0
    infos, first, start = [], None, time.perf_counter()
    for step in stream_job(task.job(), checkpoint, programs):
        step = _remove_copies(step, count)
        _check_finite(task, step.info.finite)
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
    return MeasuredRun(tokens, stats.hit_eos, stats, seconds, first, resumed)


REPEATED = 24
"""Length of a prompt of one repeated token, on which drafters that copy the text draft as deep as they can."""


def warm_stream(task: DecodeTask, programs: ProgramCache | None = None, *, measured: bool = True) -> float:
    """Compile the programs of `run_stream`; return the seconds of tracing, compiling and a few steps.

    The prompts consist of one repeated token, in buffers of the real size. Inputs such as images keep their prompts.
    Prefill and a few steps run, so that passes of all widths run if the drafter allows it: on a CPU, parts of a program
    are prepared when they first run (SmolLM2: 0.4 s per width).

    Args:
      programs: compiled programs of earlier processes. measured: False if no times are compared; then programs from
        `programs` are not run beforehand.
    """
    length = max(min(REPEATED, task.target.model.max_positions - task.max_new_tokens), 1)
    count = len(task.rows)
    prompts = np.full(bucket(task.rows), task.rows[0][0], np.int32), np.full((count,), length, np.int32)
    if task.inputs is not None and task.target.model.check_inputs is not None:
        prompts = pack(task.rows)
    start = time.perf_counter()
    job = task.job_of(prompts, row_keys(0, range(count)))
    if programs is not None:
        programs.programs(job)
        if not measured:
            return time.perf_counter() - start
        programs.finish()
    steps = stream_job(job, None, programs)
    for _ in itertools.islice(steps, 2):
        pass
    steps.close()
    if task.target.model.mesh is None:
        _run_widths(job, programs)
    return time.perf_counter() - start


def _run_widths(job: Job, programs: ProgramCache | None) -> None:
    """Run steps with room for more and more tokens, so that each width of the target pass runs once."""
    compiled, drafter = programs_of(job, programs), job.parts.drafter
    for width in drafter.pass_widths(len(job.starts), job.parts.target):
        state = compiled.start(job)
        jax.block_until_ready(compiled.step(job.parts, state._replace(stop=state.length + width)))


def _remove_copies(step: StreamStep, batch: int) -> StreamStep:
    """Remove the rows that a mesh adds to fill its devices."""
    accepted, info, earlier = jax.tree.map(lambda x: x[:batch], (step.accepted, step.info, step.earlier))
    return step._replace(tokens=step.tokens[:batch], accepted=accepted, info=info, earlier=earlier)


def _check_finite(task: DecodeTask, finite: Array | None) -> None:
    """Raise a UsageError if a prompt has logits without finite values, because its text would be meaningless."""
    if finite is None or np.all(finite):
        return
    target = task.target.target if isinstance(task.target, Denoiser) else task.target
    if task.settings.processors and find_bad_parameter(target) is None:
        raise UsageError(
            "no token can be sampled: --ban, --bad-word, --logit-bias and the constraint exclude all; remove one"
        )
    raise UsageError(f"--target: {explain_failure(target)}")
