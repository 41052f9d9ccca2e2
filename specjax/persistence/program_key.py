"""Keys of compiled programs: digests that are equal in every process, and only for equal values.

They are stricter than `specjax.persistence.fingerprint`, which compares only the inputs of a text. Here, two values
that could compile to different programs must have different keys, so unknown kinds of values are rejected. Array leaves
of arguments are represented by their shapes. Arrays in the closure of a function are constants of the program and are
represented by their values. Code is represented by its location. `digest_package` covers the files of specjax, and
`digest_releases` the versions of the packages that they import.
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

from specjax.arrays.modes import matmul_precision
from specjax.types import PyTree

KNOWN = ("specjax", "jax", "jaxlib", "flax", "numpy", "builtins", "functools", "typing", "collections", "ml_dtypes")
"""Packages whose objects are inspected. `digest_package` and `digest_releases` cover their versions."""
RELEASES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")

PLAIN = bool | int | float | complex | str | bytes | slice | range | np.dtype
"""Types whose `repr` describes a value completely."""


class UnknownValueError(Exception):
    """Error for a value without a computable key."""


def digest_value(value: Any) -> str:
    """Return a hexadecimal key of a value. Raises: UnknownValueError."""
    try:
        return digest(repr(_plain(value, (), {})))
    except (RecursionError, ValueError) as error:
        raise UnknownValueError(str(error)) from error


def digest(text: str) -> str:
    """Return a hexadecimal digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_arguments(tree: PyTree) -> str:
    """Return a key of the arguments of a jitted function: their structure and the shapes of their leaves.

    Raises: UnknownValueError.
    """
    structure, shapes = outline(tree)
    return digest_value((shapes, _structure(structure)))


def outline(tree: PyTree) -> tuple[Any, tuple]:
    """Return a hashable form of arguments for comparisons within a process. It does not inspect static values."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, str(x.dtype), bool(x.weak_type)) for x in map(jax.typeof, leaves))


def _structure(tree: Any) -> Any:
    """Return the nodes of a tree definition with their static data."""
    data = tree.node_data()  # None for a leaf
    return data and (data, list(map(_structure, tree.children())))


def _plain(value: Any, ancestors: tuple[int, ...], memo: dict[int, tuple[Any, Any]]) -> Any:
    """Return nested tuples and lists of plain values.

    Args:
      memo: results by object identity (SmolLM2 takes 0.2 s with it, 0.45 s without).
    """
    if id(value) not in memo:
        memo[id(value)] = value, _parts(value, ancestors, memo)
    return memo[id(value)][1]


def _parts(value: Any, ancestors: tuple[int, ...], memo: dict[int, tuple[Any, Any]]) -> Any:
    if value is None or value is Ellipsis or isinstance(value, PLAIN):
        return repr(value)
    if id(value) in ancestors:
        return "above", ancestors[::-1].index(id(value))
    ancestors = (*ancestors, id(value))
    inner = lambda part: _plain(part, ancestors, memo)
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type):
        return "type", _check_module(value.__module__), value.__qualname__
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
        _check_module(value.__module__)
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        where = value.__module__, value.__qualname__, value.__code__.co_firstlineno
        return *where, cells, inner(value.__defaults__), inner(value.__kwdefaults__)
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return *name, getattr(value, "__module__", None), value.__name__
    _check_module(kind.__module__)
    wrapped = getattr(value, "__wrapped__", None)
    if callable(value) and wrapped is not None:  # jit, cache, custom derivatives
        return *name, inner(wrapped)
    if dataclasses.is_dataclass(value):
        return *name, [(field.name, inner(getattr(value, field.name))) for field in dataclasses.fields(value)]
    parts = dict(_attributes(value))
    if not parts and type(value).__repr__ is object.__repr__:
        raise UnknownValueError(f"{name[0]}.{name[1]} has no attributes and no repr")
    return *name, [(key, inner(part)) for key, part in parts.items()] if parts else repr(value)


def _check_module(module: str | None) -> str:
    """Return the module if its package is inspected. Raises: UnknownValueError."""
    if module is None or module.split(".")[0] not in KNOWN:
        raise UnknownValueError(f"{module} is not a package that is inspected")
    return module


def _array(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise UnknownValueError("an array that is being traced")
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
def digest_package() -> str:
    """Return a digest of the files of specjax, because an editable checkout changes without a new version."""
    content = hashlib.sha256()
    for name in ("specjax", "specjax.models", "specjax.pallas_kernels", "specjax.configs"):  # not always in one folder
        spec = importlib.util.find_spec(name)
        for top in (spec and spec.submodule_search_locations) or ():
            paths = [Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names]
            for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
                content.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes())
    return content.hexdigest()


@functools.cache
def digest_releases() -> str:
    """Return a digest of the versions of JAX and its libraries, of Python, and of the processor."""
    return digest(repr((*map(importlib.metadata.version, RELEASES), sys.version, platform.platform(), _processor())))


def digest_settings() -> str:
    """Return a digest of the settings of JAX, the flags of XLA, and the devices."""
    config = {name: value for name, value in jax.config.values.items() if not any(x in name for x in ("cache", "log"))}
    config["jax_default_matmul_precision"] = matmul_precision()  # also that of a context manager
    device = jax.devices()[0]
    backend = device.client.platform_version, device.device_kind, jax.device_count()
    flags = os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")
    return digest(repr((sorted(map(repr, config.items())), backend, flags)))


def _processor() -> str:
    """Return the features of the processor, because several machines may share a home folder."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
