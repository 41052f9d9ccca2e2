"""Results of the collaboration methods: the text, the author of each token, and the cost of each model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.collaborate.multi_writer import TextState
from specjax.engine.results import DecodeResult, zero_stats
from specjax.errors import UsageError
from specjax.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TextResult(DecodeResult):
    """A text of M writers. `stats` counts the passes of the last writer, the largest model."""

    authors: Array  # int32[B, max_new_tokens], the writer of each token in the order of the arguments, then -1
    passes: Array  # int32[B, M], passes of each model in which the row took part
    read: Array  # int32[B, M], tokens that these passes read
    log: Any = None  # further output of the method

    def share(self, who: int) -> np.ndarray:
        """Return float[B], the fraction of the tokens that a writer wrote."""
        mine = np.sum(np.asarray(self.authors) == who, 1)
        return mine / np.maximum(np.asarray(self.lengths), 1)

    def cut(self, max_new_tokens: int) -> Self:
        """Return the result with arrays of `max_new_tokens` tokens, which must fit all rows."""
        return replace(super().cut(max_new_tokens), authors=self.authors[:, :max_new_tokens])


def result(text: TextState, log: Any = None) -> TextResult:
    """Return the result of a text, inside a traced program."""
    index = jnp.arange(text.tokens.shape[1])
    place = jnp.minimum(text.prompt[:, None] + index, len(index) - 1)
    new = lambda x: jnp.where(index < text.written[:, None], take_along(x, place, 1), -1)
    stats = zero_stats(len(text.length), 0)._replace(target_passes=text.passes[:, -1], hit_eos=text.ended)
    return TextResult(
        new(text.tokens),
        text.written,
        text.ended,
        stats,
        finite=text.finite,
        authors=new(text.author),
        passes=text.passes,
        read=text.read,
        log=log,
    )


def check_scores(valid: Array, subject: str, fix: str) -> None:
    """Raise UsageError for a row with a NaN score of a judge or a reward. Call it outside of traced programs.

    valid: bool[B], whether all scores of a row were numbers.
    """
    if isinstance(valid, jax.core.Tracer):
        return
    wrong = np.flatnonzero(~np.asarray(valid))
    if wrong.size:
        raise UsageError(f"{subject} is NaN in row {wrong[0]}; {fix}")
