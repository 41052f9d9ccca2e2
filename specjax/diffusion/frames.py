"""The canvases of a denoising job after every pass, for programs that display them."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import jax
import numpy as np

from specjax.diffusion.loop import DenoisingState
from specjax.engine.job import Job
from specjax.engine.run import start, step
from specjax.types import DecodeState


class Frame(NamedTuple):
    """State of all rows after a pass, as NumPy arrays."""

    tokens: np.ndarray  # int32[B, N]
    open: np.ndarray  # bool[B, N]
    decided_at: np.ndarray  # int32[B, N], index of the pass that decided a column; -1: none yet, -2: the prompt
    start: np.ndarray  # int32[B], first column after the prompt
    stop: np.ndarray  # int32[B], maximum number of columns of the text
    length: np.ndarray  # int32[B], number of final columns
    passes: np.ndarray  # int32[B], passes of the model so far
    columns: np.ndarray  # int32[B], columns of the row's canvas in all passes so far
    computed: np.ndarray  # int32[B], columns that the program computed for the row so far
    hit_eos: np.ndarray  # bool[B]
    done: np.ndarray  # bool[B]
    finite: np.ndarray  # bool[B]

    def final(self, row: int) -> list[int]:
        """Return the new tokens of a row that are final."""
        return self.tokens[row, self.start[row] : self.length[row]].tolist()

    def order(self, row: int) -> list[int]:
        """Return the pass that decided each final token."""
        return self.decided_at[row, self.start[row] : self.length[row]].tolist()


def frames(job: Job) -> Generator[Frame, None, None]:
    """Yield a frame after each pass of a denoising job, until all rows have ended."""
    state, ended, finished = start(job), np.zeros(len(job.lengths), bool), False
    while not finished:
        state, info, is_over = step(job.parts, state)
        frame, hit, finished = jax.device_get((_read_state(state), info.hit_eos, is_over))
        ended = ended | hit
        yield Frame(**frame, hit_eos=ended)


def _read_state(state: DecodeState) -> dict:
    denoising: DenoisingState = state.draft
    return {
        "tokens": state.tokens, "open": denoising.open, "decided_at": denoising.decided_at, "start": denoising.start,
        "stop": state.stop,
        "length": state.length, "passes": denoising.passes, "columns": denoising.columns,
        "computed": denoising.computed, "done": state.done, "finite": state.finite,
    }  # fmt: skip
