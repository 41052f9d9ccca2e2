"""The layer loop of attention models with a depth policy."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.skipping.policy import DepthPass, LayerStreams, Repair, SkippingPending
from specjax.types import Array, PyTree, Sublayers


class SkippingLayers(NamedTuple):
    """The layer loop of attention models with a depth policy, in place of `layers.run_layers`."""

    depth: DepthPass

    def __call__(
        self, layers, x: Array, shared: L.PassInputs, cache: kv.KVCache, settings: L.AttentionSettings
    ) -> tuple[list | Array, SkippingPending, None]:
        """Return the streams and the pending tokens, in the form of `run_layers`, without a history."""
        run = self._unrolled if isinstance(layers, nnx.List) else self._scanned
        return *run(layers, x, shared, cache, settings), None

    def _unrolled(self, layers, x, shared, cache, settings):
        earlier, depth = L.keys_and_values(shared.earlier), self.depth
        carry = depth.start(len(layers))
        observed, sparse = depth.observed(len(layers)), depth.policy.sparse_layers(len(layers))
        sparse_inputs = self._sparse_inputs(carry, sparse, shared) if sparse else shared
        residuals, new, ran = [x], [], []
        for i, block in enumerate(layers):
            layer_cache = L.LayerCache.of_layer(cache, i, earlier)
            inputs = L.LayerInputs(sparse_inputs if i in sparse else shared, layer_cache, settings.at_layer(i))
            runs = depth.runs(carry, i, shared.layers)
            weights = L.LayerWeights(*nnx.split(block))
            streams, pending = _layer(weights, i, x, inputs, runs, depth.policy.repair, depth.head)
            x, carry = depth.after_layer(carry, streams, i in observed)
            residuals.append(x)
            new.append(pending)
            ran.append(runs)
        k, v = zip(*new, strict=True)
        return residuals, self._pending(k, v, shared, x, jax.tree.map(lambda *runs: jnp.stack(runs, -1), *ran), carry)

    def _scanned(self, layers, x, shared, cache, settings):
        graphdef, state = nnx.split(layers)
        earlier, count, depth = L.keys_and_values(shared.earlier), len(cache.k), self.depth
        observed = depth.observed(count)

        def body(carried, layer):
            x, carry = carried
            layer_cache = L.LayerCache(cache.k, cache.v, layer, L.at_layer(earlier, layer))
            inputs = L.LayerInputs(shared, layer_cache, settings.at_layer(layer))
            runs = depth.runs(carry, layer, shared.layers)
            weights = L.LayerWeights(graphdef, state, layer)
            streams, new = _layer(weights, layer, x, inputs, runs, depth.policy.repair, depth.head)
            is_some = 0 < len(observed) < count
            is_observed = jnp.any(layer == jnp.asarray(observed)) if is_some else bool(observed)
            x, carry = depth.after_layer(carry, streams, is_observed)
            return (x, carry), (x, new, runs)

        embedding = x[None]
        (x, carry), (residuals, (k, v), ran) = jax.lax.scan(body, (x, depth.start(count)), jnp.arange(count))
        ran = jax.tree.map(lambda runs: jnp.moveaxis(runs, 0, -1), ran)
        return jnp.concatenate([embedding, residuals[:-1], x[None]]), self._pending(k, v, shared, x, ran, carry)

    def _sparse_inputs(self, carry: PyTree, sparse: tuple[int, ...], shared: L.PassInputs) -> L.PassInputs:
        """Return the inputs of the sparse layers, where tokens see only tokens that run these layers."""
        ran = self.depth.runs(carry, sparse[0], shared.layers).attention
        itself = jnp.eye(ran.shape[1], dtype=bool)  # a skipped token must see something to avoid NaN
        return shared.replace(mask=shared.mask & (ran[:, None, :] | itself), length=self.depth.sparse_length)

    def _pending(self, k, v, shared: L.PassInputs, x: Array, ran: Sublayers, carry: PyTree) -> SkippingPending:
        return self.depth.pending(kv.Pending(k, v, shared.positions, kv.write_dependency(x)), ran, carry)


def _layer(weights: L.LayerWeights, layer, x: Array, inputs: L.LayerInputs, runs: Sublayers, repair: Repair, head):
    """Run the sublayers of one layer that its tokens need. Return the streams around it, and (k, v).

    A sublayer that no token of the batch runs costs no time, except for propagated keys and values.
    """
    after_attention, new = _attend(weights.graphdef, repair, weights.state, weights.layer, x, inputs, runs.attention)
    after_mlp = _feed(weights.graphdef, weights.state, weights.layer, after_attention, inputs.shared, runs.mlp)
    return LayerStreams(layer, x, after_attention, after_mlp, runs, head), new


# `jit` lets equal layers share one trace, as in `layers.run_layers`.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(graphdef, repair: Repair, state, layer, x: Array, inputs: L.LayerInputs, tokens: Array):
    block = lambda: L.LayerWeights(graphdef, state, layer).block()
    otherwise = (lambda x: block().keys(x, inputs)) if repair == "propagate" else None
    return L.run_where(tokens, lambda x: block().attend(x, inputs), x, otherwise)


@functools.partial(jax.jit, static_argnums=0)
def _feed(graphdef, state, layer, x: Array, shared: L.PassInputs, tokens: Array) -> Array:
    return L.run_where(tokens, lambda x: (L.LayerWeights(graphdef, state, layer).block().feed(x, shared), ()), x)[0]
