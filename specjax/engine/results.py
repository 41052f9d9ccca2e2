"""Results of a decoding loop, and the sums of statistics over its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import with_standard_modes
from specjax.errors import UsageError
from specjax.numerics.global_arrays import is_remote
from specjax.numerics.text_identity import TextIdentity
from specjax.types import STATIC, Array, Drafter, Info, Stats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeResult:
    """Result of every decoding loop. It is a pytree, so the caller's own `jit` can return it. Some loops add fields."""

    tokens: Array  # int32[B, max_new_tokens], new tokens without the prompts, then -1
    lengths: Array  # int32[B], number of new tokens
    hit_eos: Array  # bool[B]
    stats: Stats
    drafter: Drafter | None = None  # drafter with its learned parameters, for the next call; None if it learns none
    logprobs: Array | None = None  # float32[B, max_new_tokens], then 0; on request
    # bool[B], False for a row that failed: it has an invalid input, the target returned NaN or Inf, or the processors
    # allow no token (`value_checks.explain_failure` returns the reason). Its text ends there. Outside of the caller's
    # `jit`, `decode` raises an error instead. None: the loop does not check this.
    finite: Array | None = None
    # How far rounding may change the text relative to plain decoding: "exact", "same bits" or "near-ties possible"
    # (`specjax.numerics.text_identity`). None: the loop has no plain decoding to compare with.
    text_identity: TextIdentity | None = field(default=None, metadata=STATIC)

    @property
    def finish_reasons(self) -> list[str]:
        """Return the reason for the end of each row: "eos", "length", or "failed" where `finite` is False."""
        hit_eos = _to_host(self.hit_eos)
        finite = np.ones_like(hit_eos) if self.finite is None else _to_host(self.finite)
        return ["eos" if eos else "length" if sound else "failed" for eos, sound in zip(hit_eos, finite, strict=True)]

    @property
    def block_efficiency(self) -> Array:
        """Return the tokens per target pass, the bonus token included, float32[B]."""
        return self.lengths / jnp.maximum(self.stats.target_passes, 1)

    @property
    def mean_accepted(self) -> Array:
        """Return the accepted draft tokens per target pass, the bonus token excluded, float32[B]."""
        return self.stats.accepted / jnp.maximum(self.stats.target_passes, 1)

    @property
    def acceptance_by_depth(self) -> Array | np.ndarray:
        """Return the acceptance rate at depth d + 1, float32[B, D], among the steps that drafted this depth, or nan."""
        accepted, drafted = self.stats.accepted_by_depth, self.stats.drafted_by_depth
        if isinstance(drafted, jax.core.Tracer) or is_remote(drafted):
            return jnp.where(drafted > 0, accepted / jnp.maximum(drafted, 1), jnp.nan)
        with np.errstate(invalid="ignore"):  # on the host, where `jax_debug_nans` accepts the nan
            return (np.asarray(accepted) / np.asarray(drafted)).astype(np.float32)

    def to_lists(self) -> list[list[int]]:
        """Return the new tokens of each row, without padding."""
        return [row[:n].tolist() for row, n in zip(_to_host(self.tokens), _to_host(self.lengths), strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that pickles and copies have. Functions cannot be pickled, so `drafter` is None there."""
        return self.__dict__ | {"drafter": None}

    def cut(self, max_new_tokens: int) -> Self:
        """Cut the arrays to `max_new_tokens` columns. All rows must fit."""
        logprobs = None if self.logprobs is None else self.logprobs[:, :max_new_tokens]
        return replace(self, tokens=self.tokens[:, :max_new_tokens], logprobs=logprobs)


def _to_host(x) -> np.ndarray:
    if is_remote(x):
        raise UsageError("some rows are on other hosts; call specjax.parallel.gather(result) on every host first")
    return np.asarray(x)


class StreamStep(NamedTuple):
    """The tokens that one step added, on the host."""

    tokens: list[list[int]]  # added tokens of each row
    accepted: np.ndarray | Array  # int32[B], number of leading tokens that were drafted
    info: Info
    earlier: Stats | None = None  # sums before a restart; set in the first step after it, which has the text so far
    # Function that returns the value of `DecodeResult.drafter`. It is set in the last step only, if the drafter learns,
    # and not for a run that had ended before a restart.
    drafter: Callable[[], Drafter] | None = None

    def __reduce__(self) -> tuple:
        """Return the fields that pickles and copies have. Functions cannot be pickled, so `drafter` is None there."""
        return type(self), tuple(self._replace(drafter=None))


def zero_stats(batch: int, max_depth: int, debug: bool = False) -> Stats:
    """Return the statistics before the first step. `max_depth` is D."""
    row, by_depth = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, max_depth), jnp.int32)
    return Stats(row, row, row, by_depth, by_depth, jnp.zeros((batch,), bool), row if debug else None)


@with_standard_modes  # `resume` and `bench` call it outside of the loop
def add_stats(stats: Stats, info: Info) -> Stats:
    """Add one step to the statistics."""
    depth = jnp.arange(stats.drafted_by_depth.shape[1])
    violations = [bits for bits in (stats.violations, info.violations) if bits is not None]
    return Stats(
        target_passes=stats.target_passes + info.active,
        drafted=stats.drafted + info.drafted,
        accepted=stats.accepted + info.accepted,
        drafted_by_depth=stats.drafted_by_depth + (depth < jnp.where(info.active, info.drafted_depth, 0)[:, None]),
        accepted_by_depth=stats.accepted_by_depth + (depth < info.accepted[:, None]),
        hit_eos=stats.hit_eos | info.hit_eos,
        violations=functools.reduce(jnp.bitwise_or, violations) if violations else None,
    )


def add_round(stats: Stats, passes: Any, drafted: Any, accepted: Any) -> Stats:
    """Add one round of a loop without `Info`. NumPy and JAX arrays are supported.

    Args:
      passes: int32[B] or bool[B], target passes.
      drafted, accepted: bool[B, D], depths at which a token was drafted or accepted.
    """
    return stats._replace(
        target_passes=stats.target_passes + passes,
        drafted=stats.drafted + drafted.sum(1, dtype=np.int32),
        accepted=stats.accepted + accepted.sum(1, dtype=np.int32),
        drafted_by_depth=stats.drafted_by_depth + drafted,
        accepted_by_depth=stats.accepted_by_depth + accepted,
    )
