"""The outputs of a loaded head for a small text and one drafted token, and the parts of its oracle in NumPy."""

from __future__ import annotations

import functools

import dialects as d
import jax
import jax.numpy as jnp
import numpy as np

from specjax import Target
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.heads.contract import DraftedNodes, FeaturePairs
from specjax.types import Context

PAIRS = 5
RNG = np.random.default_rng(5)
STREAMS = RNG.standard_normal((d.L + 1, PAIRS, d.D)).astype(np.float32)
TOKENS = np.array([7, 3, 60, 20, 4])
DRAFT = 21


def config_of(**changes) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": d.V, "width": d.D, "num_layers": d.L, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
            "mlp_width": 16, "tied": False, "name": "tiny",
        } | changes
    )  # fmt: skip


@functools.cache
def target(**changes) -> Target:
    """Return a target with parameters drawn in NumPy, which compiles nothing."""
    of = shapes_of_target(**changes)
    rng = np.random.default_rng(0)
    drawn = lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape) + (len(x.shape) == 1), x.dtype)  # norms around 1
    return Target(of.model, jax.tree.map(drawn, of.params))


def shapes_of_target(**changes) -> Target:
    """Return a target without weights, for heads that are refused before any weight is read."""
    config = config_of(**changes)
    return Target(make_model(config), jax.eval_shape(functools.partial(init_params, config), jax.random.key(0)))


@jax.jit
def both_steps(head, target, features):
    """Return the logits float32[2, V] after the root and after one drafted token."""
    context = Context(jnp.asarray([[1, *TOKENS]]), jnp.asarray([PAIRS + 1]), target=target)
    memory = head.head.init_memory(head.params, context, 1, 16)
    pairs = FeaturePairs(features[None], jnp.asarray(TOKENS)[None], jnp.asarray([PAIRS]))
    memory = head.head.read(head.params, memory, pairs, context)
    scratch, first = head.head.start(head.params, memory, context, 4)
    one = lambda value: jnp.full((1, 1), value)
    node = DraftedNodes(one(DRAFT), one(1), jnp.int32(1), one(0), jnp.zeros((1, 1, 4), bool))
    _, second = head.head.follow(head.params, scratch, node, context)
    return jnp.stack([first[0], second[0, 0]])


def logits(head, of: Target | None = None) -> np.ndarray:
    taps = head.head.taps or (d.L,)
    return np.asarray(both_steps(head, of or target(), np.concatenate([STREAMS[tap] for tap in taps], -1)))


def same(loaded, expected):
    """Check that finite values agree to 1e-5, and that the same values are finite."""
    np.testing.assert_array_equal(np.isfinite(loaded), np.isfinite(expected))
    np.testing.assert_allclose(loaded[np.isfinite(loaded)], expected[np.isfinite(expected)], atol=1e-5, rtol=1e-5)


# The oracle: float64, one token after another, no cache.


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rotated(x, positions):
    """Rotate x [T, H, h] by halves."""
    h = x.shape[-1]
    angle = positions[:, None, None] / 10000.0 ** (np.arange(0, h, 2) / h)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attended(x, w, prefix, hd, full=1):
    """Return attention of x [T, D'], causal except for the last `full` rows, which attend to all."""
    project = lambda part: (x @ w[f"{prefix}.{part}_proj.weight"].T).reshape(len(x), -1, hd)
    positions = np.arange(len(x))
    q, k, v = rotated(project("q"), positions), rotated(project("k"), positions), project("v")
    k, v = (np.repeat(part, d.H // d.KV, 1) for part in (k, v))
    scores = np.einsum("qhc,khc->hqk", q, k) / np.sqrt(hd)
    sees = np.tril(np.ones(scores.shape[1:], bool)) | (positions >= len(x) - full)[:, None]
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khc->qhc", weights, v).reshape(len(x), -1) @ w[f"{prefix}.o_proj.weight"].T


def fed(x, w, prefix):
    gate, up, down = (w[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def params_of(name, of: Target | None = None) -> np.ndarray:
    return np.asarray((of or target()).params[name]["weight"], np.float64)
