"""Environment of libtpu, the TPU compiler and runtime, for machines without a TPU, and one setting for TPU7x."""

from __future__ import annotations

import glob
import os
from pathlib import Path

_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server: outside Google Cloud that takes minutes
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any valid type: without one, libtpu warns that it finds none
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # processes that only compile do not compete for a chip
}

TILES = "--xla_tpu_control_large_2nd_minor_layout_for_x16"
"""Compiler flag that allows programs for TPU7x to store 16-bit arrays in tiles of 16 x 128.

Program arguments arrive in tiles of 8 x 128. By default every program for TPU7x therefore copies all bfloat16 weights
into new tiles at its start. Llama 3 8B over eight devices then takes 3.6 GB more per device, and a streamed step moves
3.7 times as many bytes. With the flag off, the compiler schedules the same number of cycles; older generations use
8 x 128 anyway. `jax.experimental.layout` cannot replace the flag. It keeps 16 x 128 on one device, but XLA drops the
tiles of an argument that is partitioned over several devices, and its AUTO layout chooses 8 x 128.
"""

VMEM_LIMIT = "xla_tpu_scoped_vmem_limit_kib"
"""Compiler flag for the on-chip memory that one operation may use, in KiB."""

WIDE_VMEM = {"v5e": 65536, "v6e": 65536}
"""Values of VMEM_LIMIT by chip, for chips with 128 MiB per core.

A product of few rows streams its weights through this memory. By default it may use 16 MiB on v5e, and the compiler
schedules 383 bytes per cycle of the output layer of Llama 3 8B over four chips. With 64 MiB it schedules 443. The
published bandwidth is 545 bytes per cycle (libtpu 0.0.42).
"""

_PCI = "/sys/bus/pci/devices/*/device"
_PCI_IDS = {"0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}  # as in jax/_src/hardware_utils.py


def prepare_environment() -> None:
    """Set libtpu's environment before it is loaded: no search for a TPU, and compiler flags for its chip.

    A machine with a TPU gets the flags of its chip: the layout of weights for TPU7x, and WIDE_VMEM. A machine without
    one may compile for any chip. It gets the layout flag, which changes nothing for other chips, and programs for
    absent chips are compiled with `options_of`. Variables and flags that the user has set are not changed.
    """
    has_tpu = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
    chips = {_PCI_IDS.get(Path(file).read_text().strip()) for file in glob.glob(_PCI)} if has_tpu else {"tpu7x"}
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if "tpu7x" in chips and TILES not in flags:
        flags += f" {TILES}=false"
    for chip in sorted(WIDE_VMEM.keys() & chips):
        if VMEM_LIMIT not in flags:
            flags += f" --{VMEM_LIMIT}={WIDE_VMEM[chip]}"
    if flags:
        os.environ["LIBTPU_INIT_ARGS"] = flags.strip()
    if not has_tpu:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)


def options_of(chip: str) -> dict[str, str]:
    """Return the compiler options of programs for an absent chip, unless LIBTPU_INIT_ARGS sets them."""
    if chip not in WIDE_VMEM or VMEM_LIMIT in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return {}
    return {VMEM_LIMIT: str(WIDE_VMEM[chip])}
