"""Reward-guided SMC: particles that follow the model's law, reweighted by rewards of the text so far.

Sampling for Quality: Training-Free Reward-Guided LLM Decoding via Sequential Monte Carlo (2026), arXiv 2604.16453.

Rule: the target law is prod_t p(y_t | y_<t) psi_t(y_<=t), with one reward psi >= 0 per block. n particles are
drawn from q, the model at a temperature. A block multiplies a particle's weight by p / q and
  prefix: psi;
  look-ahead: psi V_t / V_{t-1}, where V is the mean, over m roll-outs from p, of the product of the future rewards.
A prompt with an ESS below kappa n is resampled. A move follows: each particle draws its last block again from p. It
accepts the new block with probability min(1, psi(new) / psi(old)), times the ratio of V with look-ahead. The text is
one particle, drawn by weight.
Guarantee: lossy, as the target law differs from the model's distribution. The law of a particle converges to the
target law as n grows. With psi = 1 it is the model's.
Deviations: the paper gives no numbers; n = 16, block = 32, kappa = 0.5 and one move are our choice. Only resampled
prompts move, and only particles that wrote in the last block. The look-ahead's V is an estimate, and each particle
stores its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import particles as smc
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.particles import Particles
from specjax.collaborate.prepare import TextJob, above_zero, number, prepare_texts, refuse, whole
from specjax.collaborate.results import TextResult, result
from specjax.collaborate.rewards import Reward, as_argument, check_reward, readers_of, score_text
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.numerics.sampling import fold_in, uniform
from specjax.types import Array, Drafter, Info, Sampling, Target

METHOD = Method(
    name="reward_smc",
    kind="collaboration",
    guarantee="lossy",
    summary="samples from the model's distribution weighted by rewards, by sequential Monte Carlo",
    paper="arXiv 2604.16453",
    needs=frozenset({"reward"}),
    options=(
        Option("particles", "int", 16, "particles per prompt"),
        Option("block", "int", 32, "tokens between two evaluations of the reward"),
        Option("kappa", "float", 0.5, "effective fraction of particles below which they are resampled"),
        Option("lookahead", "int", 0, "roll-outs that estimate future rewards; 0: use the prefix only"),
        Option(
            "move", "yes_or_no", True, "resample the last block of each particle after resampling (a Metropolis move)"
        ),
        shared.WRITING_DRAFTER,
    ),
    words=shared.reward_words(),
)


TEMPERATURE = 1.0
"""The default sampling temperature."""
CUTS = "top_k", "top_p", "min_p"
"""Settings that truncate a distribution."""
MODEL, READER = 0, 1  # writers


class Block(NamedTuple):
    """The last block of a particle."""

    start: Array  # int32[R]
    wrote: Array  # bool[R], True: the particle wrote in the last round
    log_psi: Array  # float32[R]
    log_v: Array  # float32[R], log V of the current text


def reward_smc(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    reward: Reward,
    particles: int = 16,
    block: int = 32,
    kappa: float = 0.5,
    lookahead: int = 0,
    move: bool = True,
    temperature: float = TEMPERATURE,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode a text that approximately follows the model's law times rewards.

    Args:
      reward: psi of a block, a function or a model of `reward_of`. Pass the same function in every call to avoid
        compiling again. particles: n per prompt.
      block: tokens between two rewards. kappa: fraction of n below which the ESS triggers resampling.
      lookahead: number of roll-outs m; 0 uses rewards of the prefix alone.
      move: whether particles move after resampling. temperature: temperature of q.
      drafter: drafts for all particles. settings: settings of `decode`: eos, capacity.

    Returns: TextResult with the passes and tokens read of all particles and their moves, without roll-outs, for the
    target and a reward model; its log is a `particles.Sample`.
    Raises: UsageError for a setting outside its range, a reward that is NaN or infinite, or no particle left alive.
    """
    checked = check_options(
        reward=reward, particles=particles, block=block, kappa=kappa, lookahead=lookahead, temperature=temperature,
        **settings,
    )  # fmt: skip
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=checked,
        keep=Keep(logits=True), rewinds=move, readers=readers_of(reward),
    )  # fmt: skip
    numbers = jnp.int32(block), jnp.float32(kappa)
    done = _run(job, *numbers, as_argument(reward), n=particles, lookahead=lookahead, move=move)
    return smc.mark(done).cut(max_new_tokens)


def check_options(
    *, reward: Any, particles: int, block: int, kappa: float, lookahead: int, temperature: float = TEMPERATURE,
    **settings: Any,
) -> Settings:  # fmt: skip
    """Check the options, and return the settings of the particles. Raises: UsageError."""
    check_reward("reward", reward)
    number("kappa", kappa, 0 <= kappa <= 1, "from 0 to 1")
    whole("lookahead", lookahead, 0)
    whole("particles", particles, 1)
    whole("block", block, 1)
    above_zero(temperature, "particles drawn at 0 are equal")
    refuse(settings, CUTS, "leaves no mass where the target law has some")
    return Settings(temperature=temperature, **settings)


def _as_model(writers: Writers) -> Writers:
    """Return the writers at temperature 1, the temperature of the target law."""
    return tuple(dataclasses.replace(writer, sampling=Sampling(jnp.float32(1.0))) for writer in writers)


