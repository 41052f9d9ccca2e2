"""Models in which each token runs its own subset of the layers (adaptive depth), and their loop over the layers.

The methods of `specjax.adaptive` fill three slots. A *plan* chooses before a pass which sublayers a token runs. An
*exit* changes the plan while the pass goes through the layers. A *repair* fills the cache of a layer that a token
skipped, for later tokens.

The sublayers of a token depend on the token, its position and its cached ancestors. They never depend on the batch or
on other tokens of the pass. So a pass over a tree, or over a whole text, gives each token the result of plain decoding.
A drafter for such a model is therefore as lossless as for any other model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import STATIC, Array, PyTree, Sublayers

Repair = Literal["absent", "propagate"]
"""The keys and values of a token in a layer whose attention it skips.

`absent`: it has none, and no token that runs the layer may read them. `propagate`: the layer projects the stream with
which the token exited (Schuster et al. 2022, arXiv 2207.07061).
"""


class TokenPositions(NamedTuple):
    """The positions of the tokens of a pass."""

    positions: Array  # int32[B, T]
    prompt_length: Array  # int32[B], tokens of the prompt
    mask: Array | None = None  # bool[B, T, T], ancestors of each token in the pass, and itself; None: outside of a pass

    @property
    def is_generated(self) -> Array:
        """Return bool[B, T], True for tokens after the prompt."""
        return self.positions >= self.prompt_length[:, None]

    @property
    def num_generated(self) -> Array:
        """Return int32[B, T], the number of tokens generated before each one; 0 within the prompt."""
        return jnp.maximum(self.positions - self.prompt_length[:, None], 0)


class LayerStreams(NamedTuple):
    """The residual streams around a layer that was run or skipped."""

    layer: Array | int  # from 0
    before_layer: Array  # [B, T, D], the stream before the layer
    after_attention: Array  # [B, T, D], after its attention
    after_mlp: Array  # [B, T, D], after its MLP
    runs: Sublayers  # bool[B, T] each, the tokens that ran each sublayer
    head: Callable[[Array], Array]  # stream [B, T, D] -> logits float32[B, T, V]


def _empty_state(batch: int, num_layers: int) -> PyTree:
    return ()


def _record_nothing(carry: PyTree) -> PyTree:
    return ()


def _keep_state(state: PyTree, records: PyTree, tokens: TokenPositions, is_committed: Array) -> PyTree:
    return state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DepthPolicy:
    """A policy of how many layers each token runs, as pure functions. `params` are the only leaves.

    `plan(params, tokens, state, num_layers) -> carry` starts a pass. `runs(carry, layer) -> Sublayers` of bool[B, T]
    each returns the sublayers of a layer that its tokens run. `observe(params, carry, streams) -> carry` reads the
    streams around the layers in `observed_layers(num_layers)`. Prompt tokens must run every sublayer (see
    `TokenPositions.is_generated`), unless no token ever reads the keys and values that they leave out.

    `state` is memory per text besides keys and values, arrays [B, ...]. The default is ().
    `init_state(batch, num_layers) -> state` creates it.
    `record(carry) -> records` returns arrays [B, T, ...] for the tokens of a pass.
    `update_state(state, records, tokens, is_committed[B, T]) -> state` adds those of committed tokens.

    `kept_layers(num_layers)` lists the layers that any token may run, if that is fixed. The other layers are then
    removed.

    `mlp_units(mlp_widths)` returns the numbers of leading hidden units that the MLPs keep for all tokens. Both have one
    number per layer.

    `replace_stream(params, carry, streams) -> stream [B, T, D]` returns the input of the next layer in place of
    `streams.after_mlp`, for methods that substitute a layer.

    `sparse_layers(num_layers)` lists layers without nested token sets. Their tokens see only other tokens that ran
    them. All sparse layers are run by the same tokens. Their caches store only those tokens, and must not be stacked.
    These are the tokens of the prompt, and at most the first of every `sparse_period` tokens after it.

    `longest_prompt` is the largest number of first tokens that count as the prompt. Longer prompts have generated
    tokens at their end, for the policy. The caches of the sparse layers are then as small as that allows.
    """

    plan: Callable[..., PyTree] = field(metadata=STATIC)
    runs: Callable[..., Sublayers] = field(metadata=STATIC)
    observe: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)
    observed_layers: Callable[[int], tuple[int, ...]] = field(
        metadata=STATIC, default=lambda num_layers: tuple(range(num_layers))
    )
    repair: Repair = field(metadata=STATIC, default="absent")
    init_state: Callable[[int, int], PyTree] = field(metadata=STATIC, default=_empty_state)
    record: Callable[[PyTree], PyTree] = field(metadata=STATIC, default=_record_nothing)
    update_state: Callable[..., PyTree] = field(metadata=STATIC, default=_keep_state)
    kept_layers: Callable[[int], tuple[int, ...]] | None = field(metadata=STATIC, default=None)
    mlp_units: Callable[[tuple[int, ...]], tuple[int, ...]] | None = field(metadata=STATIC, default=None)
    replace_stream: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    sparse_layers: Callable[[int], tuple[int, ...]] = field(metadata=STATIC, default=lambda num_layers: ())
    sparse_period: int = field(metadata=STATIC, default=1)
    longest_prompt: int | None = field(metadata=STATIC, default=None)
    check: Callable[[int], None] = field(metadata=STATIC, default=lambda num_layers: None)  # raises UsageError
    width: int | None = field(metadata=STATIC, default=None)  # width of the streams that its parameters fit; None: any
    name: str = field(metadata=STATIC, default="depth")
    params: PyTree = ()

    replace = replace


class SkippingPending(NamedTuple):
    """Pending tokens of a pass through some of the layers."""

    base: kv.Pending
    ran: Sublayers  # bool[B, T, layers] each
    records: PyTree  # from `DepthPolicy.record`


class SkippingLayers(NamedTuple):
    """The layer loop with a depth policy, in place of `layers.run_layers`."""

    policy: DepthPolicy
    params: PyTree
    tokens: TokenPositions
    state: PyTree  # from `DepthPolicy.init_state`
    head: Callable[[Array], Array]
    sparse_length: Array | None = None  # int32[B], tokens in the caches of the sparse layers

    def __call__(
        self, layers, x: Array, shared: L.PassInputs, cache: kv.KVCache, settings: L.AttentionSettings
    ) -> tuple[list | Array, SkippingPending]:
        """Return the streams, in the form of `run_layers`, and the pending tokens."""
        run = self._unrolled if isinstance(layers, nnx.List) else self._scanned
        return run(layers, x, shared, cache, settings)

    def _unrolled(self, layers, x, shared, cache, settings):
        earlier = L.keys_and_values(shared.earlier)
        carry = self.policy.plan(self.params, self.tokens, self.state, len(layers))
        observed, sparse = self._observed(len(layers)), self.policy.sparse_layers(len(layers))
        sparse_inputs = self._sparse_inputs(carry, sparse, shared) if sparse else shared
        residuals, new, ran = [x], [], []
        for i, block in enumerate(layers):
            layer_cache = L.LayerCache.of_layer(cache, i, earlier)
            inputs = L.LayerInputs(sparse_inputs if i in sparse else shared, layer_cache, settings.at_layer(i))
            runs = self._runs(carry, i, shared)
            streams, pending = _layer(
                L.LayerWeights(*nnx.split(block)), i, x, inputs, runs, self.policy.repair, self.head
            )
            x = self._next_stream(carry, streams)
            if i in observed:
                carry = self._observe(carry, streams)
            residuals.append(x)
            new.append(pending)
            ran.append(runs)
        k, v = zip(*new, strict=True)
        return residuals, self._pending(k, v, shared, x, jax.tree.map(lambda *runs: jnp.stack(runs, -1), *ran), carry)

    def _scanned(self, layers, x, shared, cache, settings):
        graphdef, state = nnx.split(layers)
        earlier, count = L.keys_and_values(shared.earlier), len(cache.k)
        carry = self.policy.plan(self.params, self.tokens, self.state, count)
        observed = self._observed(count)

        def body(carried, layer):
            x, carry = carried
            layer_cache = L.LayerCache(cache.k, cache.v, layer, L.at_layer(earlier, layer))
            inputs = L.LayerInputs(shared, layer_cache, settings.at_layer(layer))
            runs = self._runs(carry, layer, shared)
            weights = L.LayerWeights(graphdef, state, layer)
            streams, new = _layer(weights, layer, x, inputs, runs, self.policy.repair, self.head)
            x = self._next_stream(carry, streams)
            if len(observed) == count:
                carry = self._observe(carry, streams)
            elif observed:
                is_observed = jnp.any(layer == jnp.asarray(observed))
                carry = jax.lax.cond(is_observed, lambda: self._observe(carry, streams), lambda: carry)
            return (x, carry), (x, new, runs)

        embedding = x[None]
        (x, carry), (residuals, (k, v), ran) = jax.lax.scan(body, (x, carry), jnp.arange(count))
        ran = jax.tree.map(lambda runs: jnp.moveaxis(runs, 0, -1), ran)
        return jnp.concatenate([embedding, residuals[:-1], x[None]]), self._pending(k, v, shared, x, ran, carry)

    def _observed(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose streams the policy reads."""
        return () if self.policy.observe is None else self.policy.observed_layers(num_layers)

    def _runs(self, carry: PyTree, layer: Array | int, shared: L.PassInputs) -> Sublayers:
        runs = self.policy.runs(carry, layer)
        if shared.layers is None:
            return runs
        rows = L.at_layer(shared.layers, layer, axis=1)
        return jax.tree.map(lambda runs, of_row: runs & of_row[:, None], runs, rows)

    def _observe(self, carry: PyTree, streams: LayerStreams) -> PyTree:
        return carry if self.policy.observe is None else self.policy.observe(self.params, carry, streams)

    def _next_stream(self, carry: PyTree, streams: LayerStreams) -> Array:
        return (
            streams.after_mlp
            if self.policy.replace_stream is None
            else self.policy.replace_stream(self.params, carry, streams)
        )

    def _sparse_inputs(self, carry: PyTree, sparse: tuple[int, ...], shared: L.PassInputs) -> L.PassInputs:
        """Return the inputs of the sparse layers, where tokens see only tokens that run these layers."""
        ran = self._runs(carry, sparse[0], shared).attention
        itself = jnp.eye(ran.shape[1], dtype=bool)  # a skipped token must see something to avoid NaN
        return shared.replace(mask=shared.mask & (ran[:, None, :] | itself), length=self.sparse_length)

    def _pending(self, k, v, shared: L.PassInputs, x: Array, ran: Sublayers, carry: PyTree) -> SkippingPending:
        return SkippingPending(
            kv.Pending(k, v, shared.positions, kv.write_dependency(x)), ran, self.policy.record(carry)
        )


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
