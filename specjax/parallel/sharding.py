"""Spread a model over a mesh: rows of the batch over the axis "data", the work on a row over the others.

`shard` places a target; `decode` then runs as before, and its results do not depend on the mesh (rounding aside). The
split itself is `specjax.models.layout`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.numerics.global_arrays import place_one, with_shardings
from specjax.types import PyTree, Target


def mesh(
    data: int = 1, model: int | None = None, *, layer: int = 1, sequence: int = 1, devices: Sequence | None = None
) -> Mesh:
    """A mesh of `data` x `layer` x `sequence` x `model` devices, in their own order: "model" changes fastest, and stays
    within a host if it divides the host's devices.

    Args:
      data: parts of the batch. model: parts of the weights and of the heads; None: all devices that are left.
      layer: layers that a layer-parallel drafter runs at once; other models are split over it as over "model".
      sequence: parts of the cache's slots, for long contexts.
      devices: default: all, of all hosts.

    Raises: UsageError if there are not that many.
    """
    devices = jax.devices() if devices is None else devices
    others = data * layer * sequence
    if model is None:
        model = max(len(devices) // max(others, 1), 1)
    shape = data, layer, sequence, model
    if min(shape) < 1:
        raise UsageError(f"the parts of a mesh (data, layer, sequence, model) must be at least 1, not {shape}")
    wanted = math.prod(shape)
    if wanted > len(devices):
        more = (
            f", or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} to have as many of one CPU"
            if devices[0].platform == "cpu"
            else ""
        )
        raise UsageError(
            f"a mesh of {' x '.join(map(str, shape))} (data, layer, sequence, model) needs {wanted} devices, but there "
            f"are {len(devices)}; ask for fewer parts{more}"
        )
    return Mesh(np.array(devices[:wanted]).reshape(shape), ("data", "layer", "sequence", "model"))


OfModel = TypeVar("OfModel", bound=Any)
"""A `Target`, or a `Denoiser`: a dataclass with a model and its parameters."""


def shard(target: OfModel, mesh: Mesh, over: tuple[str, ...] | None = None) -> OfModel:
    """The same model with its parameters spread over `mesh`.

    target: a `Target`, or a `Denoiser`, which stays one.
    over: the axes that split it, besides "data"; None: all. `over=()` gives every device the whole model, as suits a
    small draft model.

    Raises: UsageError for a model that is not one of `specjax.models` or is sharded already, and for a mesh that does
      not divide its heads.
    """
    from specjax.models import make_model
    from specjax.models.layout import repeat_kv_heads, shard_config

    config = config_to_spread(target)
    wide, layout = shard_config(config, mesh, over)
    params = repeat_kv_heads(target.params, config, wide.num_kv_heads // config.num_kv_heads)
    params = jax.tree.map(place_one, params, layout.params(params))
    return dataclasses.replace(target, model=make_model(config, mesh, over), params=params)


def abstract_target(config, mesh: Mesh, over: tuple[str, ...] | None = None) -> Target:
    """Shapes of what `shard` returns, as `jax.ShapeDtypeStruct` with shardings: to compile without weights."""
    from specjax.models import abstract_params, make_model
    from specjax.models.layout import shard_config

    wide, layout = shard_config(config, mesh, over)
    params = abstract_params(wide)
    return Target(make_model(config, mesh, over), with_shardings(params, layout.params(params)))


def shard_head(draft: DraftHead, mesh: Mesh) -> DraftHead:
    """A learned head beside a target on `mesh`: split as that is where it divides the head's own attention heads, else
    whole on every device."""
    return draft.replace(params=jax.tree.map(place_one, draft.params, head_shardings(draft, mesh)))


def head_shardings(draft: DraftHead, mesh: Mesh) -> PyTree:
    """Of the parameters of `shard_head`, or of their shapes."""
    from specjax.models.heads.blocks import layout_of

    layout = layout_of(mesh, getattr(draft.head.config, "layer", None))
    assert layout is not None
    return layout.params(draft.params)


def over_that_fits(config, mesh: Mesh) -> tuple[str, ...]:
    """The most axes of `mesh` over which a model with this config can be split: `over` of `shard`, for draft models."""
    from specjax.models.layout import fits_heads

    split = [axis for axis in mesh.axis_names if axis != "data"]
    for axes in (split, [axis for axis in split if axis != "layer"], ["layer", "sequence"], ["sequence"]):
        kept = tuple(axis for axis in axes if axis in split)
        if fits_heads(config, math.prod(mesh.shape[axis] for axis in kept if axis != "sequence")):
            return kept
    return ()


def config_to_spread(target: Any):
    """Of a model that can be spread over a mesh. Raises: UsageError for one that cannot."""
    if target.model.config is None:
        raise UsageError(
            f"{target.model.name} cannot be sharded: it is not one of specjax.models; place its parameters yourself, "
            "whole on every device by jax.device_put(params, NamedSharding(mesh, PartitionSpec())), and split the "
            'prompts over "data"'
        )
    if target.model.mesh is not None:
        raise UsageError(f"{target.model.name} is sharded already; shard the model as it was loaded without a mesh")
    return target.model.config
