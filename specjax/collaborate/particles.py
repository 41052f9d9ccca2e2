"""Particles: weighted samples of a text, which follow a distribution that cannot be sampled directly.

This module provides weights and resampling as plain functions. Row b n + i is particle i of prompt b. A weight is
stored as its logarithm. Random draws belong to the place of a particle, so two copies of one particle diverge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.results import TextResult, mark_failures, scalar
from specjax.numerics.sampling import fold_in, uniform
from specjax.types import Array, PyTree

RESAMPLE, CHOOSE, MOVE, LOOK = 101, 102, 103, 104
"""Purposes of a prompt's keys, in addition to the draws of tokens."""


class Particles(NamedTuple):
    """n weighted texts for each of B prompts."""

    text: TextState  # B n rows
    logw: Array  # float32[B, n], log-weights since the last resampling
    log_z: Array  # float32[B], logarithm of the normaliser's estimate, up to the last resampling
    carried: PyTree  # state of each particle, arrays [B n, ...]
    keys: Array  # key[B], for draws that concern a whole prompt
    round: Array  # int32[], number of blocks so far
    resampled: Array  # int32[B], number of resamplings
    size: Array  # float32[B], effective sample size at the end of the prompt's last block
    valid: Array  # bool[B], True: all weights were numbers
    alive: Array  # bool[B], True: some weights were above 0


def begin(writers: Writers, text: TextState, n: int, carried: PyTree) -> Particles:
    """Return `n` equally weighted particles for each row of an unforked text."""
    batch = len(text.length)
    zero = jnp.zeros((batch,))
    return Particles(
        texts.fork(writers, text, n), jnp.zeros((batch, n)), zero, carried, text.keys[:, 0], jnp.int32(0),
        jnp.zeros((batch,), jnp.int32), jnp.full((batch,), float(n)), jnp.ones((batch,), bool),
        jnp.ones((batch,), bool),
    )  # fmt: skip


def ess(logw: Array) -> Array:
    """Return float32[B], the effective sample size 1 / sum w^2 of the normalised weights of logw [B, n]."""
    w = jax.nn.softmax(logw, 1)
    return 1 / jnp.sum(w * w, 1)


def systematic(u0: Array, logw: Array) -> Array:
    """Return int32[B, n], the ancestors a_i = #{j: cumsum(w)_j <= (u0 + i) / n}, for one uniform u0 float32[B]."""
    n = logw.shape[1]
    total = jnp.cumsum(jax.nn.softmax(logw, 1), 1)
    u = (u0[:, None] + jnp.arange(n)) / n
    # Both arrays are sorted, so a binary search counts without a table of n x n.
    ancestors = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(total, u).astype(jnp.int32)
    # Rounding may leave the last sum below 1. No ancestor comes after the last particle with a weight above 0.
    last = n - 1 - jnp.argmax((logw > -jnp.inf)[:, ::-1], 1)
    return jnp.minimum(ancestors, last[:, None].astype(jnp.int32))


def add_weights(particles: Particles, increment: Array) -> Particles:
    """Add `increment` float32[B, n] to the log-weights.

    A prompt with a NaN or +inf increment becomes invalid. A prompt with only zero weights is no longer alive. The
    weights of both are reset to 0 and their texts stay as they are.
    """
    valid = particles.valid & ~jnp.any(jnp.isnan(increment) | (increment == jnp.inf), 1)
    logw = jnp.where(valid[:, None], particles.logw + increment, 0.0)
    alive = particles.alive & jnp.any(logw > -jnp.inf, 1)
    return particles._replace(logw=jnp.where(alive[:, None], logw, 0.0), valid=valid, alive=alive)


def resample(writers: Writers, particles: Particles, kappa: Array | float) -> tuple[Particles, Array]:
    """Resample the prompts with an ESS below kappa n, and return the particles and a mask bool[B] of these prompts.

    writers: forked. If no prompt needs resampling, all particles stay. Keys stay in their places.
    """
    batch, n = particles.logw.shape
    needs = particles.valid & particles.alive & (ess(particles.logw) < kappa * n)

    def move_particles(particles: Particles) -> Particles:
        keys = fold_in(fold_in(particles.keys, RESAMPLE), particles.round)
        ancestors = systematic(uniform(keys, 1)[:, 0], particles.logw)
        ancestors = jnp.where(needs[:, None], ancestors, jnp.arange(n))
        rows = (jnp.arange(batch)[:, None] * n + ancestors).reshape(-1)
        text, old = texts.select(writers, particles.text, rows), particles.text
        mean = jax.nn.logsumexp(particles.logw, 1) - jnp.log(n)
        return particles._replace(
            text=text._replace(keys=old.keys, passes=old.passes, read=old.read),
            carried=jax.tree.map(lambda x: x[rows], particles.carried),
            logw=jnp.where(needs[:, None], 0.0, particles.logw),
            log_z=particles.log_z + jnp.where(needs, mean, 0.0),
            resampled=particles.resampled + needs,
        )

    return jax.lax.cond(jnp.any(needs), move_particles, lambda particles: particles, particles), needs


