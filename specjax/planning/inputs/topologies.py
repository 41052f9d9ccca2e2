"""Slices of TPU chips such as `v5e:2x4`, in the compiler's notation, and GPUs of one machine such as `h200:8`."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

from specjax.costs.chips import CHIPS, Chip
from specjax.errors import UsageError
from specjax.files import cuda_compiler, libtpu
from specjax.planning.inputs.gpu_targets import target_config

_SHAPES = {
    1: ("1", "2", "4", "8"),
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
"""Slices that error messages list: those of the pages in `specjax.costs.chips`, and common slices of the 3-D tori.

Larger multiples of 4 are valid too. GPUs are those of one machine with a switch; any number up to 8 is valid.
"""


GPUS = 8
"""GPUs of a machine with the switches of a DGX or HGX H100 or H200."""


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips, or GPUs of one machine."""

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
    """Return True for one chip, for complete hosts of at most a pod, or for at most 8 GPUs.

    A pod has 16 x 16 chips for v5e and v6e. The largest, v5p, has 16 x 20 x 28 (How to Scale Your Model, part 2).
    """
    if chip.platform == "gpu":
        return shape[0] <= GPUS
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
    """Return the slice's devices to compile for. Neither a TPU nor a GPU is needed.

    Raises: UsageError if the compiler of the chip is missing or unusable.
    """
    on_gpu = topology.chip.platform == "gpu"
    if on_gpu:
        options = _cuda_options(topology)
    else:
        options = _libtpu_options(topology)
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(**options)
    except Exception as error:  # libtpu, the CUDA plugin and jax raise several classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, NotImplementedError) and on_gpu:
            reason = "JAX has not loaded it; set JAX_PLATFORMS=cpu before Python starts"
        compiler = "the CUDA compiler" if on_gpu else "libtpu"
        raise UsageError(f"--topology: {compiler} does not support {topology.name} ({reason})") from error
    return list(description.devices)


def _libtpu_options(topology: Topology) -> dict[str, Any]:
    """Return the arguments with which JAX describes a TPU slice. Raises: UsageError without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "--topology: the TPU compiler is not installed; run pip install 'specjax[tpu-compile]' (it needs no TPU)"
        )
    libtpu.prepare_environment()
    options: dict[str, Any] = {"platform": "tpu", "topology_name": topology.name}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.chip.chip_config:
        options["chip_config_name"] = topology.chip.chip_config
    return options


def _cuda_options(topology: Topology) -> dict[str, Any]:
    """Return the arguments with which JAX describes GPUs of one machine. Raises: UsageError without the compiler."""
    if not cuda_compiler.is_installed():
        raise UsageError(
            "--topology: the CUDA compiler is not installed; run pip install 'specjax[gpu-compile]' (it needs no GPU)"
        )
    cuda_compiler.prepare_environment()
    machines = f"1x1x{topology.num_devices}"  # partitions x processes x GPUs per process
    return {"platform": "cuda", "topology": machines, "target_config": target_config(topology.chip.name)}
