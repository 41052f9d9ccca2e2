"""Training of the fast stream of M2R2 with a frozen target.

Bhendawade, Najibi, Naik, Belousova: M2R2: Mixture of Multi-Rate Residuals for Efficient Transformer Inference (2025),
arXiv 2502.02040.

The loss is a sum over the layers l = 1 ... E of the fast stream a. p is the target's distribution, h its own (slow)
stream, L its number of layers, and R the rate of the fast stream:

    SoftCE(p, softmax(head(norm(a_l)))) / E + 0.1 |a_l - h_min(R l, L)|^2 / D

The router has a loss of its own, the binary cross entropy of its output. Its label is 1 if the fast stream predicts the
target's token. Only the router gets a gradient from this loss.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.modes import jit, with_standard_modes
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import init_head
from specjax.models.heads.m2r2 import M2R2, M2R2Config, check_layers, check_target, of_target
from specjax.numerics.validation import check_integer
from specjax.types import Array, Model, PyTree, Target

ALIGNMENT = 0.1


class Streams(NamedTuple):
    """Losses and statistics of the two streams, means over the tokens of texts."""

    predicted: Array  # float32[], soft cross entropy of the fast stream, mean over layers
    apart: Array  # float32[], squared distance of the fast stream from the slow one, sum over layers
    sure: Array  # float32[], binary cross entropy of the router
    agrees: Array  # float32[], share of tokens at which the fast stream predicts the target's token

    @property
    def loss(self) -> Array:
        return self.predicted + ALIGNMENT * self.apart + self.sure


@with_standard_modes
def blank_m2r2(target: Target, key: Array, **changes) -> DraftHead:
    """Return an untrained head, whose fast stream equals the target's stream.

    changes: `exit_layer`, `rank` and other fields of `specjax.models.heads.m2r2.M2R2Config`.
    """
    check_layers(target.model)
    config = of_target(target.model.config, **changes)
    check_target(config, target.model)
    for name in ("rank", "recent", "router_width"):
        check_integer(name, getattr(config, name))
    return init_head("m2r2", config, key)


@with_standard_modes
def train_m2r2(
    target: Target, head: DraftHead, tokens: Array, length: Array, *, steps: int = 200, learning_rate: float = 1e-3
) -> tuple[DraftHead, Array]:
    """Train a head, and return it with the loss of each step.

    tokens: int32[B, T], texts of `length` int32[B] tokens, all in one batch.

    Raises: UsageError for a head of another kind, or of another target.
    """
    if head.head.kind != "m2r2":
        raise UsageError(f"train_m2r2 needs a head of kind m2r2, not {head.head.kind}; make one with blank_m2r2")
    check_target(head.head.config, target.model)
    arguments = head.head.config, steps, learning_rate
    params, losses = _train(target.model, *arguments, target.params, head.params, tokens, length)
    return head.replace(params=params), losses


@jit(static_argnums=(0, 1, 2, 3))
def _train(model: Model, config: M2R2Config, steps: int, learning_rate: float, base, params, tokens, length):
    loss = lambda params: streams(model, config, base, params, tokens, length).loss
    return descend(loss, params, steps, learning_rate)


def streams(model: Model, config: M2R2Config, base: PyTree, params: PyTree, tokens: Array, length: Array) -> Streams:
    """Run both streams over texts `tokens` int32[B, T] of `length` int32[B] tokens, and return their losses."""
    module, head = bind(M2R2, config)(params), model.head
    assert head is not None
    layers = tuple(range(1, config.exit_layer + 1))
    above = tuple(min(round(config.rate * layer), model.capabilities.num_layers) for layer in layers)
    cache = model.init_cache(base, None, len(tokens), 0)
    slow, _ = jax.lax.stop_gradient(one_pass(model, base, tokens, cache, above))
    fast, _ = one_pass(model, base, tokens, cache, layers, run=module.two_streams())
    p, named = jax.nn.softmax(slow.logits), jnp.argmax(slow.logits, -1)
    counts = jnp.arange(tokens.shape[1]) < length[:, None]
    mean = lambda x: jnp.sum(x * counts) / jnp.sum(counts)
    soft = [mean(-jnp.sum(p * jax.nn.log_softmax(head(base, a)), -1)) for a in fast.taps]
    apart = [
        mean(jnp.mean(jnp.square(a.astype(jnp.float32) - h.astype(jnp.float32)), -1))
        for a, h in zip(fast.taps, slow.taps, strict=True)
    ]
    agrees = (jnp.argmax(fast.logits, -1) == named).astype(jnp.float32)
    chance = jnp.clip(module.confidence(tuple(fast.taps[layer - 1] for layer in config.router_layers)), 1e-6, 1 - 1e-6)
    sure = -agrees * jnp.log(chance) - (1 - agrees) * jnp.log1p(-chance)
    return Streams(jnp.mean(jnp.stack(soft)), jnp.sum(jnp.stack(apart)), mean(sure), mean(agrees))
