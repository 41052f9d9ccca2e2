"""Check that the weights of a model fit in the memory of the devices, before they are read."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from specjax.catalog.schemes import SCHEME_NAMES
from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.models.bridge import Config, abstract_params
from specjax.models.layout import shard_config
from specjax.models.storage import num_bytes, quantized_config

ROOM = 0.95
"""Largest share of the memory that the weights of a proposed scheme may take; the rest is for cache and activations."""


def check_room(config: Config, mesh: Mesh | None = None, over: tuple[str, ...] | None = None) -> None:
    """Check that the parameters of a config fit on each device. Devices without a known limit pass.

    Raises: UsageError, with the first dtype or scheme that fits, and the argument for it.
    """
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    limit = _memory_limit(device)
    if limit is None or (needed := _bytes_per_device(config, mesh, over)) <= limit:
        return
    form = config.dtype if not config.quantized else "its quantised formats"
    place = f"this {device.device_kind} has {gib(limit)}"
    problem = f"{config.name} needs {gib(needed)} in {form}, and {place}"
    for words, smaller in _smaller_configs(config, device.platform):
        if (size := _bytes_per_device(smaller, mesh, over)) <= ROOM * limit:
            raise UsageError(f"{problem}; it fits with {words}, in {gib(size)}")
    raise UsageError(f"{problem}; no dtype or scheme fits, so split it over several devices with a mesh")


def _smaller_configs(config: Config, platform: str):
    """Yield the argument of `load` in words, and the config that it gives, from little rounding to much."""
    if config.dtype == "float32" and not config.quantized:
        yield 'dtype="bfloat16" (--dtype bfloat16)', dataclasses.replace(config, dtype="bfloat16")
    for name in SCHEME_NAMES:
        yield f'quantize="{name}" (--quantize {name})', quantized_config(config, name, platform)


def _memory_limit(device: jax.Device) -> int | None:
    """Return the bytes that arrays on a device may take; None if they are unknown, as on a CPU."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def _bytes_per_device(config: Config, mesh: Mesh | None, over: tuple[str, ...] | None) -> int:
    """Return the bytes of the parameters on one device."""
    if mesh is None:
        return num_bytes(abstract_params(config))
    full_config, layout = shard_config(config, mesh, over)
    shapes = abstract_params(full_config)
    local = lambda leaf, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
    return num_bytes(jax.tree.map(local, shapes, layout.params(shapes)))
