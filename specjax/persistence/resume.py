"""Checkpoints of a streamed run, so that it can continue after a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from specjax.engine.job import Job
from specjax.engine.results import add_stats, zero_stats
from specjax.numerics.global_arrays import gather, place_one
from specjax.persistence import fingerprint
from specjax.persistence.checkpoint import Checkpoints
from specjax.persistence.running import Running
from specjax.types import DecodeState, Info, Stats


class RunCheckpoint:
    """State and statistics of a run, saved at regular intervals. The class implements `specjax.engine.stream.Recorder`.

    The digests of `fingerprint_of` for the argument `job` identify the run.
    """

    def __init__(self, checkpoint: Checkpoints, job: Job):
        self.prompt_lengths = job.starts
        self.stats = zero_stats(len(job.keys), job.parts.drafter.max_depth, job.parts.keep.violations)
        self.steps, self.every = 0, checkpoint.every
        self.running = Running(checkpoint, fingerprint_of(job))

    def resume(self, state: DecodeState) -> tuple[DecodeState, Info | None, Stats | None]:
        """Return the state from which to continue.

        If the folder has an earlier run, its text, in the form of one step, and its statistics are returned too.

        Args:
          state: the state at the start of a new run.
        """
        # The statistics get the sharding that a step gives them.
        self.stats = jax.tree.map(lambda x: place_one(x, state.length.sharding), self.stats)
        saved = self.running.resume(state, self.stats)
        if saved is None:
            return state, None, None
        self.steps, state, self.stats = saved
        tokens, length, prompt_length, stats, finite = gather(
            (state.tokens, state.length, self.prompt_lengths, self.stats, state.finite)
        )
        count = length - prompt_length
        place = prompt_length[:, None] + np.arange(max(count.max(), 1))
        new: Any = np.take_along_axis(tokens, np.minimum(place, tokens.shape[1] - 1), 1)
        zero = np.zeros_like(length)
        return state, Info(new, count, zero, zero, zero, zero.astype(bool), stats.hit_eos, finite=finite), stats

    def add(self, state: DecodeState, info: Info) -> None:
        """Add one step, before the next step reuses the arrays of `state`."""
        self.stats = _add_stats(self.stats, info)
        self.steps += 1
        if self.steps % self.every == 0:
            self.running.save(self.steps, state, self.stats, is_last=False)

    def finish(self, state: DecodeState) -> None:
        """Save the end of the run."""
        if self.steps % self.every:
            self.running.save(self.steps, state, self.stats, is_last=True)

    def closing(self, steps: Generator) -> Generator:
        """Yield the steps. When they end or the caller closes the generator, wait until all checkpoints are written.

        After an error on several hosts it does not wait, because the other hosts may be dead.
        """
        wait = True
        try:
            yield from steps
        except GeneratorExit:
            raise
        except BaseException:
            wait = jax.process_count() == 1
            raise
        finally:
            if wait:
                self.running.close()


_add_stats = jax.jit(add_stats)


def fingerprint_of(job: Job) -> dict[str, str]:
    """Return digests of everything that determines the texts of a job, by the names that error messages use.

    On several hosts, every host must call this function.
    """
    parts = job.parts
    tokens, lengths, stop = gather((job.tokens, job.lengths, job.stop))
    eos = np.asarray(gather(parts.eos))
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    settings = [
        parts.verifier,
        parts.controller,
        parts.coupled,
        parts.keep,
        stop - gather(job.starts),
        (gather(parts.sampling), eos[eos >= 0]),  # the ids without the padding
    ]
    if parts.processors:
        settings += [parts.processors, _contents(parts.processors)]
    drafter = dataclasses.replace(parts.drafter, params=())
    return {
        "prompts": fingerprint.digest(tokens.tobytes() + lengths.tobytes() + repr(tokens.shape).encode()),
        "inputs": fingerprint.digest(_contents(job.inputs)),
        "random keys": fingerprint.digest(np.asarray(gather(jax.random.key_data(job.keys))).tobytes()),
        "settings": fingerprint.digest(fingerprint.describe(settings)),
        "target": fingerprint.digest_model(parts.target),
        "drafter": fingerprint.digest(
            (fingerprint.describe(drafter), fingerprint.digest_samples(parts.drafter.params))
        ),
    }


def _contents(inputs: Any) -> list:
    """Return the path, shape, dtype and bytes of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(gather(inputs))
    return [(jax.tree_util.keystr(path), x.shape, str(x.dtype), np.asarray(x).tobytes()) for path, x in leaves]
