"""Training of a draft head on own rollouts, while the policy that it drafts for is trained.

    refresher = HeadRefresher(head, every=4)
    samples = sampler.sample(policy, prompts, ...)
    if refresher.add(prompts, samples.tokens):
        sampler.refresh(refresher.update(policy))

The head learns the distribution of the present policy on the texts of the policy. Nothing flows back to the policy. One
update costs a pass of the policy and a training step of the head over `rows` texts, whose time `seconds` contains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.rollouts.store import prompt_of_each
from specjax.training.data.packing import TrainingText, choose_round_starts, pack
from specjax.training.loop.step import export_trainable, init_state, train_step
from specjax.training.methods.online import plan_updates
from specjax.types import PyTree, Target


class HeadRefresher:
    """A trainer of a draft head on the latest samples.

    Guarantee: that of decoding. A head of any age costs speed, never exactness.
    """

    def __init__(
        self, head: DraftHead, *, every: int = 4, rows: int = 4, length: int = 256, rounds: int = 64, **changes: Any
    ):
        """Prepare training.

        Args:
          head: the head that the sampler drafts with.
          every: number of calls of the sampler per update.
          rows, length: texts of an update, the latest ones, and their limit of tokens.
          rounds: number of drafts that an update trains in each text.
          changes: arguments of `training.methods.online.plan_updates`, such as learning_rate.

        Raises: UsageError for a number below its minimum, or a head with quantised weights.
        """
        if min(every, rows, rounds) < 1 or length < 8:
            raise UsageError(
                f"every, rows and rounds must be at least 1 and length at least 8, not {every}, {rows}, {rounds} and "
                f"{length}"
            )
        self.head, self.every, self.rows, self.length, self.rounds = head, every, rows, length, rounds
        self.plan = plan_updates(head, **changes)
        self.state, self._frozen = init_state(self.plan, head.params)
        self.calls, self.seconds, self.loss = 0, 0.0, float("nan")  # the loss of the last update
        self._texts: deque[TrainingText] = deque(maxlen=rows)

    def add(self, prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[int] | np.ndarray]) -> bool:
        """Store the samples of a call, and return True if an update is due. Equal texts are stored once.

        Raises: UsageError for samples that are not equally many for each prompt.
        """
        for prompt, sample in zip(prompt_of_each(prompts, len(samples)), samples, strict=True):
            tokens = *map(int, prompt), *map(int, sample)
            text = TrainingText(tokens, len(prompt))
            if len(sample) > 1 and len(prompt) + 1 < self.length and text not in self._texts:
                self._texts.append(text)
        self.calls += 1
        return self.calls % self.every == 0 and bool(self._texts)

    def update(self, target: Target) -> PyTree:
        """Take one training step on the latest samples of `target`, and return the parameters of the head.

        A step whose loss is not finite changes nothing.
        """
        begin = time.perf_counter()
        (packed,) = pack(self._texts, self.rows, self.length, one_per_row=True)
        positions = choose_round_starts(packed, self.rounds, np.random.default_rng(self.calls))
        key = jax.random.key(self.calls)
        self.state, outcome = train_step(self.plan, self.state, self._frozen, target, packed, positions, key)
        params = export_trainable(self.head, self.state, self._frozen).params
        self.loss = float(outcome.loss)
        self.seconds += time.perf_counter() - begin
        return params
