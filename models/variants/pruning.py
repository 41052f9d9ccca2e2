"""Models with some of the layers of a base model, or with a part of its MLPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.bridge import make_model
from specjax.models.decoder import DecoderConfig
from specjax.models.hybrid.config import HybridConfig
from specjax.models.seq2seq.config import Seq2SeqConfig, T5Config
from specjax.models.storage.schemes import MIN_GROUP, formats_of_layers
from specjax.numerics.quantized_array import QuantizedArray, is_quantized
from specjax.types import Array, Model, PyTree, Target


def prune_layers(target: Target, layers: Sequence[int]) -> Target:
    """Return the target with only these of its layers, counted from 0, in this order. It can initialise a draft model.

    Raises: UsageError for layers that it does not have, for a model that is not from `specjax.models`, and for one
      whose layers share keys or have inputs of their own.
    """
    config, num_layers = target.model.config, target.model.capabilities.num_layers
    if config is None or not isinstance(target.params, dict) or "layers" not in target.params:
        raise UsageError(f"{target.model.name} has no numbered layers; use a model of specjax.models")
    invalid = [layer for layer in layers if not 0 <= layer < num_layers]
    if invalid or not 0 < len(layers) <= num_layers:
        raise UsageError(
            f"the target has layers 0 to {num_layers - 1}; choose one or more of these, not {list(layers)}"
        )
    if isinstance(config, HybridConfig):
        if config.layer_inputs is not None or any(kind.keys_of is not None for kind in config.kinds):
            raise UsageError(
                f"{target.model.name} has layers that read the keys of others or inputs of their own, so none can be "
                "left out; use another model"
            )
        target = separate_layers(target)
        config = target.model.config
    selected = {"layers": _select(target.params["layers"], layers)}
    if isinstance(config, T5Config) and config.bias_per_layer:
        selected["bias"] = _select(target.params["bias"], layers)
    changes: dict[str, Any] = {"num_layers": len(layers)}
    if getattr(config, "is_global", None) is not None:
        changes["is_global"] = tuple(config.is_global[layer] for layer in layers)
    if isinstance(config, HybridConfig):
        changes["kinds"] = tuple(config.kinds[layer] for layer in layers)
    if getattr(config, "mlp_widths", None) is not None:
        changes["mlp_widths"] = tuple(config.mlp_widths[layer] for layer in layers)
    if getattr(config, "quantized", ()):
        changes["quantized"] = formats_of_layers(config, layers)
    return Target(rebuild_model(target, dataclasses.replace(config, **changes)), target.params | selected)


def _select(params: PyTree, layers: Sequence[int]) -> PyTree:
    """Return the parameters of these layers, which are numbered or stacked."""
    if not all(str(key).isdigit() for key in params):
        return jax.tree.map(lambda x: x[jnp.asarray(layers)], params)
    keys = sorted(params, key=int)
    return {keys[place]: params[keys[layer]] for place, layer in enumerate(layers)}


def mlp_widths(target: Target) -> tuple[int, ...]:
    """Return the number of hidden units of each layer's MLP. Raises: UsageError for a model without a DecoderConfig."""
    config = target.model.config
    if not isinstance(config, DecoderConfig) or not isinstance(target.params, dict) or "layers" not in target.params:
        raise UsageError(f"{target.model.name} has no MLPs to cut; use a model of specjax.models")
    if isinstance(config, HybridConfig):
        raise UsageError(
            f"{target.model.name} has layers of several kinds, whose MLPs cannot be cut; use another model"
        )
    if isinstance(config, Seq2SeqConfig):
        raise UsageError(f"{target.model.name} has an encoder, whose MLPs cannot be cut; use a decoder-only model")
    if config.experts is not None:
        raise UsageError(f"{target.model.name} is a mixture of experts, whose MLPs cannot be cut; use a dense model")
    return config.widths_of_mlps()


