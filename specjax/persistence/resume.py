"""What `stream` writes down of its run, and reads when it is started again."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from specjax.engine.job import Job
from specjax.engine.statistics import add_stats, zero_stats
from specjax.numerics.global_arrays import gather, place_one
from specjax.persistence import fingerprint
from specjax.persistence.checkpoint import Checkpoints, Running
from specjax.types import DecodeState, Info, Stats


class RunCheckpoint:
    """The state of a run and the sums of its steps, written every so many steps.

    job: by which the run is known again.
    """

    def __init__(self, checkpoint: Checkpoints, job: Job):
        self.prompt_lengths = job.starts
        self.stats = zero_stats(len(job.keys), job.parts.drafter.max_depth, job.parts.keep.violations)
        self.steps, self.every = 0, checkpoint.every
        self.running = Running(checkpoint, fingerprint_of(job))

    def resume(self, state: DecodeState) -> tuple[DecodeState, Info | None, Stats | None]:
        """The state to go on from and, if it is an earlier run's, its text, as if one step had added it, and its sums.

        state: of a run that begins.
        """
        # Where the sums after a step lie.
        self.stats = jax.tree.map(lambda x: place_one(x, state.length.sharding), self.stats)
        found = self.running.resume(state, self.stats)
        if found is None:
            return state, None, None
        self.steps, state, self.stats = found
        tokens, length, before, stats = gather((state.tokens, state.length, self.prompt_lengths, self.stats))
        count = length - before
        place = before[:, None] + np.arange(max(count.max(), 1))
        new: Any = np.take_along_axis(tokens, np.minimum(place, tokens.shape[1] - 1), 1)
        none = np.zeros_like(length)
        return state, Info(new, count, none, none, none, none.astype(bool), stats.hit_eos), stats

    def add(self, state: DecodeState, info: Info) -> None:
        """After a step, and before the next one takes the state's place."""
        self.stats = _add_stats(self.stats, info)
        self.steps += 1
        if self.steps % self.every == 0:
            self.running.save(self.steps, state, self.stats, over=False)

    def finish(self, state: DecodeState) -> None:
        """After the last step."""
        if self.steps % self.every:
            self.running.save(self.steps, state, self.stats, over=True)

    def closing(self, steps: Generator) -> Generator:
        """The steps; at their end, or when the caller leaves, what is being written is finished.

        After an error on several hosts it is not waited for: the others may be dead.
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
    """Digests of what decides the texts of a job, under the names that a message may use.

    On several hosts every host must call it.
    """
    parts = job.parts
    tokens, lengths, stop = gather((job.tokens, job.lengths, job.stop))
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    settings = [
        parts.verifier,
        parts.controller,
        parts.coupled,
        parts.keep,
        stop - gather(job.starts),
        gather((parts.sampling, parts.eos)),
    ]
    if parts.processors:
        settings += [parts.processors, _contents(parts.processors)]
    drafter = dataclasses.replace(parts.drafter, params=())
    return {
        "prompts": fingerprint.digest(tokens.tobytes() + lengths.tobytes() + repr(tokens.shape).encode()),
        "inputs": fingerprint.digest(_contents(job.inputs)),
        "random keys": fingerprint.digest(np.asarray(gather(jax.random.key_data(job.keys))).tobytes()),
        "settings": fingerprint.digest(fingerprint.describe(settings)),
        "target": fingerprint.of_model(parts.target),
        "drafter": fingerprint.digest((fingerprint.describe(drafter), fingerprint.samples(parts.drafter.params))),
    }


def _contents(inputs: Any) -> list:
    """All of every array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(gather(inputs))
    return [(jax.tree_util.keystr(path), x.shape, str(x.dtype), np.asarray(x).tobytes()) for path, x in leaves]
