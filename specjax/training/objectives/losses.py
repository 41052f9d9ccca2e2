"""What a draft is told it should have said: pure functions of aligned arrays, by name in LOSSES.

For a position with target distribution p and draft distribution q, both over the tokens that the drafter can say:
`loss(draft float32[..., v], teacher float32[..., v] or None, label int32[...], weight float32[...]) -> float32[...]`.
`draft` and `teacher` are logits, `label` is the token that the target did write, and `weight`, 0 where nothing counts,
is for losses that have statistics of the batch. Speculation accepts a draft with probability sum(min(p, q)) = 1 - TV at
temperature 1, and where both are greedy if the likeliest tokens agree: so total variation is what is to be small where
one samples, and cross entropy serves greedy decoding well.

Gradients with respect to draft logits z, q = softmax(z), with g = [p > q]:

    ce          q - onehot              soft_ce, kl   q - p
    rkl         q (r - E_q r), r = log(q / p)
    jsd         (1 - b) q (l - E_q l), l = log(q / (b p + (1 - b) q))
    tv          -q (g - E_q g)          nla           that of tv / sum(min(p, q))
    tvd++       -q (g - E_q g) / sigma, sigma the deviation of g in the batch (arXiv 2403.00858)
    lk_hybrid   e kl + (1 - e) tv, e = exp(-3 mean of sum(min(p, q))) (arXiv 2602.23881)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from specjax.types import Array

TIE = 1e-5  # p is larger than q if log p is by more than what float32 makes of equal logits that differ by a constant
FLOOR = -30.0  # of log p in rkl, which is infinite where p is 0
LEAST_DEVIATION = 1e-3

Loss = Callable[[Array, Array | None, Array, Array], Array]


def _log_p(teacher: Array | None) -> Array:
    assert teacher is not None
    return jax.lax.stop_gradient(jax.nn.log_softmax(teacher.astype(jnp.float32)))


def _log_q(draft: Array) -> Array:
    return jax.nn.log_softmax(draft.astype(jnp.float32))


def _expected(p: Array, x: Array) -> Array:
    """sum(p x), 0 where p is, whatever x."""
    return jnp.sum(jnp.where(p > 0, p * x, 0.0), -1)


def cross_entropy(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """-log q of the token that was written. A label outside of the drafter's tokens counts as token 0."""
    inside = jnp.where((label >= 0) & (label < draft.shape[-1]), label, 0)
    draft = draft.astype(jnp.float32)
    return jax.nn.logsumexp(draft, -1) - jnp.take_along_axis(draft, inside[..., None], -1)[..., 0]


