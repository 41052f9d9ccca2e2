"""The schedule of a training run: all batches in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.training.data.packing import (
    PackedBatch,
    TrainingText,
    check_shapes,
    choose_round_starts,
    find_round_starts,
    number_tokens,
    pack,
    stack_inputs,
)
from specjax.types import Array, PyTree


class ScheduledBatch(NamedTuple):
    """The inputs of one step."""

    epoch: int
    packed: PackedBatch
    positions: np.ndarray  # int32[B, R], where rounds begin; -1: no round
    token_numbers: Array  # int32[B, T], index of each token among those of all texts; 0: padding


class TrainingSchedule(NamedTuple):
    """All batches of a run."""

    epochs: list[list[PackedBatch]]  # batches by epoch; their inputs int32[B] are indices into `inputs`
    starts_per_row: int  # R
    token_numbers: list[list[PackedBatch]]  # the same batches, packed from `number_tokens`
    inputs: Sequence[PyTree] = ()  # of each text

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
                    yield ScheduledBatch(epoch, self._with_inputs(packed), positions, number.tokens)
                index += 1

    def _with_inputs(self, packed: PackedBatch) -> PackedBatch:
        """Return a batch with the inputs of its texts in place of their indices."""
        if packed.inputs is None:
            return packed
        return packed._replace(inputs=stack_inputs([self.inputs[i] for i in np.asarray(packed.inputs)]))


class ScheduleOptions(NamedTuple):
    """Options of `make_schedule`."""

    epochs: int
    rows: int
    length: int
    seed: int
    starts_per_row: int | None = None  # limit of rounds per row; None: all positions
    packs: bool = True  # several texts per row
    multiple: int = 1  # the number of rounds per row is rounded up to a multiple of this
    rising: int | None = None  # placeholder of images, whose texts are drawn more and more often; None: texts are alike
    resamples: bool = False  # batches may be given new responses, with more positions than the texts have


def make_schedule(texts: Sequence[TrainingText], options: ScheduleOptions) -> TrainingSchedule:
    """Pack all texts once per epoch, in a new random order each time.

    Raises: UsageError if no text has a response within the row length, or if the inputs of texts differ in shape.
    """
    batches: list[list[PackedBatch]] = []
    token_numbers: list[list[PackedBatch]] = []
    # A batch holds the indices of its inputs, because every epoch would hold a copy of all images.
    inputs = [text.inputs for text in texts]
    check_shapes([of_text for of_text in inputs if of_text is not None])
    indexed = [
        text if text.inputs is None else text._replace(inputs=np.array([i], np.int32)) for i, text in enumerate(texts)
    ]
    numbered = number_tokens(indexed)
    for epoch in range(options.epochs):
        rng = np.random.default_rng([options.seed, epoch])
        order = rng.permutation(len(texts))
        if options.rising is not None:
            has_image = np.array([options.rising in text.tokens for text in texts], bool)
            order = draw_rising(rng, order, has_image, epoch / options.epochs, (epoch + 1) / options.epochs)
        for source, packed in ((indexed, batches), (numbered, token_numbers)):
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
    return TrainingSchedule(batches, -(-starts // options.multiple) * options.multiple, token_numbers, inputs)


def image_share(progress: float) -> float:
    """Return the probability that MSD's training draws a text with an image, for the finished share of the run."""
    return max(0.0, 2 * progress - 1)


def draw_rising(
    rng: np.random.Generator, order: np.ndarray, has_image: np.ndarray, begin: float, end: float
) -> np.ndarray:
    """Return as many texts as `order` int[n] has, with images more often towards the end (MSD, arXiv 2505.14260).

    Texts of one kind are taken in this order, and again from its beginning. Texts of only one kind stay as they are.

    Args: has_image: bool[n], of each text. begin, end: finished shares of the run before and after these texts.
    """
    kinds = order[~has_image[order]], order[has_image[order]]
    if not all(map(len, kinds)):
        return order
    progress = begin + (end - begin) * np.arange(len(order)) / len(order)
    draws = rng.random(len(order)) < [image_share(share) for share in progress]
    place = np.where(draws, np.cumsum(draws), np.cumsum(~draws)) - 1
    return np.array([kinds[int(kind)][i % len(kinds[int(kind)])] for kind, i in zip(draws, place, strict=True)])
