"""A cache of reports on disk. The key of a report covers everything that it depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

import jax

from specjax.arrays.modes import matmul_precision
from specjax.files.atomic import cache_folder, write_atomic
from specjax.files.libtpu import prepare_environment
from specjax.files.private import create_private, read_private
from specjax.persistence import program_key
from specjax.planning.records import ProgramReport
from specjax.planning.workload import Workload
from specjax.version import __version__


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of all packages that affect compilation."""
    package_versions = {"specjax": __version__, "jax": jax.__version__}
    for name in ("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package_versions[name] = importlib.metadata.version(name)
    return package_versions


def _file(work: Workload, name: str, nodes: int | None) -> Path:
    prepare_environment()  # sets the flags of a compilation, which are part of the key
    flags = os.environ.get("XLA_FLAGS" if work.platform == "gpu" else "LIBTPU_INIT_ARGS")
    key = json.dumps([repr(work), name, nodes, versions(), flags, matmul_precision(), program_key.digest_package()])
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def load(work: Workload, name: str, nodes: int | None) -> ProgramReport | None:
    """Return the cached report on program `name` of a workload that verifies `nodes`, or None."""
    try:
        return ProgramReport.from_json(json.loads(read_private(_file(work, name, nodes))))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save(work: Workload, name: str, nodes: int | None, report: ProgramReport) -> None:
    """Write a report completely or not at all. Without a writable folder, nothing is written."""
    with contextlib.suppress(OSError):
        create_private(cache_folder() / "plans")
        write_atomic(_file(work, name, nodes), json.dumps(dataclasses.asdict(report)).encode())
