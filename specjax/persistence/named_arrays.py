"""Conversion of a tree of arrays to the form that Orbax stores: a dict of names to arrays with plain dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import PyTree


def flat(tree: PyTree) -> dict:
    """Flatten a tree to a dict of path -> array with plain dtypes. Orbax rejects custom nodes and empty arrays."""
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.size]
    plain = {jax.tree_util.keystr(path): jax.random.key_data(x) if _is_key(x) else x for path, x in leaves}
    return plain or {"empty": np.zeros((), np.int32)}


def abstract(like: PyTree) -> dict:
    """Return the shapes and shardings of `flat`, from arrays or from shapes."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(like) if x.size}
    shapes = {}
    for name, x in leaves.items():
        data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        shapes[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return shapes or {"empty": np.zeros((), np.int32)}


def unflat(values: Mapping, like: PyTree) -> PyTree:
    """Rebuild a tree like `like` from the dict of `flat`."""

    def restore_leaf(path, x):
        if not x.size:
            return jnp.zeros(x.shape, x.dtype)
        value = values[jax.tree_util.keystr(path)]
        return jax.random.wrap_key_data(value, impl=_impl(x)) if _is_key(x) else value

    return jax.tree_util.tree_map_with_path(restore_leaf, like)


def _is_key(x) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _impl(keys):
    """Return `jax.random.key_impl`, which does not accept shapes."""
    impls = []
    jax.eval_shape(lambda x: impls.append(jax.random.key_impl(x)), keys)
    return impls[0]