def _log_reward(
    reward: Reward, writers: Writers, text: TextState, start: Array, unfinished: Array
) -> tuple[TextState, Array]:
    """Return the text, and log psi float32[R] of the blocks from `start` on; 0 in rows that wrote no block."""
    text, psi = score_text(reward, writers, text, start, unfinished, READER)
    psi = jnp.where(psi >= 0, psi, jnp.nan)  # a reward below 0 is invalid
    return text, jnp.where(unfinished, jnp.log(psi), 0.0)


def look_ahead(writers: Writers, text: TextState, reward: Reward, block: Array, m: int, purpose: Array) -> Array:
    """Return log V float32[R] of texts, from the mean of m roll-outs each; 0 for finished texts."""
    many, rolls = texts.forked(writers, m), texts.fork(writers, text, m)
    keys = fold_in(fold_in(rolls.keys, smc.LOOK), purpose)

    def body(carry: tuple[TextState, Array]) -> tuple[TextState, Array]:
        text, total = carry
        unfinished = text.unfinished
        new, written = texts.extend(many, text, MODEL, limit=block)
        new, log_psi = _log_reward(reward, many, new, written.start, unfinished)
        return new, total + log_psi

    carry = rolls._replace(keys=keys), jnp.zeros(rolls.length.shape)
    _, total = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, carry)
    return jax.nn.logsumexp(total.reshape(-1, m), 1) - jnp.log(m)


@functools.partial(jax.jit, static_argnames=("n", "lookahead", "move"))
@with_standard_modes
def _run(
    job: TextJob, block: Array, kappa: Array, reward: Reward, *, n: int, lookahead: int, move: bool
) -> TextResult:  # fmt: skip
    writers = texts.forked(job.writers, n)
    as_model = _as_model(writers)
    temperature = writers[0].sampling.temperature

    def observe(gain: Array, info: Info, count: Array) -> Array:
        assert info.logits is not None and temperature is not None
        plain = info.logits * temperature.reshape(-1, 1, 1)  # one temperature, or one per row
        log_p, log_q = jax.nn.log_softmax(plain, -1), jax.nn.log_softmax(info.logits, -1)
        token = jnp.clip(info.tokens, 0, log_p.shape[-1] - 1)[:, :, None]
        ratio = (take_along(log_p, token, 2) - take_along(log_q, token, 2))[:, :, 0]
        return gain + jnp.sum(jnp.where(jnp.arange(ratio.shape[1]) < count[:, None], ratio, 0.0), 1)

    def value(text: TextState, number: Array) -> Array:
        if not lookahead:
            return jnp.zeros(text.length.shape)
        return look_ahead(as_model, text, reward, block, lookahead, number)

    def grow(particles: Particles) -> Particles:
        unfinished = particles.text.unfinished
        text, written = texts.extend(
            writers, particles.text, MODEL, limit=block, observe=observe, observations=jnp.zeros(unfinished.shape)
        )
        text, log_psi = _log_reward(reward, writers, text, written.start, unfinished)
        log_v = jnp.where(unfinished, value(text, 2 * particles.round), particles.carried.log_v)
        # A particle with V = 0 keeps its weight 0, whatever the new estimate of V is.
        ahead = jnp.where(log_v > -jnp.inf, log_v - particles.carried.log_v, -jnp.inf)
        gain = jnp.where(unfinished, written.observations + log_psi + ahead, 0.0)
        gain = jnp.where(particles.carried.log_v > -jnp.inf, gain, -jnp.inf)
        new = particles._replace(text=text, carried=Block(written.start, unfinished, log_psi, log_v))
        return smc.add_weights(new, gain.reshape(-1, n))

    def moved(particles: Particles, resampled: Array) -> Particles:
        text, old = particles.text, particles.carried
        tries = jnp.repeat(resampled, n) & old.wrote
        keys = fold_in(fold_in(text.keys, smc.MOVE), particles.round)
        other = texts.rewind(writers, text, jnp.where(tries, old.start, text.length))._replace(keys=keys)
        other, _ = texts.extend(as_model, other, MODEL, limit=block, active=tries)
        other, log_psi = _log_reward(reward, as_model, other, old.start, tries)
        log_v = jnp.where(tries, value(other, 2 * particles.round + 1), old.log_v)
        u = uniform(fold_in(keys[:, 0], -1), 1)[:, 0]
        takes = tries & (jnp.log(u) < log_psi + log_v - old.log_psi - old.log_v)
        valid = particles.valid & ~jnp.any(jnp.isnan(log_psi).reshape(-1, n), 1)
        text = batch_axes.where_rows(takes, other, text, texts.axes(writers, text))
        text = text._replace(keys=particles.text.keys, passes=other.passes, read=other.read)
        pick = lambda new, old: jnp.where(takes, new, old)
        last = old._replace(log_psi=pick(log_psi, old.log_psi), log_v=pick(log_v, old.log_v))
        return particles._replace(text=text, carried=last, valid=valid)

    text = job.begin()
    rows = len(text.length) * n
    zero = jnp.zeros((rows,))
    block_0 = Block(jnp.repeat(text.length, n), jnp.zeros((rows,), bool), zero, zero)
    start = smc.begin(writers, text, n, block_0)
    particles = smc.smc(writers, start, grow, kappa, moved if move else None)
    best, sample = smc.outcome(writers, particles)
    return result(best, sample, MODEL)
