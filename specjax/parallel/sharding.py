"""Spread a model over a mesh: rows of the batch over the axis "data", weights over the axis "model".

`shard` places a target; `decode` then runs as before, and its results do not depend on the mesh (rounding aside). The
split itself is `specjax.models.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.types import Target


def mesh(data: int = 1, model: int | None = None, devices: Sequence | None = None) -> Mesh:
    """A mesh of `data` x `model` devices; model None: all that are left.

    Raises: UsageError if there are not that many.
    """
    devices = jax.devices() if devices is None else devices
    model = len(devices) // data if model is None else model
    if data < 1 or model < 1 or data * model > len(devices):
        raise UsageError(f"a mesh of {data} x {model} needs {data * model} devices, but there are {len(devices)}")
    return Mesh(np.array(devices[: data * model]).reshape(data, model), ("data", "model"))


def shard(target: Target, mesh: Mesh) -> Target:
    """The same model with its parameters spread over `mesh`.

    Raises: UsageError for a model that is not one of `specjax.models`.
    """
    from specjax.models import make_model
    from specjax.models.layout import repeat_kv_heads, spread

    config = _config(target)
    wide, layout = spread(config, mesh)
    params = repeat_kv_heads(target.params, config.head_dim, wide.num_kv_heads // config.num_kv_heads)
    return Target(make_model(config, mesh), jax.device_put(params, layout.params(params)))


def abstract_target(config, mesh: Mesh) -> Target:
    """Shapes of what `shard` returns, as `jax.ShapeDtypeStruct` with shardings: to compile without weights."""
    from specjax.models import abstract_params, make_model
    from specjax.models.layout import spread

    wide, layout = spread(config, mesh)
    params = abstract_params(wide)
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params, layout.params(params)
    )
    return Target(make_model(config, mesh), shapes)


def _config(target: Target):
    if target.model.config is None:
        raise UsageError(f"{target.model.name} cannot be sharded: it is not one of specjax.models")
    return target.model.config
