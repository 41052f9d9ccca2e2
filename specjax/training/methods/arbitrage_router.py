"""Training of Arbitrage's router, which predicts from a step of the draft model if the target's step would be better.

Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (2025), arXiv 2512.05033.

Both models write a step after the same text: z_d of the draft model, and z_t of the target. A process reward gives the
advantage s(z_t) - s(z_d), and the label is 1 if it is above 0. The text continues with the better step, so prefixes are
those of decoding. The router is a linear head on a model's hidden state h at the end of z_d:

    minimise the mean of c(y_i) BCE(sigmoid(w . (h_i - mean) / scale + b), y_i) + l2 |w|^2 / 2

as in `judge_head`, where both classes have the same total weight. The method `arbitrage` uses it with the form router.
Guarantee: lossy, like the method.
Deviations: the model below the head stays frozen; the authors train it too. With `samples` above 1 the advantage is the
mean over several steps of the target, which is our choice. Texts that repeat a step end only at their length.

    settings = {"key": 0, "max_new_tokens": 512, "segmenter": ends}
    examples = collect_steps(draft, target, prompts, reward=reward, router=model, **settings)
    router = reward_of(model, train_router(examples))
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.arrays.modes import with_standard_modes
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.methods.arbitrage import READER, write_anew
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, prepare_texts, whole
from specjax.collaborate.rewards import Reward, as_argument, check_reward, readers_of, score_text
from specjax.collaborate.routing import DRAFT, Step
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts, batches_of
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, row_keys
from specjax.training.methods.judge_head import JudgeClassifier, fit_judge
from specjax.types import Array, Target


class StepExamples(NamedTuple):
    """The steps of the draft model in some texts."""

    features: np.ndarray  # float32[N, D], hidden state of the router's model at the end of the step
    advantage: np.ndarray  # float32[N], reward of the target's step minus that of the draft model's step

    @property
    def labels(self) -> np.ndarray:
        """Return int8[N]: 1 where the target's step is better."""
        return (self.advantage > 0).astype(np.int8)


class _Round(NamedTuple):
    """The next step of each row."""

    text: TextState  # with the better step
    features: Array  # [B, D]
    advantage: Array  # float32[B]
    active: Array  # bool[B], rows that wrote a step


@with_standard_modes
def collect_steps(
    draft: Target, target: Target, prompts: Prompts, *, key: Array | int, max_new_tokens: int, segmenter: Segmenter,
    reward: Reward, router: Target, samples: int = 1, max_step_tokens: int = 512, batch_size: int = 16, **settings: Any,
) -> StepExamples:  # fmt: skip
    """Write texts of which each step is the better one of two, and return the steps of the draft model.

    Args:
      reward: as in `arbitrage`. router: the model whose hidden states the head will read. samples: steps of the target
        per step of the draft model. batch_size: texts that are written together. settings: settings of `decode`, for
        both models.

    Raises: UsageError for a setting outside its range, or a reward that is NaN.
    """
    whole("samples", samples, 1)
    whole("max_step_tokens", max_step_tokens, 1)
    whole("batch_size", batch_size, 1)
    check_reward("reward", reward)
    batches = batches_of(prompts, batch_size)
    rounds: list[Any] = []
    for number, batch in enumerate(batches):
        keys = row_keys(key, sum(map(_num_rows, batches)))[number * batch_size : (number + 1) * batch_size]
        job = prepare_texts(
            (draft, target), batch, key=keys, max_new_tokens=max_new_tokens, settings=Settings(**settings),
            readers=(*readers_of(reward), router),
        )  # fmt: skip
        rounds += _rounds(job, segmenter, reward, samples, max_step_tokens)
    if not rounds:
        raise UsageError("there are no prompts; give at least one")
    active = np.concatenate([active for _, _, active in rounds])
    features, advantage = (np.concatenate([entry[i] for entry in rounds])[active] for i in (0, 1))
    if np.isnan(advantage).any():
        raise UsageError("a reward is NaN; look at the reward model, or the function of the reward")
    return StepExamples(features.astype(np.float32), advantage)


def _num_rows(prompts: Prompts) -> int:
    return len(prompts[0] if isinstance(prompts, tuple) else prompts)


def _rounds(job: TextJob, segmenter: Segmenter, reward: Reward, samples: int, limit: int) -> list[Any]:
    """Write the texts of a batch, and return the features, advantages and activity of their steps."""
    text = job.begin()
    rounds: list[Any] = []
    while bool(jnp.any(text.unfinished)):
        number = jnp.int32(len(rounds))
        step = _round(job, text, segmenter, as_argument(reward), number, samples=samples, limit=limit)
        text = step.text
        rounds.append(jax.tree.map(np.asarray, step[1:]))
    return rounds


@functools.partial(jax.jit, static_argnames=("samples", "limit"))
@with_standard_modes
def _round(
    job: TextJob, text: TextState, segmenter: Segmenter, reward: Reward, number: Array, *, samples: int, limit: int
) -> _Round:
    writers, start, active = job.writers, text.length, text.unfinished
    text, _ = texts.extend(writers, text, DRAFT, segmenter=segmenter, limit=limit, active=active)
    step = Step(start, jnp.broadcast_to(number, start.shape), active)
    text, score = score_text(reward, writers, text, start, active, READER)
    none = jnp.zeros((0,), jnp.int32)
    text, features = texts.hidden_after(writers, text, len(writers) - 1, none, active)
    alternatives = []
    for sample in range(samples):
        branch = text if sample == 0 else text._replace(keys=fold_in(text.keys, sample))
        branch, _ = write_anew(writers, branch, step, segmenter, limit)
        alternatives.append(score_text(reward, writers, branch, start, active, READER))
    advantage = jnp.mean(jnp.stack([value for _, value in alternatives]), 0) - score
    text = batch_axes.where_rows(advantage > 0, alternatives[0][0], text, texts.axes(writers, text))
    return _Round(text, features.astype(jnp.float32), advantage, active)


def train_router(examples: StepExamples, *, l2: float = 1e-3, steps: int = 200) -> JudgeClassifier:
    """Fit the head of a router to the steps of texts, for `collaborate.reward_of`.

    Raises: UsageError if the target's step is always better, or never.
    """
    labels = examples.labels
    if len(set(labels.tolist())) < 2:
        share = "all" if labels.any() else "none"
        raise UsageError(
            f"the target's step is better in {share} of the {len(labels)} steps, and a router needs both cases; give "
            "more prompts, or sample with a temperature"
        )
    return fit_judge(examples.features, labels, l2=l2, steps=steps)
