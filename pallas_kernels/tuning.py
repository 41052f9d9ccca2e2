"""Measured block sizes: one tuned.json in the folder of each kernel, {device kind: {name: size}}."""

from __future__ import annotations

import functools
import json
from pathlib import Path


@functools.cache
def _table(kernel: str) -> dict[str, dict[str, int]]:
    return json.loads((Path(__file__).parent / kernel / "tuned.json").read_text())


def tuned_sizes(kernel: str, device_kind: str | None = None) -> dict[str, int]:
    """Return the sizes of `kernel` for a `jax.Device.device_kind`. Sizes missing there come from "default".

    The caller names the device. A query during tracing would return the host's device, not the one compiled for.
    """
    table = _table(kernel)
    return table["default"] | table.get(device_kind or "default", {})
