"""Results of the collaboration methods: the text, the author of each token, the cost of each model, and the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.collaborate.multi_writer import TextState
from specjax.engine.results import DecodeResult, zero_stats
from specjax.errors import UsageError
from specjax.types import Array

FINE = -1
"""The problem of rows without one."""
NO_OUTPUT = "a model returns NaN or Inf, or the processors allow no token; look at its parameters, and the processors"
"""The reason of rows that are not finite."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TextResult(DecodeResult):
    """A text of M writers, the last of which may only read. `stats` counts the passes of the target.

    A row that failed has no text, and `failures` has the reason. The other rows of its batch are complete.
    """

    authors: Array  # int32[B, max_new_tokens], the writer of each token in the order of the arguments, then -1
    passes: Array  # int32[B, M], passes of each model in which the row took part
    read: Array  # int32[B, M], tokens that these passes read
    log: Any = None  # further output of the method, with a method `summary(row)`
    problem: Array | None = None  # int32[B], the index of the row's reason, or FINE; None: no row can fail
    reasons: tuple[str, ...] = field(default=(), metadata={"static": True})

    @property
    def failures(self) -> dict[int, str]:
        """Return the rows that failed, and the reason of each."""
        problems = [] if self.problem is None else np.asarray(self.problem).tolist()
        return {row: self.reasons[problem] for row, problem in enumerate(problems) if problem != FINE}

    @property
    def finish_reasons(self) -> list[str]:
        """Return the reason for the end of each row: "eos", "length" or "failed"."""
        failures = self.failures
        return ["failed" if row in failures else reason for row, reason in enumerate(super().finish_reasons)]

    def share(self, who: int) -> np.ndarray:
        """Return float[B], the fraction of the tokens that a writer wrote."""
        mine = np.sum(np.asarray(self.authors) == who, 1)
        return mine / np.maximum(np.asarray(self.lengths), 1)

    def summary(self, row: int) -> dict[str, Any]:
        """Return the log of a row as values of JSON: counts, means, and lists of single steps or samples."""
        if self.log is None:
            return {}
        arrays = {name: np.asarray(x) for name, x in self.log._asdict().items() if isinstance(x, jax.Array)}
        return self.log._replace(**arrays).summary(row)  # single elements of NumPy arrays are cheap

    def cut(self, max_new_tokens: int) -> Self:
        """Return the result with arrays of `max_new_tokens` tokens, which must fit all rows."""
        return replace(super().cut(max_new_tokens), authors=self.authors[:, :max_new_tokens])


class RowsFailedError(UsageError):
    """An error about a batch in which every row failed, with the result that has the reasons."""

    def __init__(self, message: str, result: TextResult):
        super().__init__(message)
        self.result = result


def result(text: TextState, log: Any = None, target: int = -1) -> TextResult:
    """Return the result of a text, inside a traced program. target: the writer that is the target."""
    index = jnp.arange(text.tokens.shape[1])
    place = jnp.minimum(text.prompt[:, None] + index, len(index) - 1)
    new = lambda x: jnp.where(index < text.written[:, None], take_along(x, place, 1), -1)
    stats = zero_stats(len(text.length), 0)._replace(target_passes=text.passes[:, target], hit_eos=text.ended)
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


def mark_failures(done: TextResult, problems: Mapping[str, Array] = MappingProxyType({})) -> TextResult:
    """Mark the rows that failed, and remove their texts. Call it outside of the method's own program.

    problems: reasons, and the rows bool[B] of each. The first reason of a row holds. Rows that are not `finite` have
      failed in every method.

    Raises: RowsFailedError if every row failed, unless the caller traces the method.
    """
    problems = dict(problems) if done.finite is None else {**problems, NO_OUTPUT: ~done.finite}
    problem = jnp.full(done.lengths.shape, FINE, jnp.int32)
    for number, rows in reversed(list(enumerate(problems.values()))):
        problem = jnp.where(jnp.asarray(rows), number, problem)
    fine = problem == FINE
    done = replace(
        done,
        tokens=jnp.where(fine[:, None], done.tokens, -1),
        authors=jnp.where(fine[:, None], done.authors, -1),
        lengths=jnp.where(fine, done.lengths, 0),
        hit_eos=fine & done.hit_eos,
        problem=problem,
        reasons=tuple(problems),
    )
    if not isinstance(problem, jax.core.Tracer) and len(problem) == len(done.failures):
        raise RowsFailedError(f"{done.failures[0]}, in every row", done)
    return done


def scalar(x: Any) -> Any:
    """Return an element of an array as a number of Python; a float that is no number becomes None."""
    value = np.asarray(x).item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def scalars(log: Any, row: int, names: Iterable[str]) -> dict[str, Any]:
    """Return some fields of a log, arrays [B], for one row."""
    return {name: scalar(getattr(log, name)[row]) for name in names}


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sums of whole numbers and the means of other numbers over the summaries of some rows.

    Values that are lists, texts, None, or True and False are left out.
    """
    values: dict[str, list] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, []).append(value)
    is_count = lambda numbers: all(isinstance(number, int) for number in numbers)
    return {name: sum(x) if is_count(x) else sum(x) / len(x) for name, x in values.items()}
