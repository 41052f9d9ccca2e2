"""Arguments of a workload's programs as shapes with shardings. No array is allocated."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import parallel
from specjax.arrays import batch_axes
from specjax.arrays.batch_axes import SHARED
from specjax.controllers import fixed
from specjax.engine import step
from specjax.engine.job import Job, Parts
from specjax.engine.prepare import Settings
from specjax.engine.step import LOOP, buffer_size
from specjax.models import abstract_params, make_model
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import abstract_head
from specjax.models.storage import bits_of
from specjax.models.variants.cache_parts import growing_part
from specjax.numerics.global_arrays import with_shardings
from specjax.numerics.sampling import row_keys
from specjax.parallel import layer_parallel
from specjax.planning.drafting import drafter_of
from specjax.planning.inputs.image_inputs import image_shapes
from specjax.planning.workload import Workload
from specjax.types import Drafter, PyTree, Target


class Abstract(NamedTuple):
    """The arguments of `specjax.decode` as shapes with shardings."""

    job: Job
    mesh: Mesh
    draft: Target | None  # the draft model of the workload
    head: DraftHead | None  # the draft head of the workload


def abstract_job(work: Workload, devices: list, drafter: Drafter | None = None) -> Abstract:
    """Return the arguments of the program of `decode`, for a given drafter or that of the workload's method.

    Rows of the batch are sharded over "data", parameters and caches as in `specjax.models.layout`. Everything else is
    replicated.
    """
    mesh = work.mesh(devices)
    target = spread(work.target, mesh)
    draft = None if work.draft is None else spread(work.draft, mesh, work.is_layer_parallel)
    head = None if work.head is None else _head(work, mesh)
    drafter = drafter or drafter_of(work, target, head or draft)
    settings = Settings(temperature=work.warping.temperature)
    replicate = lambda shape: place_rows(shape, SHARED, work, mesh)
    by_rows = lambda tree: place_rows(tree, batch_axes.rows_first(tree), work, mesh)
    parts = Parts(
        loop=LOOP,
        target=target,
        drafter=drafter,
        verifier=settings.select_verifier(drafter),
        controller=fixed(),
        sampling=work.warping.sampling(replicate),
        eos=replicate(jax.ShapeDtypeStruct((1,), jnp.int32)),
        processors=work.warping.processors(replicate),
    )
    size = buffer_size(work.context, work.max_new_tokens, drafter.num_nodes, target.model.max_positions)
    tokens, rows = (by_rows(jax.ShapeDtypeStruct((work.batch, *more), jnp.int32)) for more in ((size,), ()))
    keys = by_rows(jax.eval_shape(lambda: row_keys(0, work.batch)))
    inputs = image_shapes(target, work.batch, work.image_tiles, work.image_patches)
    return Abstract(
        Job(parts, tokens, rows, keys, rows, None if inputs is None else by_rows(inputs)), mesh, draft, head
    )


def _head(work: Workload, mesh: Mesh) -> DraftHead:
    """Return the shapes of the workload's head, sharded like its target."""
    head = abstract_head(work.method, work.head)
    return head.replace(params=with_shardings(head.params, parallel.head_shardings(head, mesh)))


def spread(config: Any, mesh: Mesh, by_layer: bool = False) -> Target:
    """Return the shapes of a model, sharded over the largest part of the mesh that divides it.

    On one device it is the plain model.
    """
    if mesh.size == 1:
        params = abstract_params(config)
        return Target(
            make_model(config),
            with_shardings(params, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)),
        )
    if by_layer:
        return layer_parallel.abstract_draft(config, mesh)
    return parallel.abstract_target(config, mesh, parallel.largest_over(config, mesh))


@functools.cache
def unsharded(config: Any) -> Target:
    """Return the shapes of a model without shardings."""
    return Target(make_model(config), abstract_params(config))


def place_rows(tree: PyTree, axes: PyTree, work: Workload, mesh: Mesh) -> PyTree:
    """Return shapes whose rows, on these axes, are sharded over "data"."""

    def one(axis: int, leaf) -> NamedSharding:
        if axis == SHARED or work.data == 1 or work.batch % work.data:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return with_shardings(tree, jax.tree.map(one, axes, tree))


def place_state(work: Workload, args: Abstract, state: PyTree) -> PyTree:
    """Shard the state between two steps: caches in the layout of their models, everything else by rows."""
    placed = place_rows(state, step.axes(args.job.parts, state), work, args.mesh)
    if args.mesh.size == 1:
        return placed
    placed = placed._replace(cache=_place_cache(args.job.parts.target, state.cache))
    if args.head is not None and hasattr(state.draft, "memory") and args.head.head.shardings is not None:
        memory = with_shardings(state.draft.memory, args.head.head.shardings(state.draft.memory, args.mesh))
        placed = placed._replace(draft=placed.draft._replace(memory=memory))
    if args.draft is None:
        return placed
    is_cache = functools.partial(is_cache_of, args.draft)
    place = lambda part: _place_cache(args.draft, part) if is_cache(part) else part
    return placed._replace(draft=jax.tree.map(place, placed.draft, is_leaf=is_cache))


def _place_cache(target: Target, cache: PyTree) -> PyTree:
    assert target.model.shardings is not None, "a model of specjax.models, on a mesh"
    return with_shardings(cache, target.model.shardings(cache))


def is_cache_of(target: Target, part: PyTree) -> bool:
    """Return True if a part of a drafter's state has the structure of this model's cache."""
    wanted: Any = jax.tree.structure(growing_part(cache_shapes(target, 1, 1)))
    return jax.tree.structure(growing_part(part)) == wanted


def is_pending_of(target: Target, part: PyTree) -> bool:
    """Return True if a part of a state has the structure of this model's pending arrays."""
    one = jnp.zeros((1, 1), jnp.int32)

    def pending(params: PyTree) -> PyTree:
        cache = target.model.init_cache(params, None, 1, 1)
        return target.model.forward(params, one, cache, positions=one, mask=jnp.ones((1, 1, 1), bool))[1]

    wanted: Any = jax.tree.structure(jax.eval_shape(pending, target.params))
    return jax.tree.structure(part) == wanted


def cache_shapes(target: Target, batch: int, capacity: int) -> PyTree:
    """Return the shapes of a cache of the model."""
    return jax.eval_shape(lambda params: target.model.init_cache(params, None, batch, capacity), target.params)


def shard_bytes(tree: PyTree) -> int:
    """Return the bytes that one device stores of a tree of shapes with shardings."""
    return sum(math.prod(local_shape(leaf)) * _item_bits(leaf.dtype) for leaf in jax.tree.leaves(tree)) // 8


def local_shape(leaf) -> tuple[int, ...]:
    """Return the shape of the shard on one device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _item_bits(dtype) -> int:
    return 64 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else bits_of(dtype)
