"""Cautious next token prediction: an uncertain model samples several continuations, and the most likely one is used.

Wang et al.: Cautious Next Token Prediction (2025), arXiv 2507.03038.

Rule: H is the entropy, in nats, of the next token's distribution after processors, temperature and top-p. The number
of trials is N = int(n_min + (n_max - n_min) clip((H - 0.01) / (1.5 - 0.01), 0, 1)). If N = 1, one token is sampled.
Otherwise N trials are sampled, each up to a token with punctuation, an eos or `max_trial_tokens` tokens. The trial
with the lowest perplexity, exp(mean NLL) under the sampled distributions, is appended in full.
Guarantee: lossy. With n_max = 1 it is plain sampling, byte for byte.
Deviations: `max_trial_tokens` is 32. The trials of a round are rows, each with a copy of the cache. All n_max of them
have a copy even if the round needs fewer. Of equal trials the first is used.
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
from specjax.collaborate.segments import Segmenter
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.numerics.sampling import entropy, fold_in, warp
from specjax.processors import pipeline
from specjax.types import Array, Drafter, Info, Target

METHOD = Method(
    name="cntp",
    kind="collaboration",
    guarantee="lossy",
    summary="samples several continuations where the entropy is high, and keeps the most likely one",
    paper="Wang et al. 2025, arXiv 2507.03038",
    needs=frozenset({"segmenter"}),
    options=(
        Option("n_min", "int", 1, "minimum number of continuations"),
        Option("n_max", "int", 10, "maximum number of continuations"),
        Option("max_trial_tokens", "int", 32, "maximum number of tokens per continuation"),
        shared.WRITING_DRAFTER,
    ),
    words=(shared.steps("punctuation and line breaks"),),
)


TEMPERATURE, TOP_P = 0.8, 0.9
"""The default temperature and nucleus of the trials."""
SURE, UNSURE = 0.01, 1.5
"""Entropies in nats at which the number of trials starts to grow and reaches its maximum."""


class Trials(NamedTuple):
    """Counts of rounds with several trials, their trials, and all sampled tokens."""

    rounds: Array  # int32[B]
    trials: Array  # int32[B], of all rounds
    tokens: Array  # int32[B], of all trials, and of the tokens that are sampled without trials

    def summary(self, row: int) -> dict[str, Any]:
        """Return the counts of a row."""
        counts = {"rounds": self.rounds, "trials": self.trials, "sampled_tokens": self.tokens}
        return {name: scalar(x[row]) for name, x in counts.items()}


def cntp(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    punctuation: Segmenter,
    n_min: int = 1,
    n_max: int = 10,
    max_trial_tokens: int = 32,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Sample tokens, with several trial continuations where the entropy is high.

    Args:
      punctuation: ends of trials, such as `after_strings([".", ",", ":", ";", "?", "!", "\\n", ")", "]"], ...)`.
      n_min, n_max: number of trials. max_trial_tokens: maximum number of tokens per trial.
      drafter: drafts for all trials. settings: settings of `decode`.

    Returns: TextResult with the passes and tokens read of all trials; its log is a `Trials`.
    Raises: UsageError for a setting outside its range, or a temperature of 0, at which all trials are equal.
    """
    checked = check_options(
        n_min=n_min, n_max=n_max, max_trial_tokens=max_trial_tokens, temperature=temperature, top_p=top_p, **settings
    )
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=checked,
        keep=Keep(logprobs=True),
    )  # fmt: skip
    done = _run(job, punctuation, jnp.int32(n_min), jnp.int32(max_trial_tokens), n_max=n_max)
    return mark_failures(done).cut(max_new_tokens)


def check_options(
    *,
    n_min: int,
    n_max: int,
    max_trial_tokens: int,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    **settings: Any,
) -> Settings:
    """Check the options, and return the settings of the trials. Raises: UsageError."""
    whole("n_min", n_min, 1)
    whole("n_max", n_max, n_min, f"at least n_min, {n_min}")
    whole("max_trial_tokens", max_trial_tokens, 1)
    above_zero(temperature, "trials drawn at 0 are equal")
    return Settings(temperature=temperature, top_p=top_p, **settings)


