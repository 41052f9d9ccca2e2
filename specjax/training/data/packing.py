"""Training texts, and batches of a fixed shape that hold several texts per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, PyTree

PAIR_TOKENS = 2
"""Tokens before the first draft of a round. A round reads the pair (x_t, x_{t+1}) and drafts x_{t+2} first, so a text
of two tokens trains nothing."""


class TrainingText(NamedTuple):
    """A prompt and the response of the target, or several turns of both."""

    tokens: tuple[int, ...]
    prompt_length: int  # number of tokens of the first prompt; the response follows them
    asides: tuple[tuple[int, int], ...] = ()  # begin and end of the prompts of later turns
    inputs: PyTree = None  # inputs of the target in addition to tokens (`Model.init_cache`), arrays [1, ...]

    @property
    def responses(self) -> list[tuple[int, int]]:
        """Return begin and end of each response."""
        begins = [self.prompt_length, *(end for _, end in self.asides)]
        return list(zip(begins, [*(begin for begin, _ in self.asides), len(self.tokens)], strict=True))

    @property
    def response_length(self) -> int:
        """Return the number of response tokens."""
        return sum(end - begin for begin, end in self.responses)

    @property
    def response_tokens(self) -> list[int]:
        """Return the tokens of all responses."""
        return [token for begin, end in self.responses for token in self.tokens[begin:end]]

    def cut(self, length: int) -> TrainingText:
        """Return the first `length` tokens."""
        asides = tuple((begin, min(end, length)) for begin, end in self.asides if begin < length)
        return TrainingText(self.tokens[:length], min(self.prompt_length, length), asides, self.inputs)


class PackedBatch(NamedTuple):
    """A batch of rows that hold several texts in sequence."""

    tokens: Array  # int32[B, T]
    text_start: Array  # int32[B, T], column where the text of each token begins; padding counts as a separate text
    loss_mask: Array  # bool[B, T], True for tokens of responses
    inputs: PyTree = None  # inputs of the target in addition to tokens; each row then has one text


def pack(texts: Iterable[TrainingText], rows: int, length: int, one_per_row: bool = False) -> list[PackedBatch]:
    """Pack texts into batches of shape [rows, length], in order, each into the first row with enough room.

    Texts longer than a row are cut. The last batch may have empty rows. No text is split over two rows.

    Args: one_per_row: put only one text into each row. Texts with inputs have a row of their own anyway.

    Raises: UsageError for a batch in which some texts have inputs and others have none, or inputs of another shape.
    """
    batches, open_rows = [], [_PackedRow(length) for _ in range(rows)]
    for text in texts:
        text = text.cut(length)
        row = next((row for row in open_rows if row.fits(text, one_per_row)), None)
        if row is None:
            batches.append(_stack_rows(open_rows))
            open_rows = [_PackedRow(length) for _ in range(rows)]
            row = open_rows[0]
        row.add(text)
    if any(row.used for row in open_rows):
        batches.append(_stack_rows(open_rows))
    return batches


def number_tokens(texts: Sequence[TrainingText]) -> list[TrainingText]:
    """Replace each token by its index among the tokens of all texts, counted from 1.

    If these numbers are packed like the texts, they locate every token of a batch. 0 is padding.
    """
    begin = np.cumsum([1, *(len(text.tokens) for text in texts)]).tolist()
    return [
        text._replace(tokens=tuple(range(at, at + len(text.tokens)))) for at, text in zip(begin, texts, strict=False)
    ]


class _PackedRow:
    """A row of a batch that texts are added to."""

    def __init__(self, length: int):
        self.tokens, self.text_start = np.zeros(length, np.int32), np.zeros(length, np.int32)
        self.loss_mask = np.zeros(length, bool)
        self.inputs: PyTree = None
        self.used = 0

    def fits(self, text: TrainingText, one_per_row: bool) -> bool:
        is_alone = one_per_row or text.inputs is not None or self.inputs is not None
        return not self.used if is_alone else self.used + len(text.tokens) <= len(self.tokens)

    def add(self, text: TrainingText) -> None:
        columns = slice(self.used, self.used + len(text.tokens))
        self.tokens[columns] = text.tokens
        self.text_start[columns.start :] = columns.start
        for begin, end in text.responses:
            self.loss_mask[columns.start + begin : columns.start + end] = True
        self.used, self.inputs = columns.stop, text.inputs
        self.text_start[columns.stop :] = columns.stop


def _stack_rows(rows: Sequence[_PackedRow]) -> PackedBatch:
    stack = lambda name: jnp.asarray(np.stack([getattr(row, name) for row in rows]))
    of_texts = [row.inputs for row in rows if row.used]
    if any(inputs is None for inputs in of_texts) and any(inputs is not None for inputs in of_texts):
        raise UsageError(
            "some training texts have inputs and others have none; give all of them inputs, also those without images"
        )
    inputs = stack_inputs([row.inputs for row in rows])
    return PackedBatch(stack("tokens"), stack("text_start"), stack("loss_mask"), inputs)


def stack_inputs(by_row: Sequence[PyTree]) -> PyTree:
    """Return the inputs of a batch; None if no row has any. Empty rows get those of another row, which nobody reads.

    Raises: UsageError if the inputs of rows differ in shape.
    """
    of_rows = [inputs for inputs in by_row if inputs is not None]
    if not of_rows:
        return None
    check_shapes(of_rows)
    rows = [of_rows[0] if inputs is None else inputs for inputs in by_row]
    return jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *rows)


def check_shapes(inputs: Sequence[PyTree]) -> None:
    """Check that the inputs of texts can share a batch. Raises: UsageError for different shapes."""
    if len({str(jax.tree.map(jnp.shape, of_text)) for of_text in inputs}) > 1:
        raise UsageError("the inputs of training texts differ in shape; make them with equal num_tiles and num_patches")


def find_round_starts(packed: PackedBatch) -> np.ndarray:
    """Return bool[B, T]: True at x_t if the target wrote x_{t+2}, the first token that the round from t drafts."""
    mask, text_start = np.asarray(packed.loss_mask), np.asarray(packed.text_start)
    starts = np.zeros_like(mask)
    starts[:, :-PAIR_TOKENS] = mask[:, PAIR_TOKENS:] & (text_start[:, PAIR_TOKENS:] == text_start[:, :-PAIR_TOKENS])
    return starts


def choose_round_starts(packed: PackedBatch, limit: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Return int32[B, limit]: the columns where each row's rounds start, then -1.

    Args: rng: selects `limit` columns if there are more; None: the first ones are used.
    """
    rows = []
    for row in find_round_starts(packed):
        columns = np.flatnonzero(row)
        if len(columns) > limit:
            columns = np.sort(rng.choice(columns, limit, replace=False)) if rng is not None else columns[:limit]
        rows.append(np.pad(columns, (0, limit - len(columns)), constant_values=-1))
    return np.stack(rows).astype(np.int32)
