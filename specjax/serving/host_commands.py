"""The commands of one turn of a scheduler on several hosts, as bytes.

Host 0 has the requests. In each turn it sends what it admits and cancels, and whether it reads a chunk of a prompt. So
all hosts run the same programs. The bytes are JSON, in which an array is its dtype, shape and content.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.serving.requests import Cancel, Limits, Request, processor_settings
from specjax.types import PyTree

ARRAYS = ("key", "processors", "inputs")
"""Fields of a request that are not plain values."""


class Commands(NamedTuple):
    """The commands of one turn."""

    items: list[Request | Cancel]  # in their order
    reads: bool = False  # True if the turn may read a chunk of a prompt although rows decode
    is_last: bool = False  # True if the scheduler ends, and there is no turn


def encode(commands: Commands) -> bytes:
    """Return the commands as bytes.

    Raises: UsageError for a constraint, or an error of Python for a field that no request has.
    """
    items = [list(item) if isinstance(item, Cancel) else _encode_request(item) for item in commands.items]
    return json.dumps([items, *commands[1:]], separators=(",", ":"), default=_plain).encode()


def decode(message: bytes, limits: Limits) -> Commands:
    """Return the commands of bytes, on a host with the same limits."""
    items, *flags = json.loads(message)
    return Commands([Cancel(*x) if isinstance(x, list) else _decode_request(x, limits) for x in items], *flags)


def _encode_request(request: Request) -> dict[str, Any]:
    if request.constraint is not None:
        raise UsageError("it has a constraint, which a server on several hosts cannot send to them; leave it out")
    fields = {name: value for name, value in request._asdict().items() if name not in ARRAYS}
    fields["prompt"] = _plain(request.prompt)
    processors = None if request.processors is None else [processor.settings for processor in request.processors]
    arrays = {"key": jax.random.key_data(threefry(request.key)), "processors": processors, "inputs": request.inputs}
    return fields | {name: [_pack(x) for x in jax.tree.leaves(tree)] for name, tree in arrays.items()}


def _decode_request(fields: dict[str, Any], limits: Limits) -> Request:
    arrays = {name: [_unpack(x) for x in fields.pop(name)] for name in ARRAYS}
    key = jax.random.wrap_key_data(jnp.asarray(arrays["key"][0]), impl="threefry2x32")
    settings = _like(processor_settings(limits), arrays["processors"])
    processors = None
    if settings is not None:
        pairs = zip(limits.settings.processors, settings, strict=True)
        processors = [processor.replace(settings=values) for processor, values in pairs]
    return Request(**fields, key=key, processors=processors, inputs=_like(limits.inputs, arrays["inputs"]))


def _like(tree: PyTree, leaves: list[np.ndarray]) -> PyTree:
    """Return the leaves in the structure of a tree, or None if there are none."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves) if leaves else None


def _plain(value: Any) -> Any:
    """Return a sequence or a number of NumPy or JAX as lists and numbers."""
    return np.asarray(value).tolist()


def _pack(x: Any) -> list[Any]:
    array = np.asarray(x)
    return [array.dtype.name, array.shape, base64.b64encode(array.tobytes()).decode()]


def _unpack(packed: list[Any]) -> np.ndarray:
    dtype, shape, content = packed
    return np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape)
