"""Power-SMC: particles that follow the power law p(y | x)^alpha of whole texts.

Azizi et al.: Power-SMC: Low-Latency Sequence-Level Power Sampling for Training-Free
LLM Reasoning (2026), arXiv 2602.10273.

Rule: n particles are drawn at temperature 1 / alpha, q(v) = p(v)^alpha / sum_u p(u)^alpha. After t tokens a particle
has the log-weight a_t log p(y) - log q(y) of its text y, with the ramp a_t = 1 + (alpha - 1) min(t / ramp, 1). All
particles of a prompt share a_t, also those that ended earlier: t counts the tokens of the longest. When the last one
ends, all are raised to alpha. With ramp = 1 a token adds log sum_v p(v)^alpha, whichever token was drawn. After each
block of tokens, a prompt with an ESS below kappa n is resampled. The text is one particle, drawn by weight.
Guarantee: lossy, as the target law differs from the model's distribution. The law of a particle converges to p^alpha
as n grows. For any n, exp(log_z) has the mean sum_y p(y)^alpha. With alpha = 1 it is plain sampling.
Deviations: there is no top-p, which would remove mass that p^alpha has. Every particle has a copy of the prompt's
cache. A ramp longer than `max_new_tokens` ends with the text. Sums of log-probabilities telescope once per block, so
the exponent changes at the ends of blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import particles as smc
from specjax.collaborate.methods.reward_smc import CUTS
from specjax.collaborate.particles import Particles
from specjax.collaborate.prepare import TextJob, number, prepare_texts, refuse, whole
from specjax.collaborate.results import TextResult, result
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.types import Array, Drafter, Info, Target

METHOD = Method(
    name="power_smc",
    kind="collaboration",
    guarantee="lossy",
    summary="samples whole texts from the power distribution p^alpha by sequential Monte Carlo",
    paper="Azizi et al. 2026, arXiv 2602.10273",
    options=(
        Option("alpha", "float", 4.0, "exponent of the distribution"),
        Option("particles", "int", 64, "particles per prompt"),
        Option("block", "int", 64, "tokens between two resampling tests"),
        Option("kappa", "float", 0.5, "effective fraction of particles below which they are resampled"),
        Option("ramp", "int", 400, "tokens until the exponent has grown to alpha, at most --max-new-tokens"),
        shared.WRITING_DRAFTER,
    ),
)


class Power(NamedTuple):
    """The log-probabilities of a particle, and its log-weight apart from resampling."""

    log_p: Array  # float32[R], log-probability of its tokens under the model
    log_q: Array  # float32[R], log-probability of its tokens under the proposal
    log_w: Array  # float32[R], a_t log p - log q at the end of the last block


def power_smc(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    alpha: float = 4.0,
    particles: int = 64,
    block: int = 64,
    kappa: float = 0.5,
    ramp: int = 400,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode a text that approximately follows the law p^alpha.

    Args:
      alpha: the power, at least 1. particles: n per prompt. block: tokens between two resampling tests.
      kappa: fraction of n below which the ESS triggers resampling.
      ramp: tokens until the exponent reaches alpha, at most `max_new_tokens`.
      drafter: drafts for all particles. settings: settings of `decode`: eos, capacity.

    Returns: TextResult with the passes and tokens read of all particles; its log is a `particles.Sample`.
    Raises: UsageError for a setting outside its range, or if the model's outputs are not numbers.
    """
    checked = check_options(alpha=alpha, particles=particles, block=block, kappa=kappa, ramp=ramp, **settings)
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=checked,
        keep=Keep(logits=True), rewinds=False,
    )  # fmt: skip
    ramp = min(ramp, max_new_tokens)
    done = _run(job, jnp.float32(alpha), jnp.int32(ramp), jnp.int32(block), jnp.float32(kappa), n=particles)
    return smc.mark(done).cut(max_new_tokens)


def check_options(*, alpha: float, particles: int, block: int, kappa: float, ramp: int, **settings: Any) -> Settings:
    """Check the options, and return the settings of the particles, with temperature 1 / alpha. Raises: UsageError."""
    number("alpha", alpha, alpha >= 1, "at least 1")
    number("alpha", alpha, alpha < float("inf"), "finite")
    number("kappa", kappa, 0 <= kappa <= 1, "from 0 to 1")
    for name, value in (("particles", particles), ("block", block), ("ramp", ramp)):
        whole(name, value, 1)
    refuse(settings, ("temperature",), "is 1 / alpha")
    refuse(settings, CUTS, "leaves no mass where p^alpha has some")
    return Settings(temperature=1 / alpha, **settings)


def exponent(t: Array, alpha: Array, ramp: Array) -> Array:
    """Return a_t float32 after t int32 tokens: 1 without tokens, alpha from `ramp` tokens on."""
    return 1 + (alpha - 1) * jnp.minimum(t / ramp, 1.0)


def add_tokens(power: Power, logits: Array, tokens: Array, count: Array, alpha: Array) -> Power:
    """Add the first `count` int32[R] of tokens [R, N], drawn from logits float32[R, N, V] of temperature 1 / alpha."""
    log_q = jax.nn.log_softmax(logits, -1)
    log_p = jax.nn.log_softmax(logits / alpha, -1)  # the temperature undone
    inside = jnp.arange(tokens.shape[1]) < count[:, None]
    place = jnp.clip(tokens, 0, logits.shape[-1] - 1)[:, :, None]
    total = lambda x: jnp.sum(jnp.where(inside, take_along(x, place, 2)[:, :, 0], 0.0), 1)
    return power._replace(log_p=power.log_p + total(log_p), log_q=power.log_q + total(log_q))


@functools.partial(jax.jit, static_argnames=("n",))
@with_standard_modes
def _run(job: TextJob, alpha: Array, ramp: Array, block: Array, kappa: Array, *, n: int) -> TextResult:
    writers = texts.forked(job.writers, n)

    def observe(power: Power, info: Info, count: Array) -> Power:
        assert info.logits is not None
        return add_tokens(power, info.logits, info.tokens, count, alpha)

    def grow(particles: Particles) -> Particles:
        text, written = texts.extend(
            writers, particles.text, 0, limit=block, observe=observe, observations=particles.carried
        )
        # One exponent for all particles of a prompt. Unfinished particles have written the same number of tokens.
        longest = jnp.max(text.written.reshape(-1, n), 1)
        goes_on = jnp.any(text.unfinished.reshape(-1, n), 1)
        a_t = jnp.where(goes_on, exponent(longest, alpha, ramp), alpha)
        power = written.observations
        log_w = jnp.repeat(a_t, n) * power.log_p - power.log_q
        gain = (log_w - power.log_w).reshape(-1, n)
        return smc.add_weights(particles._replace(text=text, carried=power._replace(log_w=log_w)), gain)

    text = job.begin()
    zero = jnp.zeros((len(text.length) * n,))
    particles = smc.smc(writers, smc.begin(writers, text, n, Power(zero, zero, zero)), grow, kappa)
    best, sample = smc.outcome(writers, particles)
    return result(best, sample)
