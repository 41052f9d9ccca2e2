"""Losses of drafts against the target, as pure functions of aligned arrays, by name in LOSSES.

A position has the target distribution p and the draft distribution q, both over the tokens of the draft vocabulary:
`loss(draft float32[..., v], teacher float32[..., v] or None, label int32[...], weight float32[...]) -> float32[...]`.
`draft` and `teacher` are logits, and `label` is the token that the target wrote. `weight` is 0 where a position does
not count. Losses with a statistic of the batch (`STATISTICS`) take its mean as a fifth argument. Without it they
compute the mean of their own positions, which is that of the batch only if these are all of it.

At temperature 1 speculation accepts a draft with probability sum(min(p, q)) = 1 - TV. In greedy decoding it accepts a
draft if the most likely tokens agree. Total variation therefore suits sampling, and cross entropy suits greedy
decoding.

Gradients with respect to draft logits z, q = softmax(z), with g = [p > q]:

    ce          q - onehot              soft_ce, kl   q - p
    rkl         q (r - E_q r), r = log(q / p)
    jsd         (1 - b) q (l - E_q l), l = log(q / (b p + (1 - b) q))
    tv          -q (g - E_q g)          nla           gradient of tv / sum(min(p, q))
    tvd++       -q (g - E_q g) / sigma, sigma: standard deviation of g in the batch (arXiv 2403.00858)
    lk_hybrid   e kl + (1 - e) tv, e = exp(-3 mean of sum(min(p, q))) (arXiv 2602.23881)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from specjax.types import Array

TIE = 1e-5  # p > q only if log p - log q exceeds the float32 error of equal logits that differ by a constant
LOG_FLOOR = -30.0  # lower bound of log p in rkl, which is infinite where p is 0
MIN_DEVIATION = 1e-3

Loss = Callable[..., Array]


def _log_p(teacher: Array | None) -> Array:
    assert teacher is not None
    return jax.lax.stop_gradient(jax.nn.log_softmax(teacher.astype(jnp.float32)))


def _log_q(draft: Array) -> Array:
    return jax.nn.log_softmax(draft.astype(jnp.float32))


def _expected(p: Array, x: Array) -> Array:
    """Return sum(p x), where terms with p = 0 are 0 for any x."""
    return jnp.sum(jnp.where(p > 0, p * x, 0.0), -1)


def cross_entropy(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return -log q of the target's token. A label outside of the draft vocabulary is replaced by token 0."""
    valid_label = jnp.where((label >= 0) & (label < draft.shape[-1]), label, 0)
    draft = draft.astype(jnp.float32)
    return jax.nn.logsumexp(draft, -1) - jnp.take_along_axis(draft, valid_label[..., None], -1)[..., 0]


def soft_cross_entropy(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return -sum(p log q)."""
    return -_expected(jnp.exp(_log_p(teacher)), _log_q(draft))


def forward_kl(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return sum(p log(p / q))."""
    log_p = _log_p(teacher)
    return _expected(jnp.exp(log_p), log_p - _log_q(draft))


def reverse_kl(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return sum(q log(q / p)), with p of at least e^-30."""
    log_q = _log_q(draft)
    return jnp.sum(jnp.exp(log_q) * (log_q - jnp.maximum(_log_p(teacher), LOG_FLOOR)), -1)


def jensen_shannon(draft: Array, teacher: Array | None, label: Array, weight: Array, *, beta: float = 0.5) -> Array:
    """Return beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q."""
    log_p, log_q = _log_p(teacher), _log_q(draft)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return beta * _expected(p, log_p - log_m) + (1 - beta) * jnp.sum(q * (log_q - log_m), -1)


def _is_larger(log_p: Array, log_q: Array) -> Array:
    """Return g, bool[..., v]."""
    return jax.lax.stop_gradient(log_p > log_q + TIE)


def _larger(draft: Array, teacher: Array | None) -> tuple[Array, Array, Array]:
    """Return (p, q, g)."""
    log_p, log_q = _log_p(teacher), _log_q(draft)
    return jnp.exp(log_p), jnp.exp(log_q), _is_larger(log_p, log_q).astype(jnp.float32)


def total_variation(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return sum(abs(p - q)) / 2, the rejection rate of drafts at temperature 1."""
    p, q, larger = _larger(draft, teacher)
    return jnp.sum(larger * (p - q), -1)


def negative_log_acceptance(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """Return -log sum(min(p, q)). Its gradient is that of TV divided by the acceptance rate sum(min(p, q)).

    The sum is computed from logarithms, so the gradient does not vanish where the acceptance rate is tiny.
    """
    log_p, log_q = _log_p(teacher), _log_q(draft)
    return -jax.nn.logsumexp(jnp.where(_is_larger(log_p, log_q), log_q, log_p), -1)


def expected_reward(draft: Array, teacher: Array | None) -> Array:
    """Return float32[...], E_q g. Its mean over a batch is the baseline of TVD++."""
    _, q, larger = _larger(draft, teacher)
    return jax.lax.stop_gradient(jnp.sum(q * larger, -1))


def acceptance_rate(draft: Array, teacher: Array | None) -> Array:
    """Return float32[...], sum(min(p, q)). Its mean over a batch sets the shares of the LK hybrid."""
    p, q, larger = _larger(draft, teacher)
    return jax.lax.stop_gradient(1 - jnp.sum(larger * (p - q), -1))


def _mean(value: Array, weight: Array) -> Array:
    return jnp.sum(weight * value) / jnp.maximum(jnp.sum(weight), 1e-9)


def normalised_variation(
    draft: Array, teacher: Array | None, label: Array, weight: Array, mean: Array | None = None
) -> Array:
    """Return the TVD++ loss: a policy gradient with reward [p > q], normalised by its mean and deviation in the batch.

    Only the gradient is meaningful. It is that of TV divided by the deviation.
    """
    _, q, larger = _larger(draft, teacher)
    q = jax.lax.stop_gradient(q)
    # The reward is 0 or 1, so its mean equals the mean of its squares.
    mean = _mean(expected_reward(draft, teacher), weight) if mean is None else mean
    deviation = jnp.maximum(jnp.sqrt(jnp.maximum(mean - mean**2, 0.0)), MIN_DEVIATION)
    return -jnp.sum(q * (larger - mean) / deviation * _log_q(draft), -1)


def lk_hybrid(draft: Array, teacher: Array | None, label: Array, weight: Array, mean: Array | None = None) -> Array:
    """Return a mix of KL and TV, whose share of TV grows with the acceptance rate."""
    variation = total_variation(draft, teacher, label, weight)
    accepted = _mean(acceptance_rate(draft, teacher), weight) if mean is None else mean
    share = jnp.exp(-3 * accepted)
    return share * forward_kl(draft, teacher, label, weight) + (1 - share) * variation


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "ce": cross_entropy,
        "soft_ce": soft_cross_entropy,
        "kl": forward_kl,
        "rkl": reverse_kl,
        "jsd": jensen_shannon,
        "tv": total_variation,
        "tvd++": normalised_variation,
        "nla": negative_log_acceptance,
        "lk_hybrid": lk_hybrid,
    }
)
"""All losses by name. All except `ce` read the teacher."""

STATISTICS: Mapping[str, Callable[[Array, Array | None], Array]] = MappingProxyType(
    {"tvd++": expected_reward, "lk_hybrid": acceptance_rate}
)
"""The losses with a statistic of the batch: `statistic(draft, teacher) -> float32[...]`, whose mean they read."""


def smooth_l1(predicted: Array, feature: Array) -> Array:
    """Return float32[...], the mean over D of the smooth L1 distance of [..., D]: squared below 1, else absolute."""
    distance = jnp.abs(predicted.astype(jnp.float32) - jax.lax.stop_gradient(feature).astype(jnp.float32))
    return jnp.mean(jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5), -1)


