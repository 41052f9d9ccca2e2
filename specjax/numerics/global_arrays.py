"""Creation and gathering of global arrays, whose shards are on several hosts.

They are created from values that every host has. Every host must make the same calls in the same order.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree


def place(tree: PyTree, mesh: Mesh, *spec: str | None) -> PyTree:
    """Shard arrays over a mesh. Every host has the complete arrays and transfers the shards of its own devices.

    Unlike `jax.device_put`, it does not compare the values between hosts; see `specjax.parallel.check_same`.
    """
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda x: place_one(x, sharding), tree)


def place_one(x, sharding) -> Array:
    """Put one array on devices with the given sharding. Typed keys are supported."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = place_one(jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable or is_remote(x):
        return jax.device_put(x, sharding)
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Return `jax.ShapeDtypeStruct`s with these shardings, to compile without the arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def spread_rows(mesh: Mesh, tokens, lengths, keys) -> tuple[tuple[Array, Array], Array]:
    """Shard a batch over the mesh axis "data", for `decode` and `stream`.

    If the axis does not divide the batch, copies of the first row are appended. A copy finishes together with its
    original and so costs no steps. Drop the text that is decoded for it.

    Args:
      tokens: int[B, P]. lengths: int[B]. keys: one key or [B], as in `decode`. All are complete on every host.

    Returns: ((tokens [B', P], lengths [B']), keys [B']), where B' is a multiple of the axis.
    """
    batch = len(lengths)
    keys = row_keys(keys, batch)  # before the copies: row b has fold_in(key, b)
    parts = mesh.shape.get("data", 1)
    row = np.arange(-(-batch // parts) * parts)
    row = np.where(row < batch, row, 0)
    tokens, lengths = np.asarray(tokens, np.int32)[row], np.asarray(lengths, np.int32)[row]
    return (place(tokens, mesh, "data"), place(lengths, mesh, "data")), place(keys[row], mesh, "data")


def is_remote(x) -> bool:
    """Return True if some shards of the array are only on other hosts."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def replicate(tree: PyTree) -> PyTree:
    """Replicate the arrays with shards on several hosts to every host. The copy is dispatched asynchronously."""
    leaves, structure = jax.tree.flatten(tree)
    remote = [i for i, leaf in enumerate(leaves) if is_remote(leaf)]
    if not remote:
        return tree
    shardings = tuple(NamedSharding(leaves[i].sharding.mesh, PartitionSpec()) for i in remote)
    for i, replica in zip(remote, _copy(shardings)(*(leaves[i] for i in remote)), strict=True):
        leaves[i] = replica
    return jax.tree.unflatten(structure, leaves)


def gather(tree: PyTree) -> PyTree:
    """Fetch results to every host as numpy arrays; typed keys stay JAX arrays.

    Every host must call this function. Example: `parallel.gather(specjax.decode(...)).to_lists()`. On one host the
    arrays are only fetched.
    """
    return jax.tree.map(_fetch, replicate(tree))


def _fetch(x):
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else jax.device_get(x)


@functools.cache
def _copy(shardings: tuple):
    return jax.jit(lambda *leaves: leaves, out_shardings=shardings)
