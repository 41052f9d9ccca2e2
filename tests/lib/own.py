"""A tiny transformer as users write theirs: as a function, an NNX and a Linen module; with and without a cache. And a
model that compiles quickly, to be broken in many ways."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

import specjax
from specjax.types import Model, Output

VOCAB, WIDTH, LAYERS, LONGEST = 16, 8, 2, 40
SHAPES = {"embed": (VOCAB, WIDTH), "place": (LONGEST, WIDTH), "qkv": (LAYERS, 3, WIDTH, WIDTH), "head": (WIDTH, VOCAB)}


@functools.cache
def weights(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    scale = {"embed": 1.0, "place": 0.5, "qkv": 0.6, "head": 2.0}
    return {name: scale[name] * jax.random.normal(k, SHAPES[name]) for k, name in zip(keys, SHAPES, strict=True)}


def transformer(params, tokens, positions=None, mask=None, cache=None):
    """Logits [B, T, V], and the cache if there is one: keys and values [B, layers, S, 2, D], written from `next` on."""
    count = tokens.shape[1]
    positions = jnp.arange(count)[None] if positions is None else positions
    mask = jnp.tril(jnp.ones((count, count), bool)) if mask is None else mask
    x = params["embed"][tokens] + jnp.take(params["place"], positions, 0)  # NaN behind the last place, as `nnx.Embed`
    kv = None if cache is None else cache["kv"]
    for layer in range(LAYERS):
        q, k, v = jnp.einsum("btd,nde->nbte", x, params["qkv"][layer])
        if kv is not None:
            new = jnp.stack([k, v], 2)[:, None]
            kv = jax.lax.dynamic_update_slice(kv, new, (0, layer, cache["next"][0], 0, 0))
            k, v = kv[:, layer, :, 0], kv[:, layer, :, 1]
        scores = jnp.where(mask, q @ k.swapaxes(1, 2), -1e9)
        x = x + jax.nn.softmax(scores, -1) @ v
    logits = x @ params["head"]
    return logits if cache is None else (logits, {"kv": kv, "next": cache["next"] + count})


def empty_cache(batch: int, slots: int) -> dict[str, jax.Array]:
    return {"kv": jnp.zeros((batch, LAYERS, slots, 2, WIDTH)), "next": jnp.zeros((batch,), jnp.int32)}


def plain(params, tokens):
    return transformer(params, tokens)


class OwnNNX(nnx.Module):
    def __init__(self, seed: int = 0):
        for name, value in weights(seed).items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, tokens, positions=None, attention_mask=None, cache=None):
        params = {name: getattr(self, name)[...] for name in SHAPES}
        return transformer(params, tokens, positions, attention_mask, cache)


class OwnLinen(linen.Module):
    @linen.compact
    def __call__(self, tokens, positions=None, mask=None, cache=None):
        init = lambda key, shape: jax.random.normal(key, shape)
        params = {name: self.param(name, init, shape) for name, shape in SHAPES.items()}
        return transformer(params, tokens, positions, mask, cache)


def of_page(name: str):
    """A function as docs/own_models.md defines it."""
    page = (pathlib.Path(__file__).parents[2] / "docs/own_models.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python\n(def {name}\(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace = {"jax": jax, "jnp": jnp, "specjax": specjax}
    exec(compile(block, "own_models.md", "exec"), namespace)
    return namespace[name]


class Bag(NamedTuple):
    values: jax.Array  # float32[B, S, D], of tokens and their positions
    length: jax.Array  # int32[B]


@functools.cache
def bag_model() -> Model:
    """Return a model whose logits are linear in the mean of all that a token sees; its parameters are those of the
    transformer."""

    def forward(params, tokens, cache, *, positions, mask, earlier=None):
        new = params["embed"][tokens] * (1 + params["place"][positions])
        every = jnp.concatenate([cache.values, new] if earlier is None else [cache.values, earlier, new], 1)
        in_cache = jnp.arange(cache.values.shape[1]) < cache.length[:, None]
        in_cache = jnp.broadcast_to(in_cache[:, None], (*tokens.shape, in_cache.shape[1]))
        visible = jnp.concatenate([in_cache, mask], 2)
        hidden = visible @ every / visible.sum(2, keepdims=True)
        return Output(hidden @ params["head"], hidden), new

    def commit(cache, pending, path, num_nodes):
        accepted = jnp.take_along_axis(pending, jnp.maximum(path, 0)[:, :, None], 1)
        slot = jnp.where(path >= 0, cache.length[:, None] + jnp.arange(path.shape[1]), cache.values.shape[1])
        values = cache.values.at[jnp.arange(len(path))[:, None], slot].set(accepted, mode="drop")
        return Bag(values, cache.length + num_nodes)

    return Model(
        init_cache=lambda params, inputs, batch, capacity: Bag(
            jnp.zeros((batch, capacity, WIDTH)), jnp.zeros((batch,), jnp.int32)
        ),
        forward=forward,
        commit=commit,
        rewind=lambda cache, length: cache._replace(length=jnp.minimum(cache.length, length)),
        vocab_size=VOCAB,
        max_positions=LONGEST,
        name="bag",
    )
