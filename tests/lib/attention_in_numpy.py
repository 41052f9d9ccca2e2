"""A tiny Llama in float64 NumPy, with the attention of every layer and with keys that some queries do not see."""

import functools

import jax
import numpy as np
from toy import tiny_llama

from specjax.types import Target

LAYERS = 4


@functools.cache
def sharp_llama(**changes) -> Target:
    """A model whose attention has clear maxima."""
    target = tiny_llama(layers=LAYERS, **changes)
    sharper = lambda path, x: x * 12 if jax.tree_util.keystr(path).endswith("['q']['weight']") else x
    return Target(target.model, jax.tree_util.tree_map_with_path(sharper, target.params))


def run(params, tokens, hidden=None, shift=0):
    """Return the attention of every layer float64[layers, H, T, T], and the logits float64[T, V].

    hidden: bool[layers, K, T, T], keys that a query does not see, for each key/value head. shift: added to positions.
    """
    get = lambda *names: np.asarray(functools.reduce(lambda tree, name: tree[name], names, params), np.float64)
    norm = lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    angles = (np.arange(len(tokens))[:, None] + shift) / 10000.0 ** (np.arange(4) / 4)

    def rotate(x):  # [T, heads, 8]
        one, two, cos, sin = x[..., :4], x[..., 4:], np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    x, layers = get("embed", "weight")[tokens], []
    for i in range(LAYERS):
        of = functools.partial(get, "layers", i)
        y = norm(x, of("attention_norm", "weight"))
        q, k, v = ((y @ of("attention", name, "weight").T).reshape(len(tokens), -1, 8) for name in "qkv")
        q, k, v = rotate(q), np.repeat(rotate(k), 2, 1), np.repeat(v, 2, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(8)
        scores[:, np.triu_indices(len(tokens), 1)[0], np.triu_indices(len(tokens), 1)[1]] = -np.inf
        if hidden is not None:
            scores[np.repeat(hidden[i], 2, 0)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        layers.append(weights)
        x = x + np.einsum("hts,shd->thd", weights, v).reshape(len(tokens), -1) @ of("attention", "o", "weight").T
        y = norm(x, of("mlp_norm", "weight"))
        gate = y @ of("mlp", "gate", "weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ of("mlp", "up", "weight").T)) @ of("mlp", "down", "weight").T
    return np.stack(layers), norm(x, get("norm", "weight")) @ get("head", "weight").T


def look_ahead(params, prompt, count):
    """Return the prompt and `count` greedy tokens."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(run(params, text)[1][-1])))
    return text