def _clip_probability(probability: Array) -> Array:
    """Clip probabilities so that their logarithms are finite, without changing the gradient.

    The gradient is largest where a prediction is wrong.
    """
    return probability + jax.lax.stop_gradient(jnp.clip(probability, 1e-30, 1 - 2**-24) - probability)


def binary_cross_entropy(predicted: Array, frequency: Array) -> Array:
    """Return float32[...], the cross entropy of a predicted probability and the actual frequency."""
    predicted = _clip_probability(predicted)
    return -frequency * jnp.log(predicted) - (1 - frequency) * jnp.log1p(-predicted)


def acceptance_weighted(predicted: Array, accepted: Array, rejection_weight: float = 6.0) -> tuple[Array, Array]:
    """Return SpecDec++'s (loss, weight), float32[...] each, in which rejections weigh more (arXiv 2405.19715).

    Args: predicted: probability that a draft is accepted. accepted: its min(1, p / q).
    """
    predicted = _clip_probability(predicted)
    loss = -rejection_weight * (1 - accepted) * jnp.log1p(-predicted) - accepted * jnp.log(predicted)
    return loss, rejection_weight * (1 - accepted) + accepted


def depth_decay(depths: int, decay: float) -> Array:
    """Return float32[depths], decay^k."""
    return decay ** jnp.arange(depths, dtype=jnp.float32)


def d_pace(log_q: Array, counted: Array | None = None, smooth: float = 0.5) -> Array:
    """Return float32[K, ...], D-PACE's weights by depth (arXiv 2605.18810).

    w_k = sum over j >= k of prod over i <= j of s_i with s_i = (1 - smooth) q_i + smooth. A weight is the gain in draft
    length from a correct k-th token.

    Args: log_q: float32[K, ...], log q of the correct tokens. counted: float32[K, ...], 0 for depths past a text's end.
    """
    reach = jnp.cumprod((1 - smooth) * jnp.exp(jax.lax.stop_gradient(log_q)) + smooth, 0)
    reach = reach if counted is None else reach * counted
    return jnp.flip(jnp.cumsum(jnp.flip(reach, 0), 0), 0)


@functools.cache
def combined(parts: tuple[tuple[str, float], ...]) -> Loss:
    """Return the weighted sum of losses by name. Equal arguments share one function.

    Its fifth argument `means` are float32[S], the means of `sum_statistics` over the batch.
    """

    def loss(draft: Array, teacher: Array | None, label: Array, weight: Array, means: Array | None = None) -> Array:
        total, number = jnp.float32(0), 0
        for name, share in parts:
            mean: tuple[Array, ...] = ()
            if name in STATISTICS and means is not None:
                mean, number = (means[number],), number + 1
            total += share * LOSSES[name](draft, teacher, label, weight, *mean)
        return total

    return loss


def has_statistics(parts: tuple[tuple[str, float], ...]) -> bool:
    """Return True if one of the losses reads a mean over the batch."""
    return any(name in STATISTICS for name, _ in parts)


def sum_statistics(parts: tuple[tuple[str, float], ...], draft: Array, teacher: Array | None, weight: Array) -> Array:
    """Return float32[S], the weighted sums of the statistics of S losses, in the order of `parts`."""
    statistics = [STATISTICS[name] for name, _ in parts if name in STATISTICS]
    return jnp.array([jnp.sum(weight * statistic(draft, teacher)) for statistic in statistics], jnp.float32)
