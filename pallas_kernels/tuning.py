"""Sizes of blocks found by measurement: one tuned.json beside each kernel, {device kind: {name: size}}."""

from __future__ import annotations

import functools
import json
from pathlib import Path


@functools.cache
def _table(kernel: str) -> dict[str, dict[str, int]]:
    return json.loads((Path(__file__).parent / kernel / "tuned.json").read_text())


def tuned(kernel: str, device_kind: str | None = None) -> dict[str, int]:
    """The sizes of `kernel` for a `jax.Device.device_kind`; those under "default" where it has none of its own.

    The caller names the device: a query while tracing would find the host's, not the one the program is lowered for.
    """
    table = _table(kernel)
    return table["default"] | table.get(device_kind or "default", {})
