"""RPC: the answer with the largest total probability over many samples, after improbable samples are pruned.

Zhou, Tan, Li, Yao, Guo, Ma, Li: Bridging Internal Probability and Self-Consistency for Effective and Efficient LLM
Reasoning (2025), arXiv 2502.00511.

Rule: a sample i has the probability P_i = exp(mean log p of its tokens). Pruning fits two Weibull laws to the P_i of a
prompt. It drops a sample if the law with the lower mean is the more likely one and P_i is below the mean of all P_i.
Consistency: the score of an answer is the sum of P_i over its distinct samples, so equal samples count once. The
highest score wins.
Guarantee: lossy. Each sample has the model's distribution, but the selected text does not.
Deviations: the laws are fitted by 200 steps of Adam on free parameters. `path` uses the probability of the whole text,
as in the paper's theory, instead of the authors' mean. The returned text is the most likely text of the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.prepare import TextJob, above_zero, prepare_texts, whole
from specjax.collaborate.results import FINE, TextResult, mark_failures, result
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.types import Array, Drafter, Info, Target

METHOD = Method(
    name="rpc",
    kind="collaboration",
    guarantee="lossy",
    summary="samples many texts, drops improbable ones, and returns the answer with the largest total probability",
    paper="Zhou et al. 2025, arXiv 2502.00511",
    needs=frozenset({"answers"}),
    options=(
        Option("samples", "int", 128, "samples per prompt"),
        Option("path", "yes_or_no", False, "use the probability of the whole text instead of the mean per token"),
        Option("prune", "yes_or_no", True, "drop improbable samples"),
        shared.WRITING_DRAFTER,
    ),
)


TEMPERATURE = 1.0
"""The default sampling temperature."""
STEPS, RATE = 200, 0.05
NO_ANSWER = "no sample has an answer; give more samples or max_new_tokens"


class AnswerMixture(NamedTuple):
    """A mixture of two laws: w Weibull(shape_0, scale_0) + (1 - w) Weibull(shape_1, scale_1)."""

    w: Array  # float32[]
    shape: Array  # float32[2]
    scale: Array  # float32[2]


class Vote(NamedTuple):
    """The samples, answers and choices of each prompt, as numpy."""

    choices: np.ndarray  # int[B], the sample of the answer; -1: no sample has an answer
    probability: np.ndarray  # float[B, K]
    survivors: np.ndarray  # bool[B, K]
    answers: list[list[Hashable]]
    samples: list[list[list[int]]]

    def summary(self, row: int) -> dict[str, Any]:
        """Return the number of samples of a row that survived, and that of their answers."""
        survivors = [reply for reply, stays in zip(self.answers[row], self.survivors[row], strict=True) if stays]
        return {
            "surviving_samples": len(survivors),
            "different_answers": len({reply for reply in survivors if reply is not None}),
            "mean_probability": float(np.mean(self.probability[row])),
        }


def rpc(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    answer: Callable[[list[int]], Hashable],
    samples: int = 128,
    path: bool = False,
    prune: bool = True,
    temperature: float = TEMPERATURE,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode many samples, and return the most likely text of the most likely answer.

    Args:
      answer: maps the new tokens of a text to its answer. Equal answers are pooled; None means no answer.
      samples: K per prompt. path: whether to use probabilities of whole texts. prune: whether to drop improbable
        samples.
      drafter: drafts for all samples. settings: settings of `decode`: eos, top_p, ...

    Returns: TextResult of the selected texts, with the passes and tokens read of all samples; its log is a `Vote`.
    A prompt without an answer in any sample is among the result's `failures`.
    Raises: UsageError for a setting outside its range, or if no prompt has an answer.
    """
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=check_options(samples=samples, temperature=temperature, **settings), keep=Keep(logprobs=True),
        rewinds=False,
    )  # fmt: skip
    every, logprob = _samples(job, n=samples)
    texts_of = every.to_lists()
    batch, lengths = len(job.lengths), np.asarray(every.lengths)
    probability = np.exp(np.asarray(logprob) / (1 if path else np.maximum(lengths, 1))).reshape(batch, samples)
    rows = [texts_of[row * samples : (row + 1) * samples] for row in range(batch)]
    answers = [[answer(tokens) if tokens else None for tokens in row] for row in rows]
    survivors = np.stack([keep(p) if prune else np.ones(samples, bool) for p in probability])
    distinct = [[tuple(tokens) for tokens in row] for row in rows]
    votes = [vote(answers[row], distinct[row], probability[row], survivors[row]) for row in range(batch)]
    choices = np.array([FINE if choice is None else choice for choice in votes])
    log = Vote(choices, probability, survivors, answers, rows)
    place = np.arange(batch) * samples + np.maximum(choices, 0)
    total = lambda x: jnp.sum(x.reshape(batch, samples, -1), 1)
    passes, read = total(every.passes), total(every.read)
    best = jax.tree.map(lambda x: x[place], every)
    stats = best.stats._replace(target_passes=passes[:, -1])
    done = replace(best, stats=stats, passes=passes, read=read, log=log)
    return mark_failures(done, {NO_ANSWER: (choices == FINE) & np.asarray(best.finite)}).cut(max_new_tokens)


