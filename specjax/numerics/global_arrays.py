"""Creation and gathering of global arrays, whose shards are on several hosts.

They are created from values that every host has. Every host must make the same calls in the same order.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.errors import UsageError
from specjax.types import Array, PyTree


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return the mesh with axes of JAX's type Auto, for which the compiler chooses the layout of each operation.

    The axes of `jax.make_mesh` are Explicit by default, so that every operation would need a stated layout.
    """
    return Mesh(mesh.devices, mesh.axis_names) if has_explicit_axes(mesh) else mesh


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Return True if the mesh has an axis of JAX's type Explicit."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def with_auto_shardings(tree: PyTree) -> PyTree:
    """Return a tree whose arrays have the same shards, on meshes with axes of JAX's type Auto.

    Raises: UsageError for traced arrays on a mesh with explicit axes, because the type is part of a traced program.
    """
    is_explicit = lambda x: isinstance(x, jax.Array) and has_explicit_axes(jax.typeof(x).sharding.mesh)
    if not any(map(is_explicit, jax.tree.leaves(tree))):
        return tree  # the identity of the objects stays

    def convert(x):
        if not is_explicit(x):
            return x
        if isinstance(x, jax.core.Tracer):
            raise UsageError(
                "inside of jit, arrays on a mesh with explicit axes are not supported; create the mesh with "
                "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n), or with specjax.mesh"
            )
        return jax.device_put(x, NamedSharding(with_auto_axes(x.sharding.mesh), x.sharding.spec))

    return jax.tree.map(convert, tree)


def check_active_mesh() -> None:
    """Check that no mesh with explicit axes is active, for programs on a mesh of their own. Raises: UsageError."""
    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        raise UsageError(
            "a mesh with explicit axes is active (jax.set_mesh), and a sharded target runs on a mesh of its own; call "
            "specjax outside of it, or create it with axis_types=(jax.sharding.AxisType.Auto,) * n"
        )


def place(tree: PyTree, mesh: Mesh, *spec: str | None) -> PyTree:
    """Shard arrays over a mesh. Every host has the complete arrays and transfers the shards of its own devices.

    Unlike `jax.device_put`, it does not compare the values between hosts; see `specjax.parallel.check_same`.
    """
    sharding = NamedSharding(with_auto_axes(mesh), PartitionSpec(*spec))
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


def is_remote(x) -> bool:
    """Return True if some shards of the array are only on other hosts."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def spans_hosts(tree: PyTree) -> bool:
    """Return True if an array of the tree has shards on other hosts, so that all hosts must run the same programs."""
    return any(isinstance(x, jax.Array) and _spans_hosts(x) for x in jax.tree.leaves(tree))


def _spans_hosts(x: jax.Array) -> bool:
    return not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable


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
