"""The canvases of a job while they fill up, driven from Python: for what shows them."""

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
    """Of all rows, after a pass; numpy."""

    tokens: np.ndarray  # int32[B, N]
    open: np.ndarray  # bool[B, N]
    decided_at: np.ndarray  # int32[B, N], the pass that decided a column; -1: none yet, -2: the prompt
    start: np.ndarray  # int32[B], first column behind the prompt
    stop: np.ndarray  # int32[B], columns of the text
    length: np.ndarray  # int32[B], columns that are final
    passes: np.ndarray  # int32[B], of the model
    columns: np.ndarray  # int32[B], computed so far
    hit_eos: np.ndarray  # bool[B]
    done: np.ndarray  # bool[B]
    finite: np.ndarray  # bool[B]

    def final(self, row: int) -> list[int]:
        """The new tokens of a row that will not change any more."""
        return self.tokens[row, self.start[row] : self.length[row]].tolist()

    def order(self, row: int) -> list[int]:
        """The pass that decided each of them."""
        return self.decided_at[row, self.start[row] : self.length[row]].tolist()


def frames(job: Job) -> Generator[Frame, None, None]:
    """After each pass of a denoising job, until all rows have ended."""
    state, ended, over = start(job), np.zeros(len(job.lengths), bool), False
    while not over:
        state, info, is_over = step(job.parts, state)
        seen, hit, over = jax.device_get((_seen(state), info.hit_eos, is_over))
        ended = ended | hit
        yield Frame(**seen, hit_eos=ended)


def _seen(state: DecodeState) -> dict:
    own: DenoisingState = state.draft
    return {
        "tokens": state.tokens, "open": own.open, "decided_at": own.decided_at, "start": own.start, "stop": state.stop,
        "length": state.length, "passes": own.passes, "columns": own.columns, "done": state.done,
        "finite": state.finite,
    }  # fmt: skip
