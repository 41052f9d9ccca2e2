"""The arguments of a workload's programs as shapes with shardings. Nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import parallel
from specjax.engine.run import PROMPT_BUCKET
from specjax.engine.step import Inputs, buffer_size
from specjax.models import abstract_params, make_model
from specjax.models import cache as kv
from specjax.models.layout import spread
from specjax.parallel import layer_parallel
from specjax.parallel.arrays import with_shardings
from specjax.planning.drafting import drafter_of
from specjax.planning.workload import Workload
from specjax.types import Drafter, PyTree, Sampling, Target
from specjax.verifiers import exact_verifier


class Abstract(NamedTuple):
    """The arguments of `specjax.decode`'s program, as shapes with shardings."""

    inputs: Inputs
    tokens: PyTree
    lengths: PyTree
    keys: PyTree
    mesh: Mesh
    draft: Target | None  # the draft model of the workload


def abstract_inputs(work: Workload, devices: list, drafter: Drafter | None = None) -> Abstract:
    """Everything that `decode` would pass to its program, for a drafter of one's own or that of its method.

    Rows of the batch lie over "data", parameters and caches as `specjax.models.layout` says, all else everywhere.
    """
    mesh = work.mesh(devices)
    target = _spread(work.target, mesh)
    draft = None if work.draft is None else _spread(work.draft, mesh, work.is_layer_parallel)
    drafter = drafter or drafter_of(work, target, draft)
    size = buffer_size(-(-work.context // PROMPT_BUCKET) * PROMPT_BUCKET, work.max_new_tokens, drafter)
    is_greedy = work.temperature == 0
    scalar = _place(jax.ShapeDtypeStruct((), jnp.float32), lambda leaf: PartitionSpec(), mesh)
    eos = _place(jax.ShapeDtypeStruct((1,), jnp.int32), lambda leaf: PartitionSpec(), mesh)
    sampling = Sampling() if is_greedy else Sampling(scalar)
    inputs = Inputs(target, drafter, exact_verifier(drafter, is_greedy), False, sampling, eos)
    rows = jax.ShapeDtypeStruct((work.batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((work.batch, size), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), work.batch))
    tokens, rows, keys = _place((tokens, rows, keys), _by_rows(work), mesh)
    return Abstract(inputs, tokens, rows, keys, mesh, draft)


def _spread(config: Any, mesh: Mesh, by_layer: bool = False) -> Target:
    """Shapes of a model, over as much of the mesh as divides it; on one device the plain model, as `load` gives it."""
    if mesh.size == 1:
        return Target(make_model(config), _place(abstract_params(config), lambda leaf: PartitionSpec(), mesh))
    if by_layer:
        return layer_parallel.abstract_draft(config, mesh)
    return parallel.abstract_target(config, mesh, parallel.over_that_fits(config, mesh))


def _by_rows(work: Workload) -> Callable[[Any], PartitionSpec]:
    """Over "data" what has one entry per row of the batch."""

    def spec(leaf) -> PartitionSpec:
        is_rows = leaf.ndim and leaf.shape[0] == work.batch and work.batch % work.data == 0
        return PartitionSpec("data") if is_rows and work.data > 1 else PartitionSpec()

    return spec


def _place(tree: PyTree, spec: Callable[[Any], PartitionSpec], mesh: Mesh) -> PyTree:
    return with_shardings(tree, jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree))


def place_state(work: Workload, state: PyTree, mesh: Mesh) -> PyTree:
    """The state between two steps: caches as their models have them."""
    is_cache = lambda x: isinstance(x, kv.KVCache | kv.Pending)

    def place(tree, config, by_layer=False):
        def one(part):
            if not is_cache(part) or mesh.size == 1 or config is None:
                return _place(part, _by_rows(work), mesh)
            if by_layer:
                shardings = layer_parallel.cache_shardings(config, mesh, part)
            else:
                shardings = spread(config, mesh, parallel.over_that_fits(config, mesh))[1].cache(part)
            return with_shardings(part, shardings)

        return jax.tree.map(one, tree, is_leaf=is_cache)

    placed = place(state, work.target)
    return placed._replace(draft=place(state.draft, work.draft, work.is_layer_parallel))


def shard_bytes(tree: PyTree) -> int:
    """Bytes that one device holds of shapes with shardings."""
    return sum(math.prod(local_shape(leaf)) * _item_bytes(leaf.dtype) for leaf in jax.tree.leaves(tree))


def local_shape(leaf) -> tuple[int, ...]:
    """Of the part that one device holds."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _item_bytes(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize
