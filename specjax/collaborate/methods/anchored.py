"""Anchored decoding: the text of a risky model, within a divergence budget from a safe model.

He et al.: Anchored Decoding: Provably Reducing Copyright Risk for Any Language Model (2026),
arXiv 2602.07120.

Rule: with p_s safe and p_r risky, q_theta = p_s^(1 - theta) p_r^theta / Z. At token t = 0, 1, ... the budget is
k_t = max(0, (t + 1) k - debt - spent). Theta is the largest value in [0, 1] with KL(q_theta || p_s) <= k_t. The token
is drawn from q_theta, and its divergence is added to `spent`. The debt measures the divergence on the prompt: the
mean of the `tokens` largest log p_r / p_s of its tokens, or 0.
Guarantee: lossy, with a bound. For every text, the sum of the divergences of its T tokens is at most k T. So
KL(law of the text || law of the safe model) <= k T. With k = 0 it is the safe model, byte for byte.
Deviations: both models share one vocabulary, so there is no fusion over bytes. Temperature shapes both models, and
no setting truncates their distributions.
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
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, above_zero, number, prepare_texts, refuse, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalar
from specjax.collaborate.routing import token_by_token
from specjax.engine.job import Parts
from specjax.engine.packing import Prompts
from specjax.engine.prefill import CHUNK, prefill_and_read
from specjax.engine.prepare import Settings
from specjax.numerics.sampling import warp
from specjax.types import Array, Target

METHOD = Method(
    name="anchored",
    kind="collaboration",
    guarantee="lossy",
    summary="decodes a risky model within a budget of k nats per token of KL divergence from a safe model",
    paper="He et al. 2026, arXiv 2602.07120",
    needs=frozenset({"safe"}),
    options=(
        Option("budget", "float", 0.15, "divergence budget k in nats per token"),
        Option("debt", "yes_or_no", True, "charge the divergence on the prompt to the budget"),
        Option("tokens", "int", 5, "last prompt tokens for the divergence on the prompt"),
    ),
)


TEMPERATURE = 1.0
"""The default sampling temperature."""
SAFE, RISKY = 0, 1
NEWTON, BISECTIONS = 8, 12
ROUNDING = 1e-5
"""Nats of a budget that are reserved for rounding errors of float32, with log p_r / p_s up to a hundred."""
FARTHEST = 1e4
"""Negated lower bound of log p_r / p_s, so that the path stays continuous where p_r has no mass."""


class Budget(NamedTuple):
    """The budget that a text has spent, in nats."""

    spent: Array  # float32[B]
    debt: Array  # float32[B]
    theta: Array  # float32[B], sum over its tokens
    tokens: Array  # int32[B], number of its tokens

    def summary(self, row: int) -> dict[str, Any]:
        """Return the divergence that a row spent, its debt, and the mean of theta."""
        mean = self.theta[row] / max(int(self.tokens[row]), 1)
        nats = {"spent_nats": self.spent, "debt_nats": self.debt}
        return {name: scalar(x[row]) for name, x in nats.items()} | {"mean_theta": scalar(mean)}


def anchored(
    safe: Target,
    risky: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    budget: float = 0.15,
    debt: bool = True,
    tokens: int = 5,
    temperature: float = TEMPERATURE,
    **settings: Any,
) -> TextResult:
    """Decode with the risky model, within a divergence budget from the safe model.

    Args:
      budget: k, nats per token. debt: whether the divergence on the prompt is charged to the budget.
      tokens: number of prompt tokens in this divergence. temperature: sampling temperature of both models.
      settings: settings of `decode`: eos, capacity.

    Returns: TextResult of the writers safe, risky; its log is a `Budget`. The risky model is the author of a token
    where theta is above 0.
    Raises: UsageError for a setting outside its range, or models of different vocabularies.
    """
    checked = check_options(budget=budget, tokens=tokens, temperature=temperature, **settings)
    job = prepare_texts(
        (safe, risky), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, settings=checked
    )
    done = _run(job, jnp.float32(budget), debt=debt, tokens=tokens)
    return mark_failures(done).cut(max_new_tokens)


def check_options(*, budget: float, tokens: int, temperature: float = TEMPERATURE, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    number("budget", budget, budget >= 0, "at least 0")
    whole("tokens", tokens, 1)
    above_zero(temperature, "the divergence of greedy texts is 0 or infinite")
    refuse(settings, ("top_k", "top_p", "min_p", "processors"), "would change a distribution after its budget is set")
    return Settings(temperature=temperature, **settings)


def fuse(log_s: Array, log_r: Array, budget: Array) -> tuple[Array, Array, Array]:
    """Fuse log-probabilities [B, V] within a budget float32[B].

    Returns: log q float32[B, V], theta float32[B], and KL(q || p_s) float32[B].
    """
    inside = log_s > -jnp.inf
    log_r = jax.nn.log_softmax(jnp.where(inside, log_r, -jnp.inf), -1)
    apart = jnp.where(inside, jnp.maximum(log_r - log_s, -FARTHEST), 0.0)

    def at(theta: Array) -> tuple[Array, Array, Array]:
        """Return log q, KL and its derivative."""
        x = jnp.where(inside, log_s + theta[:, None] * apart, -jnp.inf)
        log_z = jax.nn.logsumexp(x, -1)
        q = jnp.exp(x - log_z[:, None])
        mean = jnp.sum(q * apart, -1)
        variance = jnp.sum(q * (apart - mean[:, None]) ** 2, -1)
        return x - log_z[:, None], jnp.maximum(theta * mean - log_z, 0.0), theta * variance

    budget, one = budget - ROUNDING, jnp.ones_like(budget)

    def narrow(i: Array, bracket: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, theta = bracket
        _, kl, slope = at(theta)
        low, high = jnp.where(kl <= budget, theta, low), jnp.where(kl <= budget, high, theta)
        step, middle = theta - (kl - budget) / jnp.maximum(slope, 1e-12), (low + high) / 2
        within = (step > low) & (step < high) & (i < NEWTON - 1)
        return low, high, jnp.where(within, step, middle)

    low, _, _ = jax.lax.fori_loop(0, NEWTON + BISECTIONS, narrow, (0 * one, one, one / 2))
    fits = at(one)[1] <= budget
    theta = jnp.where(budget <= 0, 0.0, jnp.where(fits, 1.0, low))
    log_q, kl, _ = at(theta)
    return jnp.where((theta == 0)[:, None], log_s, log_q), theta, jnp.where(theta == 0, 0.0, kl)


def prompt_debt(log_s: Array, log_r: Array, mask: Array, tokens: int) -> Array:
    """Return float32[B], the mean of the `tokens` largest values log p_r / p_s, with negative values counted as 0.

    mask: bool[B, L], the tokens of log_s and log_r [B, L] that count.
    """
    ratio = jnp.where(mask, jnp.maximum(log_r - log_s, 0.0), 0.0)
    count = jnp.minimum(jnp.sum(mask, 1), tokens)
    return jnp.sum(jax.lax.top_k(ratio, min(tokens, ratio.shape[1]))[0], 1) / jnp.maximum(count, 1)


def prompt_logprobs(writer: Parts, tokens: Array, length: Array) -> Array:
    """Return float32[B, L], log p after temperature of each prompt token except the first; 0 elsewhere."""
    target, (batch, size) = writer.target, tokens.shape

    def see(carry: tuple[Array, Array], window: Array, count: Array, output) -> tuple[Array, Array]:
        start, logprobs = carry
        place = start + 1 + jnp.arange(CHUNK)
        following = jnp.take(tokens, place, axis=1, mode="clip")
        log_p = jax.nn.log_softmax(warp(output.logits, writer.sampling), -1)
        values = take_along(log_p, following[:, :, None], 2)[:, :, 0]
        values = jnp.where(jnp.arange(CHUNK) < count[:, None], values, 0.0)
        return start + CHUNK, logprobs.at[:, place].set(values, mode="drop")

    cache = target.model.init_cache(target.params, None, batch, size)
    carry = jnp.int32(0), jnp.zeros(tokens.shape)
    return prefill_and_read(target.model, target.params, cache, tokens, length - 1, see, carry)[1][1]


@functools.partial(jax.jit, static_argnames=("debt", "tokens"))
@with_standard_modes
def _run(job: TextJob, budget: Array, *, debt: bool, tokens: int) -> TextResult:
    writers, text = job.writers, job.begin()
    owed = jnp.zeros(text.length.shape)
    if debt:
        log_p = [prompt_logprobs(writer, job.tokens, job.lengths) for writer in writers]
        place = jnp.arange(job.tokens.shape[1])
        owed = prompt_debt(log_p[SAFE], log_p[RISKY], (place > 0) & (place < job.lengths[:, None]), tokens)

    def choose(text: TextState, state: Budget, unfinished: Array):
        log_p = []
        for who in (SAFE, RISKY):
            text, logits, _ = texts.look(writers, text, who, unfinished)
            log_p.append(jax.nn.log_softmax(warp(logits, writers[who].sampling), -1))
        allowance = jnp.maximum((text.written + 1) * budget - state.debt - state.spent, 0.0)
        log_q, theta, kl = fuse(log_p[SAFE], log_p[RISKY], allowance)
        add = lambda total, x: total + jnp.where(unfinished, x, 0.0)
        state = Budget(add(state.spent, kl), state.debt, add(state.theta, theta), state.tokens + unfinished)
        return text, log_q, jnp.where(theta > 0, RISKY, SAFE), state

    zero = jnp.zeros(text.length.shape)
    budget_state = Budget(zero, owed, zero, jnp.zeros_like(text.length))
    text, state = token_by_token(writers, text, choose, budget_state, warped=True)
    return result(text, state)
