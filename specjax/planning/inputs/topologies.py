"""Slices of TPU chips such as `v5e:2x4`, in the compiler's notation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from specjax.costs.chips import CHIPS, Chip
from specjax.errors import UsageError
from specjax.files.libtpu import prepare_environment

_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
"""Slices that error messages list: those of the pages in `specjax.costs.chips`, and common slices of the 3-D tori.

Larger multiples of 4 are valid too.
"""


@dataclass(frozen=True)
class Topology:
    """A slice of chips."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip


def known_topologies() -> list[str]:
    """Return the names that `parse_topology` accepts, in the order of the table."""
    return [f"{chip.name}:{shape}" for chip in CHIPS.values() for shape in _SHAPES[chip.dimensions]]


def parse_topology(name: str) -> Topology:
    """Parse a name such as `v5e:2x4`. Raises: UsageError that lists common names."""
    kind, _, sizes = name.partition(":")
    shape = tuple(int(n) for n in sizes.split("x")) if re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", sizes) else ()
    chip = CHIPS.get(kind)
    if chip is None or len(shape) != chip.dimensions or not _is_slice(chip, shape):
        some = [f"{c.name}:{','.join(_SHAPES[c.dimensions])}" for c in CHIPS.values() if chip in (None, c)]
        raise UsageError(f'--topology: "{name}" is not a slice of chips; choose one of {"; ".join(some)}')
    return Topology(chip, shape)


def one_of(chip: Chip) -> Topology:
    """Return a single chip."""
    return parse_topology(f"{chip.name}:{'x'.join('1' * chip.dimensions)}")


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
    """Return True for one chip, or for complete hosts of at most a pod.

    A pod has 16 x 16 chips for v5e and v6e. The largest, v5p, has 16 x 20 x 28 (How to Scale Your Model, part 2).
    """
    if math.prod(shape) == 1:
        return True
    longest_axis = 16 if chip.dimensions == 2 else 28
    return max(shape) <= longest_axis and all(n % h == 0 for n, h in zip(shape, chip.host, strict=True))


def larger(topology: Topology) -> Topology | None:
    """Return the next larger slice of the table, or None."""
    for shape in _SHAPES[topology.chip.dimensions]:
        sizes = tuple(map(int, shape.split("x")))
        if math.prod(sizes) > math.prod(topology.shape):
            return Topology(topology.chip, sizes)
    return None


def describe_devices(topology: Topology) -> list[Any]:
    """Return the slice's devices to compile for. No TPU is needed.

    Raises: UsageError if libtpu, which contains the compiler, is missing or unusable.
    """
    import importlib.util

    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "--topology: the TPU compiler is not installed; run pip install 'specjax[tpu-compile]' (it needs no TPU)"
        )
    prepare_environment()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.chip.chip_config:
        options["chip_config_name"] = topology.chip.chip_config
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except Exception as error:  # libtpu and jax raise several classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"--topology: libtpu does not support {topology.name} ({reason})") from error
    return list(description.devices)