def check_options(*, samples: int, temperature: float = TEMPERATURE, **settings: Any) -> Settings:
    """Check the options, and return the settings of the samples. Raises: UsageError."""
    whole("samples", samples, 1)
    above_zero(temperature, "samples drawn at 0 are equal")
    return Settings(temperature=temperature, **settings)


def vote(answers: Sequence[Hashable], samples: Sequence[tuple], probability: Any, survivors: Any) -> int | None:
    """Return the most likely sample of the answer with the highest score, or None if there is no answer."""
    scores: dict[Hashable, float] = {}
    best: dict[Hashable, int] = {}
    distinct: set[tuple] = set()
    for i, (reply, text) in enumerate(zip(answers, samples, strict=True)):
        if reply is None or not survivors[i] or text in distinct:
            continue
        distinct.add(text)
        scores[reply] = scores.get(reply, 0.0) + float(probability[i])
        if reply not in best or probability[i] > probability[best[reply]]:
            best[reply] = i
    return best[max(scores, key=lambda reply: scores[reply])] if scores else None


def keep(probability: Any) -> np.ndarray:
    """Return bool[K], the samples that survive pruning. No sample above the mean is ever pruned."""
    p = jnp.asarray(probability, jnp.float32)
    mixture = fit(p)
    mean = mixture.scale * jnp.exp(jax.scipy.special.gammaln(1 + 1 / mixture.shape))
    density = _log_densities(mixture, p)  # float32[2, K], with their weights
    low = jnp.argmin(mean)
    mean_p = jnp.minimum(jnp.mean(p), jnp.max(p))  # rounding may put the mean of equal numbers above them
    return np.asarray((density[low] <= density[1 - low]) | (p >= mean_p))


def log_likelihood(mixture: AnswerMixture, p: Array) -> Array:
    """Return float32[], the mean log-likelihood of probabilities float32[K]."""
    return jnp.mean(jax.nn.logsumexp(_log_densities(mixture, p), 0))


def _log_densities(mixture: AnswerMixture, p: Array) -> Array:
    k, scale = mixture.shape[:, None], mixture.scale[:, None]
    x = jnp.maximum(p, 1e-6) / scale
    weight = jnp.log(jnp.stack([mixture.w, 1 - mixture.w]))[:, None]
    return weight + jnp.log(k / scale) + (k - 1) * jnp.log(x) - x**k


@jax.jit
@with_standard_modes
def fit(p: Array) -> AnswerMixture:
    """Fit a mixture to probabilities float32[K], starting from w = .5, (1, 1) and (1.5, 2), with w within .2 and .8."""

    def to_mixture(free: tuple[Array, Array, Array]) -> AnswerMixture:
        return AnswerMixture(0.2 + 0.6 * jax.nn.sigmoid(free[0]), jnp.exp(free[1]), jnp.exp(free[2]))

    adam = optax.adam(RATE)
    start = jnp.float32(0.0), jnp.log(jnp.array([1.0, 1.5])), jnp.log(jnp.array([1.0, 2.0]))

    def step(_: Array, carry: tuple) -> tuple:
        free, state = carry
        gradient = jax.grad(lambda free: -log_likelihood(to_mixture(free), p))(free)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(free, change), state

    return to_mixture(jax.lax.fori_loop(0, STEPS, step, (start, adam.init(start)))[0])


@functools.partial(jax.jit, static_argnames=("n",))
@with_standard_modes
def _samples(job: TextJob, *, n: int) -> tuple[TextResult, Array]:
    """Return all texts, and their log-probabilities float32[B n]."""

    def add(total: Array, info: Info, count: Array) -> Array:
        assert info.logprobs is not None
        inside = jnp.arange(info.logprobs.shape[1]) < count[:, None]
        return total + jnp.sum(jnp.where(inside, info.logprobs, 0.0), 1)

    text = texts.fork(job.writers, job.begin(), n)
    writers = texts.forked(job.writers, n)
    text, written = texts.extend(writers, text, 0, observe=add, observations=jnp.zeros(text.length.shape))
    return result(text), written.observations
