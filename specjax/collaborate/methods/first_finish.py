"""First finish search: several samples of a prompt run in parallel, and the one that ends first is returned.

Agarwal, Sengupta, Chakraborty: First Finish Search: Efficient Test-Time Scaling in Large Language Models (2025),
arXiv 2505.18149.

Rule: n samples run in parallel. The shortest sample that ends with an eos is the answer. The others are cancelled as
soon as they cannot be shorter. Among equal lengths the highest mean log-probability wins, then the first sample. If
none ends by the limit, the sample with the highest mean log-probability wins.
Guarantee: lossy. Each sample has the model's distribution, but the shortest of several does not. With n = 1 it is
`decode`.
Deviations: lengths are compared instead of wall-clock times. With a drafter, rows reach the same length in different
passes, so shorter samples continue. The winner then equals that of token-by-token decoding if the texts are equal
(coupled sampling).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.prepare import TextJob, above_zero, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalar
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.types import Array, Drafter, Info, Target

METHOD = Method(
    name="first_finish",
    kind="collaboration",
    guarantee="lossy",
    summary="samples several answers in parallel and returns the one that finishes first",
    paper="Agarwal et al. 2025, arXiv 2505.18149",
    options=(Option("samples", "int", 4, "samples per prompt"), shared.WRITING_DRAFTER),
)


TEMPERATURE = 1.0
"""The default sampling temperature."""


class Race(NamedTuple):
    """The samples of each prompt, and the winner."""

    winner: Array  # int32[B]
    lengths: Array  # int32[B, n], tokens when they ended or were cancelled
    ended: Array  # bool[B, n]
    mean_logprob: Array  # float32[B, n]

    def summary(self, row: int) -> dict[str, Any]:
        """Return the counts of a row, and its samples; `is_answer` marks the winner."""
        fields = {"tokens": self.lengths, "ended": self.ended, "mean_logprob": self.mean_logprob}
        samples = [
            {name: scalar(x[row, i]) for name, x in fields.items()} | {"is_answer": i == int(self.winner[row])}
            for i in range(self.lengths.shape[1])
        ]
        counts = {"samples_that_ended": int(self.ended[row].sum()), "sampled_tokens": int(self.lengths[row].sum())}
        return counts | {"samples": samples}


def first_finish(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    samples: int = 4,
    temperature: float = TEMPERATURE,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode several samples of each prompt, and return the first that ends.

    Args:
      samples: n per prompt; sample i has the key of `decode` with `samples_per_prompt`.
      drafter: drafts for all samples. settings: settings of `decode`, such as eos, without which no sample ends.

    Returns: TextResult of the winners, with the passes and tokens read of all samples; its log is a `Race`.
    Raises: UsageError for samples below 1, or a temperature of 0, at which all are equal.
    """
    checked = check_options(samples=samples, temperature=temperature, **settings)
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=checked,
        keep=Keep(logprobs=True), rewinds=False,
    )  # fmt: skip
    return mark_failures(_run(job, samples=samples)).cut(max_new_tokens)


def check_options(*, samples: int, temperature: float = TEMPERATURE, **settings: Any) -> Settings:
    """Check the options, and return the settings of the samples. Raises: UsageError."""
    whole("samples", samples, 1)
    if samples > 1:
        above_zero(temperature, "samples drawn at 0 are equal; or give samples=1")
    return Settings(temperature=temperature, **settings)


def winners(lengths: Array, ended: Array, mean_logprob: Array) -> Array:
    """Return int32[B], the winning sample, for arrays [B, n]."""
    shortest = jnp.min(jnp.where(ended, lengths, jnp.iinfo(jnp.int32).max), 1, keepdims=True)
    in_the_race = jnp.where(jnp.any(ended, 1, keepdims=True), ended & (lengths == shortest), True)
    return jnp.argmax(jnp.where(in_the_race, mean_logprob, -jnp.inf), 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("samples",))
@with_standard_modes
def _run(job: TextJob, *, samples: int) -> TextResult:
    n, batch = samples, len(job.lengths)
    writers = texts.forked(job.writers, n)
    grouped = lambda x: x.reshape(batch, n)

    def add(total: Array, info: Info, count: Array) -> Array:
        assert info.logprobs is not None
        inside = jnp.arange(info.logprobs.shape[1]) < count[:, None]
        return total + jnp.sum(jnp.where(inside, info.logprobs, 0.0), 1)

    def cannot_win(length: Array, ended: Array) -> Array:
        done, long = grouped(ended), grouped(length)
        shortest = jnp.min(jnp.where(done, long, jnp.iinfo(jnp.int32).max), 1, keepdims=True)
        return (long >= shortest).reshape(-1)

    text = texts.fork(job.writers, job.begin(), n)
    text, written = texts.extend(writers, text, 0, observe=add, observations=jnp.zeros((batch * n,)), halt=cannot_win)
    lengths, ended = grouped(text.written), grouped(text.ended)
    mean = grouped(written.observations) / jnp.maximum(lengths, 1)
    winner = winners(lengths, ended, mean)
    best = texts.select(writers, text, jnp.arange(batch) * n + winner)
    spent = lambda x: jnp.sum(x.reshape(batch, n, -1), 1)
    best = best._replace(passes=spent(text.passes), read=spent(text.read))
    return result(best, Race(winner, lengths, ended, mean))
