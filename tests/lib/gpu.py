"""Programs for GPUs that are not here, compiled in a process without the XLA flags of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specjax.files import cuda_compiler

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def need_compiler() -> None:
    """Skip the test, by the compiler's name, where it is missing."""
    if not cuda_compiler.is_installed():
        pytest.skip("the CUDA compiler is not installed (pip install 'specjax[gpu-compile]')")


def request(target: dict | str, topology: str = "h200:1", *, kind: str = "programs", only=("step",), **options) -> dict:
    """A request to the worker: the config of a target, and options of `make_workload`."""
    target = {"name": target} if isinstance(target, str) else target
    return {"kind": kind, "target": target, "topology": topology, "only": only, "options": options}


def reports(*requests: dict) -> list[Any]:
    """The answers of one process."""
    need_compiler()
    worker = str(Path(__file__).with_name("gpu_worker.py"))
    done = subprocess.run(
        [sys.executable, worker], input=json.dumps(requests), capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
