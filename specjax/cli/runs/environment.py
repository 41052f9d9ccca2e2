"""The machine of a run: dtype, compilation caches, clocks, memory, and the facts that a record needs."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.text import Text

from specjax.cli.output.console import Console, print_error, visible
from specjax.files.atomic import cache_folder
from specjax.files.private import create_private, explain_risk
from specjax.persistence.cards import describe_version
from specjax.persistence.program_cache import ProgramCache


def choose_dtype(dtype: str) -> str:
    """Return the dtype of "auto": float32 on a CPU, where texts can be compared token by token, else bfloat16.

    In bfloat16, SmolLM2 ran 1.4 times as fast on a CPU with AMX, but near-ties flipped in 16 of 18 texts.
    """
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def use_compilation_cache(enabled: bool) -> None:
    """Store compiled programs between processes, unless the user has configured JAX's own cache."""
    if not enabled or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = _own_cache("compiled")
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _own_cache(name: str) -> Path | None:
    """Create a folder in the cache of this user, whose files are executed.

    Return None if the cache cannot be written. Print a note, too, if other users could replace its files.
    """
    folder = cache_folder() / name
    try:
        risk = explain_risk(folder)
        if risk is None:
            create_private(folder)
            return folder
    except OSError:  # the cache is optional
        return None
    _print_once(f"compiled programs are not stored: {risk}")
    return None


_print_once = functools.cache(print_error)


TEXT_FLAGS = ("prompt", "batch_file", "seed", "system")
"""Flags that no program depends on."""


def open_program_cache(flags: Mapping[str, Any]) -> ProgramCache | None:
    """Open the compiled programs of earlier commands; return None with --no-cache or without a folder.

    The programs of the last command with the same flags are read in the background.
    """
    folder = None if flags["no_cache"] else _own_cache("programs")
    if folder is None:
        return None
    cache = ProgramCache(folder, plain_first=True)
    cache.expect(repr(sorted((name, repr(value)) for name, value in flags.items() if name not in TEXT_FLAGS)))
    return cache


class Clock:
    """The seconds of a stage, set when it ends."""

    seconds = 0.0


@contextlib.contextmanager
def stage(log: Console, doing: str, done: str) -> Iterator[Clock]:
    """Show a spinner during a stage on a terminal, and print one line at its end."""
    clock, start = Clock(), time.perf_counter()
    with log.status(Text(visible(f"{doing} ..."))) if log.is_terminal else contextlib.nullcontext():
        yield clock
    clock.seconds = time.perf_counter() - start
    log.print(f"{done}, {clock.seconds:.1f} s", style="dim")


def describe_command() -> dict[str, str]:
    """Return the command, the date and the version, which begin every record."""
    return {"command": shlex.join(["specjax", *sys.argv[1:]]), **describe_version()}


def peak_memory_bytes() -> int | None:
    """Return the peak memory of the first device or, without device statistics, of the process; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
