"""Sharding of a model over a mesh: batch rows over the axis "data", the work on a row over the other axes.

`shard` places a target. `decode` then runs as before, and its results do not depend on the mesh, except for rounding.
The split itself is in `specjax.models.layout`.
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
from specjax.numerics.global_arrays import place, place_one, with_shardings
from specjax.numerics.sampling import row_keys
from specjax.parallel.hosts import check_all_same
from specjax.types import Array, PyTree, Target


def mesh(
    data: int = 1, model: int | None = None, *, layer: int = 1, sequence: int = 1, expert: int = 1,
    devices: Sequence | None = None,
) -> Mesh:  # fmt: skip
    """Make a mesh of `data` x `layer` x `sequence` x `expert` x `model` devices, in the order of `devices`.

    The axis "model" changes fastest. It stays within a host if it divides the number of the host's devices.

    Args:
      data: parts of the batch.
      model: parts of the weights and of the heads; None: all remaining devices.
      layer: layers that a layer-parallel draft model runs at the same time; other models use it like "model".
      sequence: parts of the cache's slots, for long contexts.
      expert: parts of the experts of a mixture; other weights use it like "model". A mesh with 1 lacks this axis.
      devices: None: all devices of all hosts.

    Raises: UsageError if there are not enough devices.
    """
    devices = jax.devices() if devices is None else devices
    fixed_parts = data * layer * sequence * expert
    if model is None:
        model = max(len(devices) // max(fixed_parts, 1), 1)
    sizes = {"data": data, "layer": layer, "sequence": sequence, "expert": expert, "model": model}
    if expert == 1:
        del sizes["expert"]
    shape, names = tuple(sizes.values()), ", ".join(sizes)
    if min(shape) < 1:
        raise UsageError(f"the parts of a mesh ({names}) must be at least 1, not {shape}")
    num_needed = math.prod(shape)
    if num_needed > len(devices):
        hint = (
            f", or set XLA_FLAGS=--xla_force_host_platform_device_count={num_needed} to have as many on one CPU"
            if devices[0].platform == "cpu"
            else ""
        )
        raise UsageError(
            f"a mesh of {' x '.join(map(str, shape))} ({names}) needs {num_needed} devices, but "
            f"there are {len(devices)}; use fewer parts{hint}"
        )
    return Mesh(np.array(devices[:num_needed]).reshape(shape), tuple(sizes))


ShardableModel = TypeVar("ShardableModel", bound=Any)
"""A `Target` or a `Denoiser`: a dataclass with a model and its parameters."""


def shard(target: ShardableModel, mesh: Mesh, over: tuple[str, ...] | None = None) -> ShardableModel:
    """Return the same model with its parameters sharded over `mesh`.

    Args:
      target: a `Target` or a `Denoiser`. The result is of the same type.
      over: axes that split the model, besides "data"; None: all. `over=()` replicates it on every device, which suits a
        small draft model.

    Raises: UsageError for a model that is not from `specjax.models` or is already sharded, and for a mesh that does not
      divide its heads.
    """
    from specjax.models import make_model
    from specjax.models.layout import repeat_kv_heads, shard_config

    config = shardable_config(target)
    full_config, layout = shard_config(config, mesh, over)
    params = repeat_kv_heads(target.params, config, full_config.num_kv_heads // config.num_kv_heads)
    params = jax.tree.map(place_one, params, layout.params(params))
    return dataclasses.replace(target, model=make_model(config, mesh, over), params=params)


def abstract_target(config, mesh: Mesh, over: tuple[str, ...] | None = None) -> Target:
    """Return the result of `shard` with `jax.ShapeDtypeStruct`s and shardings for weights, to compile without them."""
    from specjax.models import abstract_params, make_model
    from specjax.models.layout import shard_config

    full_config, layout = shard_config(config, mesh, over)
    params = abstract_params(full_config)
    return Target(make_model(config, mesh, over), with_shardings(params, layout.params(params)))


def shard_head(draft: DraftHead, mesh: Mesh) -> DraftHead:
    """Shard a draft head over `mesh` like the target.

    The head is replicated if the mesh does not divide its attention heads.
    """
    return draft.replace(params=jax.tree.map(place_one, draft.params, head_shardings(draft, mesh)))


def head_shardings(draft: DraftHead, mesh: Mesh) -> PyTree:
    """Return the shardings of the parameters of `shard_head`. The parameters may be shapes."""
    from specjax.models.heads.blocks import head_layout

    layout = head_layout(mesh, getattr(draft.head.config, "layer", None))
    assert layout is not None
    return layout.params(draft.params)


def largest_over(config, mesh: Mesh) -> tuple[str, ...]:
    """Return the largest set of mesh axes that can split a model with this config, for `over` of `shard`."""
    from specjax.models.layout import fits_heads

    split = [axis for axis in mesh.axis_names if axis != "data"]
    for axes in (split, [axis for axis in split if axis != "layer"], ["layer", "sequence"], ["sequence"]):
        over = tuple(axis for axis in axes if axis in split)
        if fits_heads(config, math.prod(mesh.shape[axis] for axis in over if axis != "sequence")):
            return over
    return ()


def shardable_config(target: Any):
    """Return the config of a model that can be sharded. Raises: UsageError for a model that cannot."""
    if target.model.config is None:
        raise UsageError(
            f"{target.model.name} cannot be sharded: it is not from specjax.models; replicate its parameters with "
            'jax.device_put(params, NamedSharding(mesh, PartitionSpec())), and split the prompts over "data"'
        )
    if target.model.mesh is not None:
        raise UsageError(f"{target.model.name} is already sharded; pass the model that was loaded without a mesh")
    return target.model.config


def spread_rows(mesh: Mesh, tokens, lengths, keys) -> tuple[tuple[Array, Array], Array]:
    """Shard a batch over the mesh axis "data", for `decode` and `stream`.

    If the axis does not divide the batch, copies of the first row are appended. A copy finishes together with its
    original and so costs no steps. Drop the text that is decoded for it.

    Args:
      tokens: int[B, P]. lengths: int[B]. keys: one key or [B], as in `decode`. All are complete on every host.

    Raises: UsageError if the hosts of the mesh have different prompts or keys.

    Returns: ((tokens [B', P], lengths [B']), keys [B']), where B' is a multiple of the axis.
    """
    batch = len(lengths)
    keys = row_keys(keys, batch)  # before the copies: row b has fold_in(key, b)
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        check_all_same({"prompts": [tokens, lengths], "random keys": keys})
    row = _rows_with_copies(mesh, batch)
    tokens, lengths = np.asarray(tokens, np.int32)[row], np.asarray(lengths, np.int32)[row]
    return (place(tokens, mesh, "data"), place(lengths, mesh, "data")), place(keys[row], mesh, "data")


def spread_inputs(mesh: Mesh, inputs: PyTree) -> PyTree:
    """Shard the inputs [B, ...] of a batch like the prompts of `spread_rows`. None stays None.

    Raises: UsageError if the hosts of the mesh have different inputs.
    """
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        check_all_same({"inputs": inputs})
    return jax.tree.map(lambda x: place(np.asarray(x)[_rows_with_copies(mesh, len(x))], mesh, "data"), inputs)


def _rows_with_copies(mesh: Mesh, batch: int) -> np.ndarray:
    """Return the row of each row of a sharded batch. The copies behind the last row are of the first one."""
    parts = mesh.shape.get("data", 1)
    row = np.arange(-(-batch // parts) * parts)
    return np.where(row < batch, row, 0)
