"""The layers of a hybrid decoder in order: unrolled, or scanned by their repeating group."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.block import HybridInputs, LayerEntries
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.hybrid.layer_inputs import at_members
from specjax.models.hybrid.memory import HybridCache, HybridPending
from specjax.models.storage.stacks import merge_whole, whole_params
from specjax.types import Array, PyTree


class LayerPass(NamedTuple):
    """Inputs of a pass that all layers share, and the entries that each layer reads."""

    config: HybridConfig
    shared: L.PassInputs
    ancestry: Ancestry | None
    cache: HybridCache
    earlier: HybridPending | None
    layer_inputs: Array | None = None  # [layers, B, T, w]

    def members(self) -> tuple[LayerKind, ...]:
        """Return the kinds of the entries of `layers`."""
        return self.config.kinds[: self.config.num_members]

    def settings(self) -> list[L.AttentionSettings | None]:
        """Return the rotation and window of each entry of `layers`; None for layers without attention."""
        c = self.config
        by_changes: dict[Any, L.AttentionSettings] = {}
        settings: list[L.AttentionSettings | None] = []
        for member, kind in enumerate(self.members()):
            if not kind.attends:
                settings.append(None)
                continue
            if kind.changes not in by_changes:
                by_changes[kind.changes] = c.of_layer(member).attention_settings(self.shared.positions)
            settings.append(by_changes[kind.changes])
        return settings

    def inputs_of(
        self, settings: list, recurrent: tuple, layer_inputs: list, repeat: Array | None = None
    ) -> list[HybridInputs]:
        """Return the inputs of each entry of `layers`, without the keys that it reads of another one.

        Args:
          settings: result of `settings`.
          recurrent: (state, pending updates or None) of each recurrent layer.
          layer_inputs: [B, T, w] of each layer; []: there are none.
          repeat: int32[], repetition of the group, if the layers are stacked.
        """
        attention, states = self.cache.attention, iter(recurrent)
        pending = None if self.earlier is None else self.earlier.attention
        inputs = []
        for member, (kind, setting) in enumerate(zip(self.members(), settings, strict=True)):
            entry = HybridInputs(self.shared, self.ancestry, settings=setting)
            if layer_inputs:
                entry = entry._replace(layer_input=layer_inputs[member])
            if kind.attends:
                place = self.config.place_of_keys(member)
                parts = () if pending is None else (pending.k[place], pending.v[place])
                earlier = parts if repeat is None else L.at_layer(parts, repeat)
                entry = entry._replace(attention=L.LayerCache(attention.k[place], attention.v[place], repeat, earlier))
            if kind.recurs:
                memory, updates = next(states)
                entry = entry._replace(memory=memory, earlier=updates)
            inputs.append(entry)
        return inputs


def run_blocks(
    config: HybridConfig, blocks: nnx.List, x: Array, shared: L.PassInputs, ancestry: Ancestry | None,
    cache: HybridCache, earlier: HybridPending | None, layer_inputs: Array | None = None,
) -> tuple[list | Array, HybridPending, PyTree]:  # fmt: skip
    """Run all layers on x [B, T, D]. `ancestry` is None if no layer is recurrent.

    layer_inputs: [layers, B, T, w], what each layer reads besides the stream; None: nothing.

    Returns: the residual stream [layers + 1, B, T, D] (a list if unrolled), the new entries of the cache, and
      `PassInputs.history` after the last layer.
    """
    layer_pass = LayerPass(config, shared, ancestry, cache, earlier, layer_inputs)
    run = _scanned if config.stacked else _unrolled
    return L.with_full_tile(lambda x: run(layer_pass, blocks, x), x)


def _recurrent(layer_pass: LayerPass) -> tuple:
    """Return (state, pending updates or None) of each recurrent layer."""
    states, earlier = layer_pass.cache.recurrent, layer_pass.earlier
    return tuple(zip(states, (None,) * len(states) if earlier is None else earlier.recurrent, strict=True))


def _unrolled(layer_pass: LayerPass, blocks: nnx.List, x: Array) -> tuple[list, HybridPending, PyTree]:
    # `jit` lets equal layers share one trace.
    @functools.partial(jax.jit, static_argnums=0)
    def run_block(graphdef, state, x, inputs):
        return nnx.merge(graphdef, state)(x, inputs)

    stream: list[Array] = [x]
    entries: list[LayerEntries] = []
    of_layers = at_members(layer_pass.layer_inputs)
    inputs = layer_pass.inputs_of(layer_pass.settings(), _recurrent(layer_pass), of_layers)
    history = layer_pass.shared.history
    for block, layer_inputs in zip(blocks, with_keys(layer_pass, inputs, entries), strict=True):
        x, new = run_block(*nnx.split(block), x, layer_inputs.with_history(history))
        history = new.history
        stream.append(x)
        entries.append(new)
    return stream, _pending(entries, layer_pass.shared, x), history


def _scanned(layer_pass: LayerPass, blocks: nnx.List, x: Array) -> tuple[Array, HybridPending, PyTree]:
    graphdefs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    stacks = [whole_params(state) for state in states]
    settings = layer_pass.settings()

    def body(carried: tuple[Array, Array, PyTree], scanned: tuple[PyTree, tuple, list]):
        (x, repeat, history), (weights, recurrent, of_layers) = carried, scanned
        stream: list[Array] = []
        entries: list[LayerEntries] = []
        inputs = with_keys(layer_pass, layer_pass.inputs_of(settings, recurrent, of_layers, repeat), entries)
        for graphdef, part, stack, layer_inputs in zip(graphdefs, weights, stacks, inputs, strict=True):
            x, new = nnx.merge(graphdef, merge_whole(part, stack, repeat))(x, layer_inputs.with_history(history))
            history = new.history
            stream.append(x)
            entries.append(new._replace(history=None))
        return (x, repeat + 1, history), (jnp.stack(stream), entries)

    carried = x, jnp.int32(0), layer_pass.shared.history
    of_layers = at_members(layer_pass.layer_inputs, layer_pass.config.num_layers // layer_pass.config.period)
    (last, _, history), (stream, entries) = jax.lax.scan(body, carried, (states, _recurrent(layer_pass), of_layers))
    stream = stream.reshape(-1, *stream.shape[2:])[:-1]  # the last is taken from the carry, see `layers._scanned`
    return jnp.concatenate([x[None], stream, last[None]]), _pending(entries, layer_pass.shared, last), history


def with_keys(layer_pass: LayerPass, inputs: list[HybridInputs], entries: list[LayerEntries]) -> Iterator[HybridInputs]:
    """Yield the inputs of each entry of `layers`, with the new keys that it reads of an earlier one.

    entries: the new entries of the layers that have run, to which the caller appends.
    """
    for kind, layer_inputs in zip(layer_pass.members(), inputs, strict=True):
        yield layer_inputs if kind.keys_of is None else layer_inputs._replace(keys=entries[kind.keys_of].keys)


def _pending(entries: list[LayerEntries], shared: L.PassInputs, x: Array) -> HybridPending:
    """Return the new entries of all layers."""
    pairs = [entry.keys for entry in entries if entry.keys is not None]
    keys, values = (tuple(pair[i] for pair in pairs) for i in (0, 1))
    updates = tuple(entry.updates for entry in entries if entry.updates is not None)
    return HybridPending(kv.Pending(keys, values, shared.positions, kv.write_dependency(x)), updates)
