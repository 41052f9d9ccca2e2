"""Two streams through a model's layers: its own, and a faster one beside it that runs ahead of the depth."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import Array


class Accelerators(NamedTuple):
    """What makes the second stream faster, of the first E layers."""

    down: Array  # [E, r, D], A
    up: Array  # [E, D, r], B


class Accelerated(NamedTuple):
    """The first E layers with two streams, in place of `layers.run_layers`.

    Both begin with what the first layer reads. h is the model's own. Of a, the fast one, a layer's queries read the
    keys and values of h, of the tokens before and of its own token; behind it B SiLU(A a) is added. Each token is two
    nodes of one pass, so the layers are read once.
    """

    accelerators: Accelerators

    def __call__(
        self, layers, x: Array, step: L.Step, cache: kv.KVCache, reach: L.Reach
    ) -> tuple[list | Array, kv.Pending]:
        """The fast streams, E + 1 of them, and what is pending of h in these layers: no bit of it depends on a."""
        size = x.shape[1]
        run = self._unrolled if isinstance(layers, nnx.List) else self._scanned
        streams, pending = run(layers, jnp.concatenate([x, x], 1), _both(step), cache, reach)
        fast = [both[:, size:] for both in streams] if isinstance(streams, list) else streams[:, :, size:]
        return fast, kv.first_of(pending, size)

    def _unrolled(self, layers, x, step, cache, reach):
        earlier = L.keys_and_values(step.earlier)
        streams, new = [x], []
        for i in range(len(self.accelerators.down)):
            prefix = L.Prefix(cache.k[i], cache.v[i], earlier=tuple(part[i] for part in earlier))
            inputs = L.LayerInputs(step, prefix, reach.of(i), L.at_layer(step.layers, i, axis=1))
            graphdef, state = nnx.split(layers[i])
            x, pending = _layer(graphdef, state, None, L.at_layer(self.accelerators, i), x, inputs)
            streams.append(x)
            new.append(pending)
        k, v = zip(*new, strict=True)
        return streams, kv.Pending(k, v, step.positions, kv.after(x))

    def _scanned(self, layers, x, step, cache, reach):
        graphdef, state = nnx.split(layers)
        earlier = L.keys_and_values(step.earlier)

        def body(x, layer):
            prefix = L.Prefix(cache.k, cache.v, layer, L.at_layer(earlier, layer))
            inputs = L.LayerInputs(step, prefix, reach.of(layer), L.at_layer(step.layers, layer, axis=1))
            x, new = _layer(graphdef, state, layer, L.at_layer(self.accelerators, layer), x, inputs)
            return x, (x, new)

        first = x[None]
        x, (streams, (k, v)) = jax.lax.scan(body, x, jnp.arange(len(self.accelerators.down)))
        return jnp.concatenate([first, streams]), kv.Pending(k, v, step.positions, kv.after(x))


# Under `jit`, so that equal layers share one trace, as in `layers.run_layers`.
@functools.partial(jax.jit, static_argnums=0)
def _layer(graphdef, state, layer, accelerator: Accelerators, both: Array, inputs: L.LayerInputs):
    """[B, 2 T, D] behind a layer, h of all tokens and then a, and (k, v) of all of these."""
    fast = both[:, both.shape[1] // 2 :].astype(jnp.float32)
    after, new = L.one_layer(L.Weights(graphdef, state, layer), both, inputs)
    more = nnx.silu(fast @ accelerator.down.T) @ accelerator.up.T
    return after.at[:, both.shape[1] // 2 :].add(more.astype(after.dtype)), new


def _both(step: L.Step) -> L.Step:
    """The pass with each token twice, where the second ones see what the first do and nobody sees them."""
    twice = lambda x: jnp.concatenate([x, x], 1)
    hidden = jnp.zeros((*step.positions.shape, step.positions.shape[1]), bool)
    return step.replace(
        positions=twice(step.positions),
        key_positions=jnp.concatenate([step.key_positions, step.positions], 1),
        mask=twice(jnp.concatenate([step.mask, hidden], 2)),
    )
