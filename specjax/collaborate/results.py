"""What the methods give back: the text, who wrote it, and what it cost each model."""

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
    """A text of M writers. `stats` counts the passes of the last of them, the largest model."""

    authors: (
        Array  # int32[B, max_new_tokens], the writer of each token, in the order of the arguments; -1 behind the end
    )
    passes: Array  # int32[B, M], of each model, in which the row took part
    read: Array  # int32[B, M], tokens that these passes read
    log: Any = None  # what the method notes besides

    def share(self, who: int) -> np.ndarray:
        """float[B]: the part of the tokens that a writer wrote."""
        mine = np.sum(np.asarray(self.authors) == who, 1)
        return mine / np.maximum(np.asarray(self.lengths), 1)

    def cut(self, max_new_tokens: int) -> Self:
        """With arrays of so many tokens, which all rows fit into."""
        return replace(super().cut(max_new_tokens), authors=self.authors[:, :max_new_tokens])


def result(text: TextState, log: Any = None) -> TextResult:
    """The result of a text, inside of a program."""
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


def check_scores(valid: Array, what: str, fix: str) -> None:
    """Outside of a program: `valid` bool[B], whether all that a judge or a reward said of a row was a number.

    Raises: UsageError.
    """
    if isinstance(valid, jax.core.Tracer):
        return
    wrong = np.flatnonzero(~np.asarray(valid))
    if wrong.size:
        raise UsageError(f"{what} is NaN in row {wrong[0]}; {fix}")
