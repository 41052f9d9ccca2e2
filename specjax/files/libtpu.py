"""libtpu, the TPU compiler and runtime, on machines that have no TPU, and the one setting that TPU7x wants."""

from __future__ import annotations

import glob
import os
from pathlib import Path

_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # ask no metadata server: off Google Cloud it answers after minutes
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any known one: else libtpu warns that it finds none
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # processes that only compile do not compete for a chip
}

TILES = "--xla_tpu_control_large_2nd_minor_layout_for_x16"
"""A flag: whether programs for TPU7x may hold 16-bit arrays in tiles of 16 x 128.

Their arguments come in 8 x 128, so by default all bfloat16 weights are tiled anew at the start of each program, beside
what is there: Llama 3 8B over eight devices takes 3.6 GB more per device, and a streamed step moves 3.7 times as much.
Without, the compiler schedules the same cycles, and older generations have 8 x 128 anyway. Weights cannot be laid out
once instead: `jax.experimental.layout` keeps 16 x 128 on one device, but the tiles of an argument that is split over
several are dropped where XLA partitions the program, and its AUTO chooses 8 x 128.
"""

_PCI = "/sys/bus/pci/devices/*/device"
_TPU7X = "0x0076"  # as in jax/_src/hardware_utils.py


def prepare_environment() -> None:
    """Tell libtpu, before it is loaded, that there is no TPU to look for, and how programs for TPU7x hold weights.

    On a machine with a TPU, change nothing; on one with TPU7x, that alone. Variables and flags that are set stay.
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
