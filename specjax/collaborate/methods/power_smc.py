"""Power-SMC: particles that follow the power law p(y | x)^alpha of whole texts.

Azizi et al.: Power-SMC: Low-Latency Sequence-Level Power Sampling for Training-Free
LLM Reasoning (2026), arXiv 2602.10273.

Rule: n particles are drawn at temperature 1 / alpha, q(v) = p(v)^alpha / sum_u p(u)^alpha. A token y_t adds
(a_t - a_{t-1}) log p(y_<t) + a_t log p(y_t | y_<t) - log q(y_t) to a particle's log-weight. The exponent has the ramp
a_t = 1 + (alpha - 1) min((t + 1) / ramp, 1). A particle that ends earlier is raised to alpha at its end. With
ramp = 1 the increment is log sum_v p(v)^alpha, independent of the drawn token. After each block of tokens, a prompt
with an ESS below kappa n is resampled. The text is one particle, drawn by weight.
Guarantee: lossy, as the target law differs from the model's distribution. The law of a particle converges to p^alpha
as n grows. For any n, exp(log_z) has the mean sum_y p(y)^alpha. With alpha = 1 it is plain sampling.
Deviations: there is no top-p, which would remove mass that p^alpha has. Every particle has a copy of the prompt's
cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
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
        Option("ramp", "int", 400, "tokens until the exponent has grown to alpha"),
    ),
)


class Power(NamedTuple):
    """The log-probabilities and the weight gain of a particle."""

    log_p: Array  # float32[R], log-probability of its tokens under the model
    written: Array  # int32[R], number of its tokens
    gain: Array  # float32[R], increase of its log-weight in this block


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
      kappa: fraction of n below which the ESS triggers resampling. ramp: tokens until the exponent reaches alpha.
      drafter: drafts for all particles. settings: settings of `decode`: eos, capacity.

    Returns: TextResult with the passes and tokens read of all particles; its log is a `particles.Sample`.
    Raises: UsageError for a setting outside its range, or if the model's outputs are not numbers.
    """
    checked = check_options(alpha=alpha, particles=particles, block=block, kappa=kappa, ramp=ramp, **settings)
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, drafters=(drafter,), settings=checked,
        keep=Keep(logits=True), rewinds=False,
    )  # fmt: skip
    done = _run(job, jnp.float32(alpha), jnp.int32(ramp), jnp.int32(block), jnp.float32(kappa), n=particles)
    smc.check(done.log)
    return done.cut(max_new_tokens)


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
    """Return a_t float32 of the token t = 0, 1, ...; it is 1 for negative t."""
    return jnp.where(t < 0, 1.0, 1 + (alpha - 1) * jnp.minimum((t + 1) / ramp, 1.0))


def add_tokens(power: Power, logits: Array, tokens: Array, count: Array, alpha: Array, ramp: Array) -> Power:
    """Add the first `count` int32[R] of tokens [R, N], drawn from logits float32[R, N, V] of temperature 1 / alpha."""
    log_q = jax.nn.log_softmax(logits, -1)
    log_p = jax.nn.log_softmax(logits / alpha, -1)  # the temperature undone
    gather = lambda x: take_along(x, jnp.clip(tokens, 0, x.shape[-1] - 1)[:, :, None], 2)[:, :, 0]
    inside = jnp.arange(tokens.shape[1]) < count[:, None]
    p, q = jnp.where(inside, gather(log_p), 0.0), jnp.where(inside, gather(log_q), 0.0)
    prefix_log_p = power.log_p[:, None] + jnp.cumsum(p, 1) - p
    t = power.written[:, None] + jnp.arange(tokens.shape[1])
    current, last = exponent(t, alpha, ramp), exponent(t - 1, alpha, ramp)
    gain = jnp.where(inside, (current - last) * prefix_log_p + current * p - q, 0.0)
    return Power(power.log_p + jnp.sum(p, 1), power.written + count, power.gain + jnp.sum(gain, 1))


@functools.partial(jax.jit, static_argnames=("n",))
@with_standard_modes
def _run(job: TextJob, alpha: Array, ramp: Array, block: Array, kappa: Array, *, n: int) -> TextResult:
    writers = texts.forked(job.writers, n)

    def observe(power: Power, info: Info, count: Array) -> Power:
        assert info.logits is not None
        return add_tokens(power, info.logits, info.tokens, count, alpha, ramp)

    def grow(particles: Particles) -> Particles:
        unfinished = particles.text.unfinished
        power = particles.carried._replace(gain=jnp.zeros(unfinished.shape))
        text, written = texts.extend(writers, particles.text, 0, limit=block, observe=observe, observations=power)
        power = written.observations
        # Add the rest of the ramp for particles that end here.
        missing = (alpha - exponent(power.written - 1, alpha, ramp)) * power.log_p
        gain = power.gain + jnp.where(unfinished & ~text.unfinished, missing, 0.0)
        return smc.add_weights(particles._replace(text=text, carried=power), gain.reshape(-1, n))

    text = job.begin()
    rows = len(text.length) * n
    power = Power(jnp.zeros((rows,)), jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,)))
    particles = smc.smc(writers, smc.begin(writers, text, n, power), grow, kappa)
    best, sample = smc.outcome(writers, particles)
    return result(best, sample)