def number_of_trials(nats: Array, n_min: Array | int, n_max: int) -> Array:
    """Return the number of trials int32[B] for entropies float32[B]."""
    share = jnp.clip((nats - SURE) / (UNSURE - SURE), 0, 1)
    return (n_min + (n_max - n_min) * share + 1e-4).astype(jnp.int32)  # 1e-4 rounds 9.99999 up to 10


def best_trial(nll: Array, count: Array, tried: Array) -> Array:
    """Return int32[B], the trial with the lowest mean NLL, for sums of NLL float32[B, n] over `count` tokens each."""
    mean = nll / jnp.maximum(count, 1)
    return jnp.argmin(jnp.where(tried & (count > 0), mean, jnp.inf), 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("n_max",))
@with_standard_modes
def _run(job: TextJob, punctuation: Segmenter, n_min: Array, max_trial_tokens: Array, *, n_max: int) -> TextResult:
    writers, n, batch = job.writers, n_max, len(job.lengths)
    many = texts.forked(writers, n)
    rows = jnp.arange(batch) * n

    def add(total: Array, info: Info, count: Array) -> Array:
        assert info.logprobs is not None
        inside = jnp.arange(info.logprobs.shape[1]) < count[:, None]
        return total - jnp.sum(jnp.where(inside, info.logprobs, 0.0), 1)

    def body(carry: tuple[texts.TextState, Trials]) -> tuple[texts.TextState, Trials]:
        text, log = carry
        unfinished, start = text.unfinished, text.length
        text, logits, _ = texts.look(writers, text, 0, unfinished)
        states = texts.processor_states(writers, text, 0, unfinished)
        logits = pipeline.process_root(writers[0].processors, states, texts.last(text), logits)
        nats = entropy(jax.nn.log_softmax(warp(logits, writers[0].sampling), -1))
        tries = number_of_trials(nats, n_min, n)
        # A round with one trial draws with the keys of plain sampling. In other rounds the keys belong to the round,
        # so no draw of a trial is repeated later, whether the trial was used or not.
        of_round = fold_in(text.keys[:, None], start[:, None, None])
        of_trials = fold_in(of_round, jnp.arange(n)[None, :, None])
        keys = jnp.where((tries > 1)[:, None, None], of_trials, jnp.broadcast_to(text.keys[:, None], of_trials.shape))
        trials = texts.fork(writers, text, n)._replace(keys=keys.reshape(batch * n, -1))
        tried = unfinished[:, None] & (jnp.arange(n) < tries[:, None])
        limit = jnp.repeat(jnp.where(tries > 1, max_trial_tokens, 1), n)
        trials, written = texts.extend(
            many, trials, 0, segmenter=punctuation, limit=limit, active=tried.reshape(-1), observe=add,
            observations=jnp.zeros((batch * n,)),
        )  # fmt: skip
        count = (trials.length - written.start).reshape(batch, n)
        winner = best_trial(written.observations.reshape(batch, n), count, tried)
        new = texts.select(many, trials, rows + winner)
        spent = lambda x, previous: previous + jnp.sum((x - jnp.repeat(previous, n, 0)).reshape(batch, n, -1), 1)
        new = new._replace(keys=text.keys, passes=spent(trials.passes, text.passes), read=spent(trials.read, text.read))
        several = tries > 1
        log = Trials(
            log.rounds + (unfinished & several),
            log.trials + jnp.where(unfinished & several, tries, 0),
            log.tokens + jnp.sum(jnp.where(tried, count, 0), 1),
        )
        return new, log

    zero = jnp.zeros((batch,), jnp.int32)
    carry = job.begin(), Trials(zero, zero, zero)
    text, log = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, carry)
    return result(text, log)
