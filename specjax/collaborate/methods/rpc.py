"""RPC: of many samples the answer with the most probability, without the samples that are improbable.

Zhou, Tan, Li, Yao, Guo, Ma, Li: Bridging Internal Probability and Self-Consistency for Effective and Efficient LLM
Reasoning (2025), arXiv 2502.00511.

Rule: a sample i has the probability P_i = exp(mean log p of its tokens). Pruning: two Weibull laws are fitted to the
P_i of a prompt; a sample is left out if the one with the lower mean is the likelier for it and P_i is below their mean.
Consistency: an answer scores the sum of P_i over its distinct samples, so that equal ones count once; the highest wins.
Guarantee: lossy: each sample has the model's distribution, what is chosen among them does not.
Deviations: the law is fitted by 200 steps of Adam on free parameters. `path` takes the probability of the whole text,
as the paper's theory does, in place of its authors' mean. The text given back is the answer's likeliest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.prepare import TextJob, prepare_texts, whole
from specjax.collaborate.results import TextResult, result
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
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
    ),
)


STEPS, RATE = 200, 0.05


class Mixture(NamedTuple):
    """w Weibull(shape_0, scale_0) + (1 - w) Weibull(shape_1, scale_1)."""

    w: Array  # float32[]
    shape: Array  # float32[2]
    scale: Array  # float32[2]


class Vote(NamedTuple):
    """What became of the samples of each prompt, as numpy."""

    chosen: np.ndarray  # int[B]
    probability: np.ndarray  # float[B, K]
    kept: np.ndarray  # bool[B, K]
    answers: list[list[Hashable]]
    samples: list[list[list[int]]]


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
    temperature: float = 1.0,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """The likeliest answer's likeliest text.

    Args:
      answer: from a text's new tokens to its answer; equal answers are one, None is none. samples: K, per prompt.
      path: probabilities of whole texts. prune: whether improbable samples are left out.
      drafter: drafts for all of them. settings: of `decode`: eos, top_p, ...

    Returns: TextResult of the texts chosen, whose passes and tokens read are those of all samples; its log is a `Vote`.
    Raises: UsageError for a setting outside its range, or a prompt to none of whose samples there is an answer.
    """
    whole("samples", samples, 1)
    if isinstance(temperature, int | float) and not temperature > 0:
        raise UsageError("temperature must be above 0, as samples drawn at 0 are equal")
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, drafters=(drafter,),
        settings=Settings(temperature=temperature, **settings), keep=Keep(logprobs=True), rewinds=False,
    )  # fmt: skip
    every, logprob = _samples(job, n=samples)
    texts_of = every.to_lists()
    batch, lengths = len(job.lengths), np.asarray(every.lengths)
    probability = np.exp(np.asarray(logprob) / (1 if path else np.maximum(lengths, 1))).reshape(batch, samples)
    rows = [texts_of[row * samples : (row + 1) * samples] for row in range(batch)]
    answers = [[answer(tokens) for tokens in row] for row in rows]
    kept = np.stack([keep(p) if prune else np.ones(samples, bool) for p in probability])
    chosen = []
    for row in range(batch):
        best = vote(answers[row], [tuple(tokens) for tokens in rows[row]], probability[row], kept[row])
        if best is None:
            raise UsageError(f"there is no answer in any sample of row {row}; give more samples or max_new_tokens")
        chosen.append(best)
    log = Vote(np.array(chosen), probability, kept, answers, rows)
    place = np.arange(batch) * samples + log.chosen
    total = lambda x: jnp.sum(x.reshape(batch, samples, -1), 1)
    passes, read = total(every.passes), total(every.read)
    best = jax.tree.map(lambda x: x[place], every)
    stats = best.stats._replace(target_passes=passes[:, -1])
    return TextResult(
        best.tokens, best.lengths, best.hit_eos, stats, finite=best.finite, authors=best.authors, passes=passes,
        read=read, log=log,
    ).cut(max_new_tokens)  # fmt: skip


def vote(answers: Sequence[Hashable], samples: Sequence[tuple], probability: Any, kept: Any) -> int | None:
    """The sample that stands for the answer with the highest score; None if there is no answer."""
    scores: dict[Hashable, float] = {}
    best: dict[Hashable, int] = {}
    seen: set[tuple] = set()
    for i, (said, text) in enumerate(zip(answers, samples, strict=True)):
        if said is None or not kept[i] or text in seen:
            continue
        seen.add(text)
        scores[said] = scores.get(said, 0.0) + float(probability[i])
        if said not in best or probability[i] > probability[best[said]]:
            best[said] = i
    return best[max(scores, key=lambda said: scores[said])] if scores else None


def keep(probability: Any) -> np.ndarray:
    """bool[K]: the samples that pruning leaves. None above the mean is ever left out."""
    p = jnp.asarray(probability, jnp.float32)
    mixture = fit(p)
    mean = mixture.scale * jnp.exp(jax.scipy.special.gammaln(1 + 1 / mixture.shape))
    density = _log_densities(mixture, p)  # float32[2, K], with their weights
    low = jnp.argmin(mean)
    least = jnp.minimum(jnp.mean(p), jnp.max(p))  # the mean of equal numbers is rounded, perhaps to above them
    return np.asarray((density[low] <= density[1 - low]) | (p >= least))


def log_likelihood(mixture: Mixture, p: Array) -> Array:
    """float32[]: mean over probabilities float32[K]."""
    return jnp.mean(jax.nn.logsumexp(_log_densities(mixture, p), 0))


def _log_densities(mixture: Mixture, p: Array) -> Array:
    k, scale = mixture.shape[:, None], mixture.scale[:, None]
    x = jnp.maximum(p, 1e-6) / scale
    weight = jnp.log(jnp.stack([mixture.w, 1 - mixture.w]))[:, None]
    return weight + jnp.log(k / scale) + (k - 1) * jnp.log(x) - x**k


@jax.jit
@without_x64
def fit(p: Array) -> Mixture:
    """Of probabilities float32[K], from w = .5, (1, 1) and (1.5, 2) on, with w within .2 and .8."""

    def of(free: tuple[Array, Array, Array]) -> Mixture:
        return Mixture(0.2 + 0.6 * jax.nn.sigmoid(free[0]), jnp.exp(free[1]), jnp.exp(free[2]))

    adam = optax.adam(RATE)
    start = jnp.float32(0.0), jnp.log(jnp.array([1.0, 1.5])), jnp.log(jnp.array([1.0, 2.0]))

    def step(_: Array, carry: tuple) -> tuple:
        free, state = carry
        gradient = jax.grad(lambda free: -log_likelihood(of(free), p))(free)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(free, change), state

    return of(jax.lax.fori_loop(0, STEPS, step, (start, adam.init(start)))[0])


@functools.partial(jax.jit, static_argnames=("n",))
@without_x64
def _samples(job: TextJob, *, n: int) -> tuple[TextResult, Array]:
    """All texts, and float32[B n], their log-probabilities."""

    def add(total: Array, info: Info, kept: Array) -> Array:
        assert info.logprobs is not None
        inside = jnp.arange(info.logprobs.shape[1]) < kept[:, None]
        return total + jnp.sum(jnp.where(inside, info.logprobs, 0.0), 1)

    text = texts.fork(job.writers, job.begin(), n)
    writers = texts.forked(job.writers, n)
    text, written = texts.extend(writers, text, 0, see=add, seen=jnp.zeros(text.length.shape))
    return result(text), written.seen
