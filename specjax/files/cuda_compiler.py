"""Environment of the CUDA compiler on machines without an NVIDIA GPU."""

from __future__ import annotations

import glob
import importlib.util
import os

PLUGINS = "jax_cuda13_plugin", "jax_cuda12_plugin"
"""JAX plugins that contain the compiler, the preferred one first."""
_ASSEMBLER = "nvidia"
"""The package whose parts `nvidia-cuda-nvcc` and `nvidia-nvvm` assemble and link the kernels."""


def is_installed() -> bool:
    """Return True if the compiler and its assembler are installed."""
    plugin = any(importlib.util.find_spec(name) is not None for name in PLUGINS)
    return plugin and importlib.util.find_spec(_ASSEMBLER) is not None


def prepare_environment() -> None:
    """Let JAX load the compiler without a GPU, before JAX looks for its plugins.

    Without this variable, the plugin checks for libraries that only programs on a GPU need, and prints a traceback.
    On a machine with a GPU, nothing is changed.
    """
    if not glob.glob("/dev/nvidia[0-9]*") and is_installed():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