def soft_cross_entropy(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """-sum(p log q)."""
    return -_expected(jnp.exp(_log_p(teacher)), _log_q(draft))


def forward_kl(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """sum(p log(p / q))."""
    log_p = _log_p(teacher)
    return _expected(jnp.exp(log_p), log_p - _log_q(draft))


def reverse_kl(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """sum(q log(q / p)), with p of at least e^-30."""
    log_q = _log_q(draft)
    return jnp.sum(jnp.exp(log_q) * (log_q - jnp.maximum(_log_p(teacher), FLOOR)), -1)


def jensen_shannon(draft: Array, teacher: Array | None, label: Array, weight: Array, *, beta: float = 0.5) -> Array:
    """beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q."""
    log_p, log_q = _log_p(teacher), _log_q(draft)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return beta * _expected(p, log_p - log_m) + (1 - beta) * jnp.sum(q * (log_q - log_m), -1)


def _is_larger(log_p: Array, log_q: Array) -> Array:
    """bool[..., v]: g."""
    return jax.lax.stop_gradient(log_p > log_q + TIE)


def _larger(draft: Array, teacher: Array | None) -> tuple[Array, Array, Array]:
    """(p, q, g)."""
    log_p, log_q = _log_p(teacher), _log_q(draft)
    return jnp.exp(log_p), jnp.exp(log_q), _is_larger(log_p, log_q).astype(jnp.float32)


def total_variation(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """sum(abs(p - q)) / 2: how often a draft is rejected."""
    p, q, larger = _larger(draft, teacher)
    return jnp.sum(larger * (p - q), -1)


def negative_log_acceptance(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """-log sum(min(p, q)): TV with its gradient made large where little is accepted. By logarithms, else it would be
    gone where next to nothing is."""
    log_p, log_q = _log_p(teacher), _log_q(draft)
    return -jax.nn.logsumexp(jnp.where(_is_larger(log_p, log_q), log_q, log_p), -1)


def normalised_variation(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """TVD++: TV as a policy's reward [p > q], less its mean in the batch and over its deviation there. Its value says
    nothing; its gradient is that of TV over the deviation."""
    _, q, larger = _larger(draft, teacher)
    q = jax.lax.stop_gradient(q)
    # The reward is 0 or 1, so that mean and mean of squares are one number.
    mean = jnp.sum(weight * jnp.sum(q * larger, -1)) / jnp.maximum(jnp.sum(weight), 1e-9)
    deviation = jnp.maximum(jnp.sqrt(jnp.maximum(mean - mean**2, 0.0)), LEAST_DEVIATION)
    return -jnp.sum(q * (larger - mean) / deviation * _log_q(draft), -1)


def lk_hybrid(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
    """KL while little is accepted, TV once much is."""
    variation = total_variation(draft, teacher, label, weight)
    accepted = jnp.sum(weight * (1 - variation)) / jnp.maximum(jnp.sum(weight), 1e-9)
    share = jnp.exp(-3 * jax.lax.stop_gradient(accepted))
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
"""Every one by name. All but `ce` read the teacher."""


def smooth_l1(said: Array, feature: Array) -> Array:
    """float32[...] of [..., D]: squared where they are less than 1 apart, else absolute; the mean over D."""
    apart = jnp.abs(said.astype(jnp.float32) - jax.lax.stop_gradient(feature).astype(jnp.float32))
    return jnp.mean(jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5), -1)


def _inside(chance: Array) -> Array:
    """Of which logarithms are finite, with the gradient of the chance itself: what is surest and wrong has most to
    learn."""
    return chance + jax.lax.stop_gradient(jnp.clip(chance, 1e-30, 1 - 2**-24) - chance)


def binary_cross_entropy(chance: Array, happened: Array) -> Array:
    """float32[...]: of how likely something was held and how often it happened."""
    chance = _inside(chance)
    return -happened * jnp.log(chance) - (1 - happened) * jnp.log1p(-chance)


def acceptance_weighted(chance: Array, accepted: Array, rejections: float = 6.0) -> tuple[Array, Array]:
    """SpecDec++'s (loss, weight), float32[...] each: rejections count so many times as much (arXiv 2405.19715).

    chance: how likely a draft was held to be accepted. accepted: min(1, p / q) of it.
    """
    chance = _inside(chance)
    loss = -rejections * (1 - accepted) * jnp.log1p(-chance) - accepted * jnp.log(chance)
    return loss, rejections * (1 - accepted) + accepted


def depth_decay(depths: int, decay: float) -> Array:
    """float32[depths]: decay^k."""
    return decay ** jnp.arange(depths, dtype=jnp.float32)


def d_pace(log_q: Array, there: Array | None = None, smooth: float = 0.5) -> Array:
    """float32[K, ...]: D-PACE's weights, by depth, of log q [K, ...] of the right tokens (arXiv 2605.18810).

    w_k = sum over j >= k of prod over i <= j of s_i, s_i = (1 - smooth) q_i + smooth: how much longer a draft becomes
    if the k-th token is right.

    there: float32[K, ...], 0 for the j past a text's end.
    """
    kept = jnp.cumprod((1 - smooth) * jnp.exp(jax.lax.stop_gradient(log_q)) + smooth, 0)
    kept = kept if there is None else kept * there
    return jnp.flip(jnp.cumsum(jnp.flip(kept, 0), 0), 0)


@functools.cache
def combined(parts: tuple[tuple[str, float], ...]) -> Loss:
    """The weighted sum of losses by name."""

    def loss(draft: Array, teacher: Array | None, label: Array, weight: Array) -> Array:
        return sum((share * LOSSES[name](draft, teacher, label, weight) for name, share in parts), jnp.float32(0))

    return loss
