"""Draft heads on given features: their outputs for a text and a draft, without the decoding loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from heads import width_of

from specjax import Target
from specjax.models.heads.blocks import init_params
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs
from specjax.models.heads.kinds import KINDS
from specjax.types import Context, DraftOutput

# A text of seven tokens and one of four, each with a draft of three below its root.
TEXT = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 0, 0, 0]])
LENGTH = np.array([7, 4])
PATH = np.array([[8, 7, 1], [2, 6, 6]])


def features_of(target: Target, taps: int = 1) -> np.ndarray:
    """Return features float32[B, T - 1, F] for all tokens of TEXT but the last."""
    return np.random.default_rng(0).normal(size=(*TEXT[:, 1:].shape, taps * width_of(target))).astype(np.float32)


def random_params(kind: str, config, seed: int = 0) -> dict:
    """Return parameters of a head as NumPy arrays, none of which has its initial value."""
    rng = np.random.default_rng(seed)
    noise = lambda x: np.asarray(x + 0.2 * rng.normal(size=x.shape).astype(x.dtype))
    params = jax.eval_shape(functools.partial(init_params, KINDS[kind].module, config), jax.random.key(0))
    start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    return jax.tree.map(lambda x: noise(x) if x.dtype == np.float32 else x, start)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(head, params, target: Target, features, path, reads: int):
    length = jnp.asarray(LENGTH)
    tokens = jnp.pad(jnp.asarray(TEXT), ((0, 0), (0, 4)))
    context = Context(tokens, length, target=target)
    memory, num_read = head.init_memory(params, context, len(TEXT), 16), jnp.zeros_like(length)
    at = lambda x, start: jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, reads))(x, start)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, reads)] + [(0, 0)] * (x.ndim - 2))
    for _ in range(-(-(TEXT.shape[1] - 1) // reads)):
        count = jnp.clip(length - 1 - num_read, 0, reads)
        following = at(pad(tokens), num_read + 1)
        memory = head.read(params, memory, FeaturePairs(at(pad(features), num_read), following, count), context)
        num_read += count
    return draft(head, params, memory, context, path)


def draft(head, params, memory, context: Context, path) -> jax.Array:
    """Return the logits float32[B, 1 + D, V] after the root and after each token of a chain int32[B, D]."""
    batch, depth = path.shape
    scratch, logits = head.start(params, memory, context, 1 + depth)
    of = lambda outputs: outputs.logits if isinstance(outputs, DraftOutput) else outputs
    outputs = [of(logits)]
    for d in range(1, depth + 1):
        one = lambda x: jnp.full((batch, 1), x, jnp.int32)
        mask = jnp.broadcast_to((jnp.arange(1 + depth) < d) & (jnp.arange(1 + depth) > 0), (batch, 1, 1 + depth))
        drafted = DraftedNodes(path[:, d - 1 : d], one(d), jnp.int32(d), one(d - 1), mask)
        scratch, logits = head.follow(params, scratch, drafted, context)
        outputs.append(of(logits)[:, 0])
    return jnp.stack(outputs, 1)


def said_of(head: DraftHead, target: Target, features, path=PATH, reads: int = 6) -> np.ndarray:
    """Return logits float32[B, 1 + D, V] of a draft `path` int[B, D] after TEXT, read in chunks of `reads` pairs."""
    return np.asarray(_run(head.head, head.params, target, jnp.asarray(features), jnp.asarray(path), reads))
