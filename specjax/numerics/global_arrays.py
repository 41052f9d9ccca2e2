"""Arrays whose parts lie on several hosts: made from what every host knows, and read back whole.

Every host must make the same calls in the same order.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree


def place(tree: PyTree, mesh: Mesh, *spec: str | None) -> PyTree:
    """Spread arrays over a mesh; every host has them whole, and hands its own devices their parts.

    Unlike `jax.device_put` it does not compare the hosts' values: see `specjax.parallel.check_same`.
    """
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda x: place_one(x, sharding), tree)


def place_one(x, sharding) -> Array:
    """One array, with the sharding; typed keys too."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = place_one(jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable or is_far(x):
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """`jax.ShapeDtypeStruct`s of arrays or shapes, with these shardings: to compile without the arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def spread_rows(mesh: Mesh, tokens, lengths, keys) -> tuple[tuple[Array, Array], Array]:
    """A batch over the axis "data", for `decode` and `stream`.

    A batch that the axis does not divide gets copies of its first row at the end. A copy ends when the row does, so it
    costs no steps; drop what is decoded for it.

    Args: tokens int[B, P], lengths int[B] and keys, one or [B] as in `decode`, whole on every host.
    Returns: ((tokens [B', P], lengths [B']), keys [B']), B' a multiple of the axis.
    """
    batch = len(lengths)
    keys = row_keys(keys, batch)  # before the copies: row b has fold_in(key, b)
    parts = mesh.shape.get("data", 1)
    row = np.arange(-(-batch // parts) * parts)
    row = np.where(row < batch, row, 0)
    tokens, lengths = np.asarray(tokens, np.int32)[row], np.asarray(lengths, np.int32)[row]
    return (place(tokens, mesh, "data"), place(lengths, mesh, "data")), place(keys[row], mesh, "data")


def is_far(x) -> bool:
    """Whether parts of an array are on other hosts only."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def replicate(tree: PyTree) -> PyTree:
    """The same with whole copies of what lies on several hosts, on each; dispatched, not waited for."""
    leaves, structure = jax.tree.flatten(tree)
    far = [i for i, leaf in enumerate(leaves) if is_far(leaf)]
    if not far:
        return tree
    shardings = tuple(NamedSharding(leaves[i].sharding.mesh, PartitionSpec()) for i in far)
    for i, whole in zip(far, _copy(shardings)(*(leaves[i] for i in far)), strict=True):
        leaves[i] = whole
    return jax.tree.unflatten(structure, leaves)


def gather(tree: PyTree) -> PyTree:
    """Results, whole on every host, as numpy (typed keys as arrays): `parallel.gather(specjax.decode(...)).to_lists()`.

    Every host must call it. Without other hosts it only fetches.
    """
    return jax.tree.map(_fetch, replicate(tree))


def _fetch(x):
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else jax.device_get(x)


@functools.cache
def _copy(shardings: tuple):
    return jax.jit(lambda *leaves: leaves, out_shardings=shardings)
