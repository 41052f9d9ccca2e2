"""The platform of a program while it is traced."""

from __future__ import annotations

import jax


def of_program() -> str:
    """Return "cpu", "gpu" or "tpu": the platform of the current mesh's devices, else of JAX's default backend.

    The planner traces programs for chips that are not here, and sets their mesh.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind.lower()
    return next((platform for platform in ("tpu", "cpu") if kind.startswith(platform)), "gpu")


def kind_of_device() -> str:
    """Return the `device_kind` of the devices that `of_program` looks at."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
