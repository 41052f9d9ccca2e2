"""Cautious next token prediction: where the model is unsure it tries several continuations, and keeps the likeliest.

Wang et al.: Cautious Next Token Prediction (2025), arXiv 2507.03038.

Rule: H is the entropy, in nats, of the next token's distribution, as processors, temperature and top-p shape it, and
N = int(n_min + (n_max - n_min) clip((H - 0.01) / (1.5 - 0.01), 0, 1)). For N = 1 one token is sampled. Else N trials
are sampled, each up to a token with punctuation in it, an eos or `most` tokens; the one with the lowest perplexity,
exp(mean NLL) under the distributions that were sampled, is kept whole.
Guarantee: lossy. With n_max = 1 it is plain sampling, byte for byte.
Deviations: `most` is 32. The trials of a round are rows with a copy of the cache each, and all n_max of them have one,
whether the round needs them or not. Of equal trials the first is kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.prepare import TextJob, prepare_texts, whole
from specjax.collaborate.results import TextResult, result
from specjax.collaborate.segments import Segmenter
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
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
        Option("most", "int", 32, "maximum number of tokens per continuation"),
    ),
)


SURE, UNSURE = 0.01, 1.5
"""Nats, from which and up to which more trials are made."""


class Trials(NamedTuple):
    """What was tried."""

    rounds: Array  # int32[B]
    trials: Array  # int32[B], of all rounds
    tokens: Array  # int32[B], of all trials


def cntp(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    punctuation: Segmenter,
    n_min: int = 1,
    n_max: int = 10,
    most: int = 32,
    temperature: float = 0.8,
    top_p: float = 0.9,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Sampling that looks ahead where it is unsure.

    Args:
      punctuation: where trials end, such as `after_strings([".", ",", ":", ";", "?", "!", "\\n", ")", "]"], ...)`.
      n_min, n_max: trials. most: tokens of one at most. drafter: drafts for all trials. settings: of `decode`.

    Returns: TextResult, whose passes and tokens read are those of all trials; its log is a `Trials`.
    Raises: UsageError for a setting outside its range, or a temperature of 0, at which all trials are equal.
    """
    whole("n_min", n_min, 1)
    whole("n_max", n_max, n_min, f"at least n_min, {n_min}")
    whole("most", most, 1)
    if isinstance(temperature, int | float) and temperature <= 0:
        raise UsageError("temperature must be above 0, as trials drawn at 0 are equal; use decode for greedy text")
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, drafters=(drafter,),
        settings=Settings(temperature=temperature, top_p=top_p, **settings), keep=Keep(logprobs=True),
    )  # fmt: skip
    return _run(job, punctuation, jnp.int32(n_min), jnp.int32(most), n_max=n_max).cut(max_new_tokens)


def number_of_trials(nats: Array, n_min: Array | int, n_max: int) -> Array:
    """int32[B] of entropies float32[B]."""
    share = jnp.clip((nats - SURE) / (UNSURE - SURE), 0, 1)
    return (n_min + (n_max - n_min) * share + 1e-4).astype(jnp.int32)  # of 9.99999 the whole number meant is 10


def best_trial(nll: Array, count: Array, tried: Array) -> Array:
    """int32[B]: the trial with the lowest mean, of sums of NLL float32[B, n] over `count` tokens each."""
    mean = nll / jnp.maximum(count, 1)
    return jnp.argmin(jnp.where(tried & (count > 0), mean, jnp.inf), 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("n_max",))
@without_x64
def _run(job: TextJob, punctuation: Segmenter, n_min: Array, most: Array, *, n_max: int) -> TextResult:
    writers, n, batch = job.writers, n_max, len(job.lengths)
    many = texts.forked(writers, n)
    rows = jnp.arange(batch) * n

    def add(total: Array, info: Info, kept: Array) -> Array:
        assert info.logprobs is not None
        inside = jnp.arange(info.logprobs.shape[1]) < kept[:, None]
        return total - jnp.sum(jnp.where(inside, info.logprobs, 0.0), 1)

    def body(carry: tuple[texts.TextState, Trials]) -> tuple[texts.TextState, Trials]:
        text, log = carry
        going, start = text.going, text.length
        text, logits, _ = texts.look(writers, text, 0, going)
        known = texts.known_to_processors(writers, text, 0, going)
        logits = pipeline.process_root(writers[0].processors, known, texts.last(text), logits)
        nats = entropy(jax.nn.log_softmax(warp(logits, writers[0].sampling), -1))
        tries = number_of_trials(nats, n_min, n)
        # A round that is no trial draws as plain sampling does; what a trial drew, whether it was kept or not, is not
        # drawn again: its keys belong to the round.
        of_round = fold_in(text.keys[:, None], start[:, None, None])
        of_trials = fold_in(of_round, jnp.arange(n)[None, :, None])
        keys = jnp.where((tries > 1)[:, None, None], of_trials, jnp.broadcast_to(text.keys[:, None], of_trials.shape))
        trials = texts.fork(writers, text, n)._replace(keys=keys.reshape(batch * n, -1))
        tried = going[:, None] & (jnp.arange(n) < tries[:, None])
        limit = jnp.repeat(jnp.where(tries > 1, most, 1), n)
        trials, written = texts.extend(
            many, trials, 0, segmenter=punctuation, limit=limit, active=tried.reshape(-1), see=add,
            seen=jnp.zeros((batch * n,)),
        )  # fmt: skip
        count = (trials.length - written.start).reshape(batch, n)
        winner = best_trial(written.seen.reshape(batch, n), count, tried)
        new = texts.select(many, trials, rows + winner)
        spent = lambda x, before: before + jnp.sum((x - jnp.repeat(before, n, 0)).reshape(batch, n, -1), 1)
        new = new._replace(keys=text.keys, passes=spent(trials.passes, text.passes), read=spent(trials.read, text.read))
        several = tries > 1
        log = Trials(
            log.rounds + (going & several),
            log.trials + jnp.where(going & several, tries, 0),
            log.tokens + jnp.sum(jnp.where(tried, count, 0), 1),
        )
        return new, log

    zero = jnp.zeros((batch,), jnp.int32)
    carry = job.begin(), Trials(zero, zero, zero)
    text, log = jax.lax.while_loop(lambda carry: jnp.any(carry[0].going), body, carry)
    return result(text, log)
