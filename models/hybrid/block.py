"""A layer of a hybrid decoder: one or two mixers on the same input, and a feed-forward block."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from specjax.models import layers as L
from specjax.models.decoder import activation_function, make_attention, run_feed
from specjax.models.experts.feed import MixtureFeed
from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.hybrid.layer_inputs import LayerInputReader, Scale
from specjax.models.hybrid.mixers.gated_delta import GatedDelta
from specjax.models.hybrid.mixers.mamba2 import Mamba2
from specjax.models.hybrid.mixers.short_convolution import ShortConvolution
from specjax.models.hybrid.recurrence import RecurrentState, Updates
from specjax.types import Array

RECURRENT_LAYERS = {
    "gated_delta": GatedDelta,
    "mamba2": Mamba2,
    "short_convolution": ShortConvolution,
    "attention_and_mamba2": Mamba2,
}


class HybridInputs(NamedTuple):
    """Inputs of one layer besides the residual stream. Fields that its mixer does not need are None."""

    shared: L.PassInputs
    ancestry: Ancestry | None
    attention: L.LayerCache | None = None
    settings: L.AttentionSettings | None = None
    memory: RecurrentState | None = None
    earlier: Updates | None = None
    keys: tuple | None = None  # new keys and values of the layer that `LayerKind.keys_of` names
    layer_input: Array | None = None  # [B, T, w], see `layer_inputs`

    def with_history(self, history: Any) -> HybridInputs:
        """Return the inputs with another `PassInputs.history`."""
        return self if history is None else self._replace(shared=self.shared.replace(history=history))


class LayerEntries(NamedTuple):
    """New entries of one layer: its keys and values, and its recurrent updates. Missing ones are None."""

    keys: tuple | None
    updates: Updates | None
    history: Any = None  # `PassInputs.history` after the layer


class HybridBlock(nnx.Module):
    """A layer with the sublayers of its kind, each behind a norm."""

    def __init__(self, c: HybridConfig, kind: LayerKind, rngs: nnx.Rngs):
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.kind, self.multipliers = kind, c.multipliers
        post_norm = lambda norm_before: norm() if c.norms == "both" and norm_before is not None else None
        self.mixer_norm = norm() if kind.mixer != "none" else None
        self.mixer_post_norm = post_norm(self.mixer_norm)
        attention = lambda: make_attention(with_scaled_keys(c), queries_only=not kind.has_keys, rngs=rngs)
        self.attention = attention() if kind.attends else None
        self.recurrent = RECURRENT_LAYERS[kind.mixer](c, rngs) if kind.recurs else None
        self.mlp_norm = norm() if kind.feed != "none" else None
        self.mlp_post_norm = post_norm(self.mlp_norm)
        self.mlp = make_feed(c, kind, rngs)
        self.layer_input = None if c.layer_inputs is None else LayerInputReader(c, rngs)
        self.scale = Scale(c.dtype) if c.layer_scales else None

    def __call__(self, x: Array, inputs: HybridInputs) -> tuple[Array, LayerEntries]:
        """Return the residual stream after the layer, and its new entries."""
        m, keys, updates, history = self.multipliers, None, None, inputs.shared.history
        if self.mixer_norm is not None:
            n = self.mixer_norm(x)
            outputs = []
            if self.recurrent is not None:
                y, updates = self.recurrent(
                    scaled(n, m.mamba_in), inputs.shared, inputs.ancestry, inputs.memory, inputs.earlier
                )
                outputs.append(scaled(y, m.mamba_out))
            if self.attention is not None:
                assert inputs.attention is not None and inputs.settings is not None
                layer = L.LayerInputs(inputs.shared, inputs.attention, inputs.settings, keys=inputs.keys)
                y, keys = self.attention(scaled(n, m.attention_in), layer)
                outputs.append(scaled(y, m.attention_out))
            y = sum(outputs[1:], outputs[0])
            y = y if self.mixer_post_norm is None else self.mixer_post_norm(y)
            x = x + scaled(y, m.residual)
        if self.mlp is not None and self.mlp_norm is not None:
            y, history = run_feed(self.mlp, self.mlp_norm(x), inputs.shared)
            y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
            x = x + scaled(y, m.down * m.residual)
        if self.layer_input is not None:
            assert inputs.layer_input is not None
            x = x + self.layer_input(x, inputs.layer_input)
        x = x if self.scale is None else self.scale(x)
        return x, LayerEntries(keys if self.kind.has_keys else None, updates, history)


def with_scaled_keys(c: HybridConfig) -> HybridConfig:
    """Return a config whose scores have the factor of its keys. Keys themselves stay without it."""
    factor = c.multipliers.key
    scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
    return c if factor == 1.0 else dataclasses.replace(c, query_scale=scale * factor)


def make_feed(c: HybridConfig, kind: LayerKind, rngs: nnx.Rngs) -> L.GatedMLP | SquaredReluMLP | MixtureFeed | None:
    """Create the feed-forward block of a layer; None if it has none."""
    if kind.feed == "none":
        return None
    if kind.feed == "relu2":
        return SquaredReluMLP(c, rngs)
    act = activation_function(c)
    if kind.feed == "moe":
        assert c.experts is not None, "the sizes of experts are part of the config"
        return MixtureFeed(c.width, c.experts, act, joined="gate_up" in c.joined, dtype=c.dtype, rngs=rngs)
    gate = c.multipliers.gate
    act = act if gate == 1.0 else functools.partial(lambda act, y: act(scaled(y, gate)), act)
    return L.GatedMLP(c.width, c.mlp_width, act, joined="gate_up" in c.joined, dtype=c.dtype, rngs=rngs)


class SquaredReluMLP(nnx.Module):
    """Feed-forward block without a gate: down(relu(up(x)) ** 2)."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        self.up = L.Linear(c.width, c.mlp_width, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(c.mlp_width, c.width, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        y = jax.nn.relu(self.up(x))
        return self.down(y * y)


def scaled(x: Array, factor: float) -> Array:
    """Return x times a constant of the model, in the dtype of x."""
    return x if factor == 1.0 else x * factor
