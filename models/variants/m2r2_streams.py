"""A layer loop with two streams: the model's own, and an accelerated one that approaches the final state earlier."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import Array


class AccelerationWeights(NamedTuple):
    """Low-rank weights that accelerate the second stream in the first E layers."""

    down: Array  # [E, r, D], A
    up: Array  # [E, D, r], B


class TwoStreamLayers(NamedTuple):
    """The first E layers with two streams, in place of `layers.run_layers`.

    Both streams start with the input of the first layer. h is the model's own stream. In the accelerated stream a, a
    layer's queries attend to the keys and values of h, of earlier tokens and of the same token. After the layer,
    B SiLU(A a) is added to a. Each token becomes two nodes of one pass, so the weights of the layers are read once.
    """

    accelerators: AccelerationWeights

    def __call__(
        self, layers, x: Array, shared: L.PassInputs, cache: kv.KVCache, settings: L.AttentionSettings
    ) -> tuple[list | Array, kv.Pending, None]:
        """Return the accelerated streams, E + 1 of them, and the pending keys and values of h in these layers.

        There is no history, see `layers.run_layers`.

        The pending values do not depend on a in any bit.
        """
        size = x.shape[1]
        run = self._unrolled if isinstance(layers, nnx.List) else self._scanned
        rotation = jax.tree.map(lambda part: jnp.concatenate([part, part], -3), settings.rotation)
        settings = settings._replace(rotation=rotation)
        streams, pending = run(layers, jnp.concatenate([x, x], 1), _duplicate_tokens(shared), cache, settings)
        fast = [pair[:, size:] for pair in streams] if isinstance(streams, list) else streams[:, :, size:]
        return fast, kv.truncate_pending(pending, size), None

    def _unrolled(self, layers, x, shared, cache, settings):
        earlier = L.keys_and_values(shared.earlier)
        streams, new = [x], []
        for i in range(len(self.accelerators.down)):
            layer_cache = L.LayerCache(cache.k[i], cache.v[i], earlier=tuple(part[i] for part in earlier))
            inputs = L.LayerInputs(shared, layer_cache, settings.at_layer(i), L.at_layer(shared.layers, i, axis=1))
            graphdef, state = nnx.split(layers[i])
            x, pending = _layer(graphdef, state, None, L.at_layer(self.accelerators, i), x, inputs)
            streams.append(x)
            new.append(pending)
        k, v = zip(*new, strict=True)
        return streams, kv.Pending(k, v, shared.positions, kv.write_dependency(x))

    def _scanned(self, layers, x, shared, cache, settings):
        graphdef, state = nnx.split(layers)
        earlier = L.keys_and_values(shared.earlier)

        def body(x, layer):
            layer_cache = L.LayerCache(cache.k, cache.v, layer, L.at_layer(earlier, layer))
            inputs = L.LayerInputs(
                shared, layer_cache, settings.at_layer(layer), L.at_layer(shared.layers, layer, axis=1)
            )
            x, new = _layer(graphdef, state, layer, L.at_layer(self.accelerators, layer), x, inputs)
            return x, (x, new)

        embedding = x[None]
        x, (streams, (k, v)) = jax.lax.scan(body, x, jnp.arange(len(self.accelerators.down)))
        return jnp.concatenate([embedding, streams]), kv.Pending(k, v, shared.positions, kv.write_dependency(x))


# `jit` lets equal layers share one trace, as in `layers.run_layers`.
@functools.partial(jax.jit, static_argnums=0)
def _layer(graphdef, state, layer, accelerator: AccelerationWeights, streams: Array, inputs: L.LayerInputs):
    """Run a layer on the streams [B, 2 T, D], first h of all tokens and then a.

    Return the streams after it, and all (k, v).
    """
    fast = streams[:, streams.shape[1] // 2 :].astype(jnp.float32)
    output, new = L.apply_layer(L.LayerWeights(graphdef, state, layer), streams, inputs)
    acceleration = nnx.silu(fast @ accelerator.down.T) @ accelerator.up.T
    return output.at[:, streams.shape[1] // 2 :].add(acceleration.astype(output.dtype)), new


def _duplicate_tokens(shared: L.PassInputs) -> L.PassInputs:
    """Return the pass inputs with each token twice.

    The second copies see the same tokens as the first ones, and no token sees them.
    """
    double = lambda x: jnp.concatenate([x, x], 1)
    hidden = jnp.zeros((*shared.positions.shape, shared.positions.shape[1]), bool)
    return shared.replace(
        positions=double(shared.positions),
        key_positions=jnp.concatenate([shared.key_positions, shared.positions], 1),
        mask=double(jnp.concatenate([shared.mask, hidden], 2)),
    )
