"""The latest samples of each prompt, on the host: texts that a drafter copies from in later calls."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.retrieval.rollouts import Rollouts, pack


def prompt_of_each(prompts: Sequence[Any], count: int) -> list[Any]:
    """Return the prompts of `count` samples: each prompt has equally many of them, in succession.

    Raises: UsageError for another number of samples.
    """
    times, remainder = divmod(count, max(len(prompts), 1))
    if remainder or not times:
        raise UsageError(f"each prompt must have the same number of samples, but {len(prompts)} prompts have {count}")
    return [prompt for prompt in prompts for _ in range(times)]


class RolloutStore:
    """Samples by prompt. The prompts that were not used for longest are dropped first.

    The store takes 4 bytes per token: 64 MiB with 8,192 prompts of 2,048 tokens.
    """

    def __init__(self, *, tokens: int = 2048, siblings: int = 4, prompts: int = 8192):
        """Create an empty store.

        Args:
          tokens: number of tokens per prompt that a call copies from, those of the latest samples. All calls with the
            same number of prompts share a program.
          siblings: number of samples of the same prompt and call that a sample copies from. 0: rows are independent.
          prompts: maximum number of prompts.

        Raises: UsageError for a number out of range.
        """
        if min(tokens, prompts) < 1 or siblings < 0:
            raise UsageError(
                f"tokens and prompts must be at least 1 and siblings at least 0, not {tokens}, {prompts} and {siblings}"
            )
        self.tokens, self.siblings, self.prompts = tokens, siblings, prompts
        self._samples: OrderedDict[tuple[int, ...], deque[np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._samples)

    def add(self, prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Store the samples of prompts, and drop the oldest ones that no call would copy from.

        Raises: UsageError for samples that are not equally many for each prompt.
        """
        for prompt, sample in zip(prompt_of_each(prompts, len(samples)), samples, strict=True):
            texts = self._samples.setdefault(tuple(map(int, prompt)), deque())
            self._samples.move_to_end(tuple(map(int, prompt)))
            texts.append(np.asarray(sample, np.int32))
            while sum(len(text) + 1 for text in texts) - len(texts[0]) > self.tokens:
                texts.popleft()
        while len(self._samples) > self.prompts:
            self._samples.popitem(last=False)

    def pack(self, prompts: Sequence[Sequence[int]]) -> Rollouts:
        """Return the samples of some prompts as parameters of a drafter. Unknown prompts have none."""
        return pack(prompts, [self._samples.get(tuple(prompt), ()) for prompt in prompts], self.tokens, self.siblings)
