"""What a loop gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.global_arrays import is_remote
from specjax.types import Array, Drafter, Info, Stats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeResult:
    """What every loop gives back; some add what they alone know. A pytree, so it can leave the caller's own `jit`."""

    tokens: Array  # int32[B, max_new_tokens], without the prompts; -1 behind the end
    lengths: Array  # int32[B]
    hit_eos: Array  # bool[B]
    stats: Stats
    drafter: Drafter | None = None  # as it is after what it saw, for the next call; None if it remembers nothing
    logprobs: Array | None = None  # float32[B, max_new_tokens], 0 behind the end; if asked for
    # bool[B]: False where the target gave NaN or Inf, so that the text means nothing; `checks.explain` says why. None:
    # not looked at.
    finite: Array | None = None

    @property
    def finish_reasons(self) -> list[str]:
        """Per row "eos" or "length"."""
        return ["eos" if eos else "length" for eos in _here(self.hit_eos)]

    @property
    def block_efficiency(self) -> Array:
        """float32[B]: tokens per target pass, the bonus token included."""
        return self.lengths / jnp.maximum(self.stats.target_passes, 1)

    @property
    def mean_accepted(self) -> Array:
        """float32[B]: drafted tokens emitted per target pass (the bonus token excluded)."""
        return self.stats.accepted / jnp.maximum(self.stats.target_passes, 1)

    @property
    def acceptance_by_depth(self) -> Array:
        """float32[B, D]: of the rounds that drafted depth d + 1, the fraction that accepted it; nan if none did."""
        return self.stats.accepted_by_depth / self.stats.drafted_by_depth

    def to_lists(self) -> list[list[int]]:
        """The decoded tokens of each row, without padding."""
        return [row[:n].tolist() for row, n in zip(_here(self.tokens), _here(self.lengths), strict=True)]

    def cut(self, max_new_tokens: int) -> Self:
        """With arrays of so many tokens, which all rows fit into."""
        logprobs = None if self.logprobs is None else self.logprobs[:, :max_new_tokens]
        return replace(self, tokens=self.tokens[:, :max_new_tokens], logprobs=logprobs)


def _here(x) -> np.ndarray:
    if is_remote(x):
        raise UsageError("some rows are on other hosts; call specjax.parallel.gather(result) on every host first")
    return np.asarray(x)


class StreamStep(NamedTuple):
    """What one step added, as numpy."""

    tokens: list[list[int]]  # per row
    accepted: np.ndarray | Array  # int32[B], how many of them, from the front, were drafted; the rest are not
    info: Info
    earlier: Stats | None = None  # of the first step after a restart, which has the text so far: the sums until then
    # Of the last step: gives `DecodeResult.drafter`, if there is one. A run that had ended before a restart has none.
    drafter: Callable[[], Drafter] | None = None
