"""Short digests of everything that determines a text: prompts, keys, settings and models.

Two runs with equal digests decode the same text. Hosts compare digests before they start, and a checkpoint stores the
digests of its run. Digests do not depend on the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather
from specjax.types import Model, PyTree

SAMPLE = 16
"""Number of values of each parameter that a digest reads at the start, in the middle and at the end."""


def digest(value: Any) -> str:
    """Return a hexadecimal digest of bytes, or of the `repr` of any other value."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:32]


def digest_model(target) -> str:
    """Return a digest of a target or a draft head: its configuration, and some values of every parameter."""
    config = target.model if hasattr(target, "model") else (target.head.kind, target.head.config)
    return digest((describe(config), digest_samples(target.params)))


def digest_weights(params: PyTree) -> str:
    """Return a digest of some values of every parameter. It is the same for float32 and bfloat16 weights."""
    as_bfloat16 = lambda value: value.astype(jnp.bfloat16) if jnp.issubdtype(value.dtype, jnp.floating) else value
    return digest([(path, digest(as_bfloat16(value).tobytes())) for path, _, value in _sampled(params)])


def digest_arrays(tree: PyTree) -> str:
    """Return a digest of all values of some arrays."""
    return digest(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)))


def check_run(folder: Any, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Check that a checkpoint in `folder` has the digests of this run. Raises: UsageError that names differences."""
    different = [name for name, value in ours.items() if theirs.get(name) != value]
    if different:
        raise UsageError(
            f"the checkpoint in {folder} is of another run, which differs in {' and '.join(different)}; repeat that "
            "run, or give another folder"
        )


def digest_samples(params: PyTree) -> list:
    """Return (path, dtype, digest) of some values of each leaf, from its first, middle and last row.

    Rows of stacked weights belong to different layers. Shards on any host are read.
    """
    return [(path, dtype, digest(value.tobytes())) for path, dtype, value in _sampled(params)]


def _sampled(params: PyTree) -> list[tuple[str, str, np.ndarray]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    values = gather(_some([leaf for _, leaf in leaves]))
    return [
        (jax.tree_util.keystr(path), str(leaf.dtype), np.asarray(value))
        for (path, leaf), value in zip(leaves, values, strict=True)
    ]


@jax.jit
def _some(leaves: list) -> list:
    def some(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.ndim or not leaf.size:
            return leaf
        *rows, width = leaf.shape
        middle = max(width - SAMPLE, 0) // 2
        first, last = leaf[(0,) * len(rows)], leaf[(-1,) * len(rows)]
        between = leaf[tuple(n // 2 for n in rows)]
        return jnp.concatenate([first[:SAMPLE], between[middle : middle + SAMPLE], last[-SAMPLE:]])

    return [some(leaf) for leaf in leaves if leaf is not None]


def describe(value: Any, ancestors: tuple = ()) -> Any:
    """Return settings as nested tuples of plain values, which are the same in every process.

    Functions are represented by their names and closures. The placement of arrays and models is not included.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, Mesh | Sharding):
        return "placed"
    if id(value) in ancestors:
        return "again"
    ancestors = (*ancestors, id(value))
    inner = functools.partial(describe, ancestors=ancestors)
    if isinstance(value, Model):
        # A model without a config, such as one that skips layers, is identified by the closure of a function.
        config = value.init_cache if value.config is None else value.config
        return "model", value.name, value.vocab_size, value.max_positions, inner(config)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        data = value.tobytes() if isinstance(value, np.ndarray | np.generic) else b""
        return "array", value.shape, str(value.dtype), digest(data)
    if isinstance(value, functools.partial):
        return "partial", inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, dict):
        return tuple(sorted(((str(key), inner(item)) for key, item in value.items()), key=str))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(inner, value))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(repr, map(inner, value))))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return (type(value).__qualname__, *map(inner, fields))
    function = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(function):
        cells = [_content(cell) for cell in function.__closure__ or ()]
        return function.__module__, function.__qualname__, inner(cells), inner(function.__defaults__)
    return type(value).__qualname__, re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _content(cell) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
