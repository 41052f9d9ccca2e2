"""Training of a depth policy's parameters, such as routers and corrections, with a frozen target."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.models.skipping.policy import DepthPolicy
from specjax.models.variants.skipping_model import skip_layers
from specjax.types import Array, Model, PyTree, Target


def _free(noted: PyTree) -> Array:
    return jnp.float32(0)


@with_standard_modes
def fit(
    target: Target,
    depth: DepthPolicy,
    tokens: Array,
    prompt: Array,
    length: Array,
    *,
    steps: int = 100,
    learning_rate: float = 1e-3,
    penalty: Callable[[PyTree], Array] = _free,
) -> tuple[DepthPolicy, Array]:
    """Return `depth` with trained parameters, and the loss of each step.

    The loss is the mean cross entropy of the tokens after the prompts, plus `penalty(records)` of the policy's records.
    tokens: int32[B, T], texts of `length` int32[B] tokens that begin with prompts of `prompt` int32[B] tokens. One pass
    over the texts runs the same layers for each token as decoding. All texts form one batch.
    """
    skipping = skip_layers(target, depth)  # its layers may be separate where those of the target are stacked
    settings = skipping.model, penalty, steps, learning_rate
    params, losses = _fit(*settings, skipping.params["base"], depth.params, tokens, prompt, length)
    return depth.replace(params=params), losses


@jit(static_argnums=(0, 1, 2, 3))
def _fit(model: Model, penalty, steps: int, learning_rate: float, base, params, tokens, prompt, length):
    def loss(params) -> Array:
        both = {"base": base, "depth": params}
        mean, pending = surprise(model, both, tokens, prompt, length, model.start_cache(both, None, prompt, 0))
        return mean + penalty(pending.records)

    return descend(loss, params, steps, learning_rate)


def surprise(
    model: Model, params: PyTree, tokens: Array, prompt: Array, length: Array, cache: PyTree
) -> tuple[Array, PyTree]:
    """Return (mean cross entropy of the tokens after the prompts, pending cache entries). Texts are as in `fit`."""
    place = jnp.arange(tokens.shape[1] - 1)
    counts = (place >= prompt[:, None] - 1) & (place < length[:, None] - 1)
    output, pending = one_pass(model, params, tokens, cache)
    log_p = jax.nn.log_softmax(output.logits[:, :-1])
    of_text = take_along(log_p, tokens[:, 1:, None], 2)[..., 0]
    return -jnp.sum(of_text * counts) / jnp.sum(counts), pending