def choose(particles: Particles) -> Array:
    """Return int32[B], one particle per prompt, drawn by weight."""
    keys = fold_in(particles.keys, CHOOSE)
    total = jnp.cumsum(jax.nn.softmax(particles.logw, 1), 1)
    u = uniform(keys, 1) * total[:, -1:]
    return jnp.minimum(jnp.sum(total <= u, 1, dtype=jnp.int32), particles.logw.shape[1] - 1)


class Sample(NamedTuple):
    """The particles of each prompt, and the index of the returned one."""

    choice: Array  # int32[B], the particle
    logw: Array  # float32[B, n]
    tokens: Array  # int32[B, n, L], the texts of all particles without their prompts, then -1
    lengths: Array  # int32[B, n]
    log_z: Array  # float32[B], estimate of the target law's normaliser
    resampled: Array  # int32[B], number of resamplings
    size: Array  # float32[B], effective sample size of the final weights, before any resampling of them
    valid: Array  # bool[B]
    alive: Array  # bool[B]

    def summary(self, row: int) -> dict[str, Any]:
        """Return the effective sample size of a row, its resamplings, and the tokens of its particles."""
        return {
            "effective_sample_size": scalar(self.size[row]),
            "resamplings": scalar(self.resampled[row]),
            "log_normaliser": scalar(self.log_z[row]),
            "particle_tokens": int(self.lengths[row].sum()),
        }


def mark(done: TextResult) -> TextResult:
    """Mark the prompts without valid weights. Raises: RowsFailedError if there is no other prompt."""
    return mark_failures(done, {INVALID: ~done.log.valid, DEAD: ~done.log.alive})


INVALID = "a particle's weight is NaN; rewards must be numbers of at least 0, and model outputs must be numbers"
DEAD = "no particle is alive, as every reward was 0; give more particles, or a reward above 0"


def outcome(writers: Writers, particles: Particles) -> tuple[TextState, Sample]:
    """Return the chosen text with the total cost of all particles, and their `Sample`. writers: forked."""
    (batch, n), text = particles.logw.shape, particles.text
    choice = choose(particles)
    index = jnp.arange(text.tokens.shape[1])
    place = jnp.minimum(text.prompt[:, None] + index, len(index) - 1)
    new = jnp.where(index < text.written[:, None], take_along(text.tokens, place, 1), -1)
    best = texts.select(writers, text, jnp.arange(batch) * n + choice)
    spent = lambda x: jnp.sum(x.reshape(batch, n, -1), 1)
    best = best._replace(passes=spent(text.passes), read=spent(text.read))
    sample = Sample(
        choice,
        particles.logw,
        new.reshape(batch, n, -1),
        text.written.reshape(batch, n),
        particles.log_z + jax.nn.logsumexp(particles.logw, 1) - jnp.log(n),
        particles.resampled,
        particles.size,
        particles.valid,
        particles.alive,
    )
    return best, sample


Grow = Callable[[Particles], Particles]
"""A function that adds one block to every unfinished particle and updates its weight."""


Move = Callable[[Particles, Array], Particles]
"""A function that moves the particles of the resampled prompts bool[B]. It leaves their distribution invariant."""


def smc(
    writers: Writers, particles: Particles, grow: Grow, kappa: Array | float, move: Move | None = None
) -> Particles:
    """Write blocks, each followed by resampling, until all particles of all prompts have ended."""

    def unfinished(particles: Particles) -> Array:
        """Return bool[B], the prompts with a particle that may continue."""
        fine = particles.valid & particles.alive
        return fine & jnp.any(particles.text.unfinished.reshape(particles.logw.shape), 1)

    def body(particles: Particles) -> Particles:
        writes, particles = unfinished(particles), grow(particles)
        particles = particles._replace(size=jnp.where(writes, ess(particles.logw), particles.size))
        particles, resampled = resample(writers, particles, kappa)
        if move is not None:
            particles = move(particles, resampled)
        return particles._replace(round=particles.round + 1)

    return jax.lax.while_loop(lambda particles: jnp.any(unfinished(particles)), body, particles)
