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

_PCI = "/sys/bus/pci/devices/*/device"
_TPU7X = "0x0076"  # as in jax/_src/hardware_utils.py


def prepare_environment() -> None:
    """Set libtpu's environment before it is loaded: no search for a TPU, and the layout of weights for TPU7x.

    On a machine with a TPU, only the layout flag is set, and only for TPU7x. Variables and flags that the user has set
    are not changed.
    """
    has_tpu = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
    if has_tpu and not any(Path(file).read_text().strip() == _TPU7X for file in glob.glob(_PCI)):
        return
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if TILES not in flags:
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {TILES}=false".strip()
    if not has_tpu:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
