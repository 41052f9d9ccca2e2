"""Target configs of GPUs: the properties of a device that the CUDA compiler reads instead of a GPU.

`targets/h200.txtpb` is the config that JAX returns on an H200 with driver 580 and jax 0.11.2. An H100 (SXM) is the same
chip with other memory. Its config is that of the H200 with the memory of XLA's own description of an H100 (openxla/xla,
xla/backends/gpu/target_config/specs/h100_sxm.txtpb). No config of a real H100 was at hand.
"""

from __future__ import annotations

import re
from importlib import resources

import jax

_H100 = {
    "memory_bandwidth": "3352320000000", "l2_cache_size": "52428800", "device_memory_size": "84942979072",
    "mem_clock_ghz": "2.619", "name": '"NVIDIA H100 80GB HBM3"', "device_description_str": '"NVIDIA H100 80GB HBM3"',
    "model_str": '"sm_9.0a with 84942979072B RAM, 132 cores, 1980000KHz clock, 2619000KHz mem clock, 52428800B L2$"',
}  # fmt: skip
"""Fields of an H100 that differ from those of an H200."""
_SINCE_0_11 = (
    "mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)  # fmt: skip
"""Fields that the compiler of jax 0.10 does not accept."""
_CHANGES: dict[str, dict[str, str]] = {"h200": {}, "h100": _H100}


def target_config(chip: str) -> str:
    """Return the target config of "h200" or "h100" as a text-format protocol buffer."""
    text = resources.files(__package__).joinpath("targets/h200.txtpb").read_text(encoding="utf-8")
    for field, value in _CHANGES[chip].items():
        line = f"{field}: {value}".replace("\\", r"\\")
        text, count = re.subn(rf"(?m)^(\s*){field}: .*$", rf"\g<1>{line}", text)
        assert count == 1, field
    if jax.__version_info__ < (0, 11):
        text = re.sub(rf"(?m)^ *({'|'.join(_SINCE_0_11)}): .*\n", "", text)
    return text
