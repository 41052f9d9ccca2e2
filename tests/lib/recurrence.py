"""A tiny target of another kind: layers with a recurrent state, which adaptive depth can skip."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.skipping.policy import LayerStreams
from specjax.types import Capabilities, Model, Output, Sublayers, Target

LAYERS, WIDTH, VOCAB = 6, 32, 31


class Shape(NamedTuple):
    """The fields of a config that a depth policy reads."""

    width: int = WIDTH


@functools.cache
def model() -> Model:
    """h_t = a h_{t-1} + x_t in each layer; then x += tanh(h W), and x += tanh(x U). The cache is h [B, layers, D]."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), layers=None, depth=None):
        x = params["embedding"][tokens]
        every = jnp.ones(positions.shape, bool)
        carry = None if depth is None else depth.start(LAYERS)
        keeps = depth is not None and depth.policy.repair == "absent"
        streams, states, ran = [x], [], []
        for layer in range(LAYERS):
            runs = Sublayers(every, every) if depth is None else depth.runs(carry, layer, layers)
            decay = params["decay"][layer]
            # A token that skips the layer advances the state by its stream, or leaves it as it is.
            advances = mask & (runs.attention if keeps else every)[:, None, :]
            count = jnp.sum(advances, 2)
            since = jnp.maximum(count[:, :, None] - count[:, None], 0)
            h = decay ** count[..., None] * cache[:, layer, None] + jnp.where(advances, decay**since, 0.0) @ x
            between = jnp.where(runs.attention[..., None], x + jnp.tanh(h @ params["mix"][layer]), x)
            out = jnp.where(runs.mlp[..., None], between + jnp.tanh(between @ params["feed"][layer]), between)
            if depth is None:
                x = out
            else:
                around = LayerStreams(layer, x, between, out, runs, depth.head)
                x, carry = depth.after_layer(carry, around, layer in depth.observed(LAYERS))
            streams.append(x)
            states.append(h)
            ran.append(runs)
        base = jnp.stack(states, 2)  # [B, T, layers, D]
        output = Output(head(params, x), x, tuple(streams[tap] for tap in taps))
        if depth is None:
            return output, base
        return output, depth.pending(base, jax.tree.map(lambda *runs: jnp.stack(runs, -1), *ran), carry)

    def head(params, stream):
        return stream @ params["head"]

    def commit(cache, pending, path, num_nodes):
        last = jnp.take_along_axis(path, jnp.maximum(num_nodes - 1, 0)[:, None], 1)
        h = jnp.take_along_axis(pending, jnp.maximum(last, 0)[:, :, None, None], 1)[:, 0]
        return jnp.where(num_nodes[:, None, None] > 0, h, cache)

    return Model(
        init_cache=lambda params, inputs, batch, capacity: jnp.zeros((batch, LAYERS, WIDTH)),
        forward=forward,
        commit=commit,
        vocab_size=VOCAB,
        max_positions=1 << 20,
        name="recurrence",
        embed=lambda params, tokens: params["embedding"][tokens],
        head=head,
        config=Shape(),
        capabilities=Capabilities(LAYERS, taps=True, layer_skipping=True, depth=True),
    )


@functools.cache
def target(identity_from: int = LAYERS) -> Target:
    """Random weights; the layers from `identity_from` on leave the stream as it is."""
    keys = jax.random.split(jax.random.key(0), 4)
    runs = (jnp.arange(LAYERS) < identity_from)[:, None, None]
    params = {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "mix": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) * 0.3 * runs,
        "feed": jax.random.normal(keys[2], (LAYERS, WIDTH, WIDTH)) * 0.3 * runs,
        "head": jax.random.normal(keys[3], (WIDTH, VOCAB)),
        "decay": jnp.linspace(0.5, 0.9, LAYERS),
    }
    return Target(model(), params)
