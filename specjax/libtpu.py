"""libtpu, the TPU compiler and runtime, on machines that have no TPU."""

from __future__ import annotations

import glob
import os

_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # ask no metadata server: off Google Cloud it answers after minutes
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any known one: else libtpu warns that it finds none
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # processes that only compile do not compete for a chip
}


def prepare_environment() -> None:
    """Tell libtpu, before it is loaded, that there is no TPU to look for. On a machine with one, change nothing."""
    if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
