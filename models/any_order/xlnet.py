"""XLNet: a transformer with a content stream and a query stream.

Yang, Dai, Yang, Carbonell, Salakhutdinov, Le: XLNet: Generalized Autoregressive Pretraining for Language Understanding
(NeurIPS 2019), arXiv 1906.08237. Relative positions: Dai et al.: Transformer-XL (ACL 2019), arXiv 1901.02860.

Rule: both streams share all weights. In the content stream h a token reads tokens and itself. The query stream g starts
from one trained vector, and reads the content stream at other positions than its own. The score of a query at position
i and a key at position j, with the encoding R of a distance, is
  ((q_i + u) . k_j + (q_i + v) . W_r R_{i - j}) / sqrt(d).
The logits of a position are E g + b, with the embedding E in most models.
Deviations: memory of earlier segments and segment embeddings are not implemented. A query that reads nothing gets zeros
from attention. Dropout is not implemented, since it is for training only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Array, PyTree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
"""Activations by their name in config.json."""


@dataclasses.dataclass(frozen=True)
class XLNetConfig:
    """The shapes and constants of a model."""

    vocab_size: int
    width: int  # D
    num_layers: int
    num_heads: int  # N
    head_dim: int  # H
    mlp_width: int
    norm_eps: float = 1e-12
    activation: str = "gelu"
    max_distance: int | None = None  # larger distances have the encoding of this one; None: no limit
    tied: bool = True  # the output layer is the embedding


def forward(
    config: XLNetConfig, params: PyTree, tokens: Array, content: Array, positions: Array, query: Array
) -> Array:
    """Return logits float32[B, Q, V] of the tokens at `positions` int32[B, Q].

    Args:
      tokens: int32[B, S]. content: bool[B, S, S], the tokens that each token of the content stream reads.
      query: bool[B, Q, S], the tokens that each query reads.
    """
    h = params["embedding"][tokens]  # [B, S, D]
    g = jnp.broadcast_to(params["query"], (*positions.shape, config.width))
    distances = encode_distances(config, tokens.shape[1])
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for layer in params["layers"]:
        read = functools.partial(_run_layer, config, layer, h, distances)
        h, g = read(h, places, content), read(g, positions, query)
    return g.astype(jnp.float32) @ params["output"].T + params["bias"]


def encode_distances(config: XLNetConfig, size: int) -> Array:
    """Return the encodings float32[2 S - 1, D] of the distances 1 - S ... S - 1."""
    distance = jnp.arange(1 - size, size, dtype=jnp.float32)
    if config.max_distance is not None:
        distance = jnp.clip(distance, -config.max_distance, config.max_distance)
    frequency = 10000.0 ** (-jnp.arange(0, config.width, 2) / config.width)
    angle = distance[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], 1)


def _run_layer(
    config: XLNetConfig, layer: Any, h: Array, distances: Array, stream: Array, positions: Array, mask: Array
) -> Array:
    """Return the next values [B, Q, D] of a stream that reads the content h [B, S, D]."""
    q, k, v = (jnp.einsum("bqd,dnh->bqnh", x, layer[name]) for x, name in ((stream, "q"), (h, "k"), (h, "v")))
    r = jnp.einsum("md,dnh->mnh", distances, layer["r"])
    by_content = jnp.einsum("bqnh,bsnh->bnqs", q + layer["content_bias"], k)
    by_distance = jnp.einsum("bqnh,mnh->bnqm", q + layer["distance_bias"], r)
    size = h.shape[1]
    index = positions[:, None, :, None] - jnp.arange(size) + size - 1  # [B, 1, Q, S]
    index = jnp.broadcast_to(index, by_content.shape)
    scores = (by_content + jnp.take_along_axis(by_distance, index, 3)) * config.head_dim**-0.5
    visible = mask[:, None]
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -1e30), -1), 0.0)
    read = jnp.einsum("bnqs,bsnh->bqnh", weights, v)
    stream = _norm(stream + jnp.einsum("bqnh,dnh->bqd", read, layer["o"]), layer["norm"], config.norm_eps)
    hidden = ACTIVATIONS[config.activation](_linear(stream, layer["up"]))
    return _norm(stream + _linear(hidden, layer["down"]), layer["mlp_norm"], config.norm_eps)


def _linear(x: Array, part: Any) -> Array:
    return x @ part["weight"].T + part["bias"]


def _norm(x: Array, part: Any, eps: float) -> Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps) * part["weight"] + part["bias"]
