"""What a value is, the same in every process and for equal values only: what a compiled program is kept under.

Stricter than `specjax.persistence.fingerprint`, which compares what decides a text: here two values that could be compiled
to different programs must differ, so what is not understood is refused. Arrays among the leaves of arguments are data
and count as shapes; those that a function closes over are constants of the program and count by their values. Code
counts by where it stands; the files that it stands in by `of_files`, the releases of what they import by `of_releases`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.types import PyTree

KNOWN = ("specjax", "jax", "jaxlib", "flax", "numpy", "builtins", "functools", "typing", "collections", "ml_dtypes")
"""Packages whose code and objects are looked into; `of_files` and `of_releases` say which they are."""
RELEASES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")


PLAIN = bool | int | float | complex | str | bytes | slice | range | np.dtype
"""Whose `repr` says all."""


class Unknown(Exception):
    """A value of which it cannot be said what it is."""


def of(value: Any) -> str:
    """Hexadecimal. Raises: Unknown."""
    try:
        return digest(repr(_plain(value, (), {})))
    except (RecursionError, ValueError) as error:
        raise Unknown(str(error)) from error


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def of_arguments(tree: PyTree) -> str:
    """Of what a jitted function is called with: its structure and the shapes of its leaves. Raises: Unknown."""
    structure, shapes = outline(tree)
    return of((shapes, _structure(structure)))


def outline(tree: PyTree) -> tuple[Any, tuple]:
    """The same, for comparisons within a process: hashable, and made without a look into what is static."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, str(x.dtype), bool(x.weak_type)) for x in map(jax.typeof, leaves))


def _structure(tree: Any) -> Any:
    """Of a tree definition: its nodes with their static data."""
    data = tree.node_data()  # None of a leaf
    return data and (data, list(map(_structure, tree.children())))


def _plain(value: Any, above: tuple[int, ...], known: dict[int, tuple[Any, Any]]) -> Any:
    """Nested tuples and lists of plain values. known: of every object that was met (SmolLM2: 0.2 s, else 0.45)."""
    if id(value) not in known:
        known[id(value)] = value, _parts(value, above, known)
    return known[id(value)][1]


def _parts(value: Any, above: tuple[int, ...], known: dict[int, tuple[Any, Any]]) -> Any:
    if value is None or value is Ellipsis or isinstance(value, PLAIN):
        return repr(value)
    if id(value) in above:
        return "above", above[::-1].index(id(value))
    above = (*above, id(value))
    inner = lambda part: _plain(part, above, known)
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type):
        return "type", _known(value.__module__), value.__qualname__
    kind = type(value)
    name = kind.__module__, kind.__qualname__
    if isinstance(value, enum.Enum):
        return *name, value.name
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, dict | types.MappingProxyType):
        return *name, [(inner(key), inner(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return *name, [inner(item) for item in value]
    if isinstance(value, set | frozenset):
        return *name, sorted(repr(inner(item)) for item in value)
    if isinstance(value, functools.partial):
        return *name, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, types.MethodType):
        return *name, inner(value.__self__), inner(value.__func__)
    if isinstance(value, types.FunctionType):
        _known(value.__module__)
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        where = value.__module__, value.__qualname__, value.__code__.co_firstlineno
        return *where, cells, inner(value.__defaults__), inner(value.__kwdefaults__)
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return *name, getattr(value, "__module__", None), value.__name__
    _known(kind.__module__)
    wrapped = getattr(value, "__wrapped__", None)
    if callable(value) and wrapped is not None:  # jit, cache, custom derivatives
        return *name, inner(wrapped)
    if dataclasses.is_dataclass(value):
        return *name, [(field.name, inner(getattr(value, field.name))) for field in dataclasses.fields(value)]
    parts = dict(_attributes(value))
    if not parts and type(value).__repr__ is object.__repr__:
        raise Unknown(f"{name[0]}.{name[1]} says nothing of itself")
    return *name, [(key, inner(part)) for key, part in parts.items()] if parts else repr(value)


def _known(module: str | None) -> str:
    if module is None or module.split(".")[0] not in KNOWN:
        raise Unknown(f"{module} is none of the packages that are looked into")
    return module


def _array(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise Unknown("an array that is being traced")
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "keys", str(value.dtype), _array(jax.random.key_data(value))
    data = np.asarray(value)
    return "array", data.shape, str(data.dtype), hashlib.sha256(data.tobytes()).hexdigest()


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


@functools.cache
def of_files() -> str:
    """Of the package's own files: an editable checkout changes without its version."""
    found = hashlib.sha256()
    for name in ("specjax", "specjax.models", "specjax.pallas_kernels", "specjax.configs"):  # not always in one folder
        spec = importlib.util.find_spec(name)
        for top in (spec and spec.submodule_search_locations) or ():
            paths = [Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names]
            for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
                found.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes())
    return found.hexdigest()


@functools.cache
def of_releases() -> str:
    """Of what specjax stands on, and of the processor."""
    return digest(repr((*map(importlib.metadata.version, RELEASES), sys.version, platform.platform(), _processor())))


def of_settings() -> str:
    """Of JAX's settings, XLA's flags and the devices that are there."""
    config = {name: value for name, value in jax.config.values.items() if not any(x in name for x in ("cache", "log"))}
    device = jax.devices()[0]
    backend = device.client.platform_version, device.device_kind, jax.device_count()
    flags = os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")
    return digest(repr((sorted(map(repr, config.items())), backend, flags)))


def _processor() -> str:
    """What it can do; a home folder may be that of several machines."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
