"""The schedule of a training run: all batches in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.training.data.packing import (
    PackedBatch,
    TrainingText,
    choose_round_starts,
    find_round_starts,
    number_tokens,
    pack,
)
from specjax.types import Array


class ScheduledBatch(NamedTuple):
    """The inputs of one step."""

    epoch: int
    packed: PackedBatch
    positions: np.ndarray  # int32[B, R], where rounds begin; -1: no round
    token_numbers: Array  # int32[B, T], index of each token among those of all texts; 0: padding


class TrainingSchedule(NamedTuple):
    """All batches of a run."""

    epochs: list[list[PackedBatch]]  # batches by epoch
    starts_per_row: int  # R
    token_numbers: list[list[PackedBatch]]  # the same batches, packed from `number_tokens`

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return sum(map(len, self.epochs))

    def iterate_from(self, step: int, seed: int) -> Iterator[ScheduledBatch]:
        """Yield the batches of all steps from index `step` on."""
        index = 0
        for epoch, (batches, numbers) in enumerate(zip(self.epochs, self.token_numbers, strict=True)):
            for i, (packed, number) in enumerate(zip(batches, numbers, strict=True)):
                if index >= step:
                    rng = np.random.default_rng([seed, epoch, i])
                    positions = choose_round_starts(packed, self.starts_per_row, rng)
                    yield ScheduledBatch(epoch, packed, positions, number.tokens)
                index += 1


class ScheduleOptions(NamedTuple):
    """Options of `make_schedule`."""

    epochs: int
    rows: int
    length: int
    seed: int
    starts_per_row: int | None = None  # limit of rounds per row; None: all positions
    packs: bool = True  # several texts per row
    multiple: int = 1  # the number of rounds per row is rounded up to a multiple of this
    resamples: bool = False  # batches may be given new responses, with more positions than the texts have


def make_schedule(texts: Sequence[TrainingText], options: ScheduleOptions) -> TrainingSchedule:
    """Pack all texts once per epoch, in a new random order each time.

    Raises: UsageError if no text has a response within the row length.
    """
    batches: list[list[PackedBatch]] = []
    token_numbers: list[list[PackedBatch]] = []
    numbered = number_tokens(texts)
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, epoch]).permutation(len(texts))
        for source, packed in ((texts, batches), (numbered, token_numbers)):
            shuffled = [source[i] for i in order]
            packed.append(pack(shuffled, options.rows, options.length, one_per_row=not options.packs))
    counts = (find_round_starts(packed).sum(1).max() for epoch in batches for packed in epoch)
    starts = int(max(counts, default=0))
    if not starts:
        raise UsageError(
            f"no text has a response within {options.length} tokens to train on; give longer rows or other prompts"
        )
    if options.resamples:
        starts = options.length
    if options.starts_per_row is not None:
        starts = min(options.starts_per_row, starts)
    return TrainingSchedule(batches, -(-starts // options.multiple) * options.multiple, token_numbers)
