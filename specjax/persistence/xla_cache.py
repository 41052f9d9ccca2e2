"""A switch for XLA's compilation cache that any number of threads may use at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

SETTING = "jax_enable_compilation_cache"

_lock = threading.Lock()
_users = 0  # blocks that are inside `without_xla_cache`
_was_enabled = True


@contextlib.contextmanager
def without_xla_cache() -> Iterator[None]:
    """Switch XLA's compilation cache off for the whole process until the last concurrent block has ended.

    On CPU, a program from that cache can be serialized, but the result cannot be loaded. A program that is stored in a
    `ProgramCache` also need not be stored twice.
    """
    global _users, _was_enabled
    with _lock:
        if not _users:
            _was_enabled = jax.config.values[SETTING]
            _set(False)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _set(_was_enabled)


def _set(enabled: bool) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update(SETTING, enabled)
    compilation_cache.reset_cache()  # it reads the setting only once