def narrow_mlps(target: Target, width: int | Sequence[int]) -> Target:
    """Return the target with only the first `width` hidden units of each MLP, or with one width per layer.

    Its parameters are slices of the target's. With different widths the layers are separate, even if the target's are
    stacked.

    Raises: UsageError for a larger width, another number of widths than layers, and for a model that is not from
      `specjax.models`.
    """
    limits, config = mlp_widths(target), target.model.config
    widths = (width,) * len(limits) if isinstance(width, int) else tuple(width)
    if len(widths) != len(limits):
        raise UsageError(f"width must be one number or one per layer, {len(limits)}, not {len(widths)} numbers")
    for units, largest in zip(widths, limits, strict=True):
        if not 1 <= units <= largest:
            raise UsageError(f"width must be from 1 to {largest}, the hidden units of the MLPs, not {units}")
    if len(set(widths)) == 1:
        layers = _slice_units(target.params["layers"], widths[0])
        changes: dict[str, Any] = {"mlp_width": widths[0], "mlp_widths": None}
    else:
        separate = separate_layers(target).params["layers"]
        layers = {key: _slice_units(separate[key], n) for key, n in zip(sorted(separate, key=int), widths, strict=True)}
        changes = {"mlp_width": max(widths), "mlp_widths": widths, "stacked": False}
    model = rebuild_model(target, dataclasses.replace(config, **changes))
    return Target(model, target.params | {"layers": layers})


def _slice_units(layers: PyTree, width: int) -> PyTree:
    """Return the parameters of layers, or of one, with the first `width` hidden units of the MLPs."""

    def slice_leaf(path, leaf):
        names = [getattr(part, "key", None) for part in path]
        if "mlp" not in names:
            return leaf
        if "down" in names:
            return _first_inputs(leaf, width)
        rows = 2 * width if "gate_up" in names else width  # a gate row and an up row per unit
        return jax.tree.map(lambda array: array[..., :rows, :], leaf)

    return jax.tree_util.tree_map_with_path(slice_leaf, layers, is_leaf=is_quantized)


def _first_inputs(matrix: Array | QuantizedArray, width: int) -> Array | QuantizedArray:
    """Return a matrix [..., O, I] with its first `width` columns.

    If these end inside of a group of a quantised matrix, its groups become smaller, and the scales are repeated. Groups
    below MIN_GROUP are not supported, as in `format_of`, so the matrix is then expanded.
    """
    if not isinstance(matrix, QuantizedArray):
        return matrix[..., :width]
    values, groups = matrix.values[..., :width], matrix.scales.shape[-1]
    if groups == 1:
        return dataclasses.replace(matrix, values=values)
    size = matrix.shape[-1] // groups
    group = math.gcd(size, width)
    if group < MIN_GROUP:
        return matrix.expand()[..., :width]
    cut = lambda leaf: jnp.repeat(leaf, size // group, -1)[..., : width // group]
    scales, offsets = jax.tree.map(cut, (matrix.scales, matrix.offsets))
    return dataclasses.replace(matrix, values=values, scales=scales, offsets=offsets)


def separate_layers(target: Target) -> Target:
    """Return the target with separate layers, whose parameters are slices if the target's layers are stacked.

    Outside of `jit` the slices are copies.
    """
    config: Any = target.model.config
    if not config.stacked:
        return target
    layers = target.params["layers"]
    at = lambda member, repeat: jax.tree.map(lambda x: x[repeat], member)
    if isinstance(config, HybridConfig):
        members, period = {int(key): member for key, member in layers.items()}, config.period
        separate = {layer: at(members[layer % period], layer // period) for layer in range(config.num_layers)}
    else:
        separate = {layer: at(layers, layer) for layer in range(config.num_layers)}
    model = rebuild_model(target, dataclasses.replace(config, stacked=False))
    return Target(model, target.params | {"layers": separate})


def rebuild_model(target: Target, config: Any) -> Model:
    """Build the model of a smaller config on the same mesh and axes."""
    mesh, over = target.model.mesh, target.model.over
    return make_model(config) if mesh is None else make_model(config, mesh, over)
