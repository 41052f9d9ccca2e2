"""A model that skips layers per token, as an ordinary `Model` and `Target`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.decoder import DecoderConfig
from specjax.models.skipping.policy import DepthPass, DepthPolicy, SkippingPending, TokenPositions
from specjax.models.variants.pruning import mlp_widths, narrow_mlps, prune_layers, separate_layers
from specjax.types import Array, Model, PyTree, Target


class SkippingCache(NamedTuple):
    """The cache of the base model, and the state of the depth policy."""

    base: PyTree
    prompt_length: Array  # int32[B], tokens of the prompt
    state: PyTree  # from `DepthPolicy.init_state`
    sparse_length: Array | None = None  # int32[B], tokens in the caches of sparse layers, if there are any


def skip_layers(target: Target, policy: DepthPolicy) -> Target:
    """Return `target` with a depth policy that chooses the layers of each token. The method is lossy.

    The result is an ordinary target for `decode`, `serve`, streams, drafters and verifiers, which are exact for *it*. A
    batch runs a sublayer if any of its rows needs it. Stacked layers are separated (copied) for a policy with sparse
    layers.

    Raises: UsageError for a model that is not from `specjax.models`, and for layers that it does not have.
    """
    num_layers = check_depth(target, policy)
    if policy.sparse_layers(num_layers):
        _check_sparse_layers(target, policy, num_layers)
        target = separate_layers(target)  # their caches have different sizes
    if policy.kept_layers is not None or policy.mlp_units is not None:
        reduced = target if policy.kept_layers is None else prune_layers(target, policy.kept_layers(num_layers))
        reduced = reduced if policy.mlp_units is None else _narrowed(reduced, policy)
        return Target(reduced.model._replace(name=_name(target.model, policy)), reduced.params)
    return Target(_model(target.model, policy.replace(params=())), {"base": target.params, "depth": policy.params})


def _check_sparse_layers(target: Target, policy: DepthPolicy, num_layers: int) -> None:
    """Raise a UsageError for sparse layers without slots, or with a window that counts slots as positions."""
    config = target.model.config
    if not isinstance(config, DecoderConfig) or target.model.capabilities.inputs:
        raise UsageError(f"{policy.name} needs a cache of keys and values alone, which {target.model.name} lacks")
    for layer in () if config.window is None else policy.sparse_layers(num_layers):
        if config.is_global is None or not config.is_global[layer]:
            raise UsageError(
                f"{policy.name} caches a part of the tokens in layer {layer} of {target.model.name}, whose attention "
                f"has a window of {config.window} positions; use a model with full attention"
            )


def check_depth(target: Target, policy: DepthPolicy) -> int:
    """Check that a depth policy fits the target, and return the number of layers.

    Raises: UsageError if it does not fit.
    """
    num_layers, width = count_skippable_layers(target, policy.name), target.model.config.width
    policy.check(num_layers)
    if policy.width not in (None, width):
        raise UsageError(
            f"the parameters of {policy.name} fit streams of width {policy.width}, but the model {target.model.name} "
            f"has width {width}; train them for this model"
        )
    return num_layers


def count_skippable_layers(target: Target, user: str = "adaptive depth") -> int:
    """Return the number of layers that a depth policy, the method `user`, can skip.

    Raises: UsageError for a model that is not from `specjax.models`, or has recurrent layers.
    """
    model = target.model
    if model.config is None or not model.capabilities.depth:
        raise UsageError(
            f"{model.name} has no layers that can be skipped, which {user} needs; use a model of specjax.models whose "
            "layers all attend"
        )
    return model.capabilities.num_layers


def skip_layers_over_cache(
    target: Target, policy: DepthPolicy, cache: PyTree, prompt_length: Array
) -> tuple[Target, PyTree]:
    """Return the skipping target, and its cache made from one that the full target wrote. It is used for drafting."""
    if policy.mlp_units is not None:
        return _narrowed(target, policy), cache
    model = _model(target.model, policy.replace(params=()))
    return Target(model, {"base": target.params, "depth": policy.params}), SkippingCache(cache, prompt_length, ())


def _narrowed(target: Target, policy: DepthPolicy) -> Target:
    assert policy.mlp_units is not None
    return narrow_mlps(target, policy.mlp_units(mlp_widths(target)))


def _name(base: Model, policy: DepthPolicy) -> str:
    return f"{base.name} by {policy.name}"


@functools.cache
def _model(base: Model, policy: DepthPolicy) -> Model:
    """Build the skipping model. `policy` has no parameters here; they are part of the model's."""
    num_layers = base.capabilities.num_layers
    sparse = policy.sparse_layers(num_layers)

    def init_cache(params, inputs, batch: int, capacity: int) -> SkippingCache:
        if inputs is not None and base.capabilities.sees_ahead:
            raise UsageError(
                f"{_name(base, policy)} cannot read images, because their vectors see later ones, for which no policy "
                "chooses layers; leave out the images or the depth policy"
            )
        cache = base.init_cache(params["base"], inputs, batch, capacity)
        if sparse:
            slots = _sparse_slots(policy, capacity)
            cache = _merge_layers(sparse, cache, base.init_cache(params["base"], inputs, batch, slots))
        # A caller that does not set the prompt length gets the whole model.
        prompt_length, sparse_length = jnp.full((batch,), jnp.iinfo(jnp.int32).max), jnp.zeros((batch,), jnp.int32)
        return SkippingCache(
            cache, prompt_length, policy.init_state(batch, num_layers), sparse_length if sparse else None
        )

    def forward(params, tokens, cache: SkippingCache, *, positions, mask, taps=(), earlier=None, layers=None):
        if earlier is not None and sparse:
            raise UsageError(
                f"{policy.name} cannot draft trees level by level; use it for a target, not for a draft model"
            )
        token_positions = TokenPositions(positions, cache.prompt_length, mask[:, :, -positions.shape[1] :])
        assert base.head is not None
        head = functools.partial(base.head, params["base"])
        depth = DepthPass(policy, params["depth"], token_positions, cache.state, head, cache.sparse_length)
        optional: dict[str, Any] = {} if earlier is None else {"earlier": earlier.base}
        optional |= {} if layers is None else {"layers": layers}
        return base.forward(
            params["base"], tokens, cache.base, positions=positions, mask=mask, taps=taps, depth=depth, **optional
        )

    def commit(cache: SkippingCache, pending: SkippingPending, path: Array, num_nodes: Array) -> SkippingCache:
        if sparse:
            base_cache, sparse_length = _commit_sparse(base, sparse, cache, pending, path, num_nodes)
        else:
            base_cache, sparse_length = base.commit(cache.base, pending.base, path, num_nodes), None
        state = cache.state
        if jax.tree.leaves(state):
            take_path = lambda x: take_along(x, jnp.maximum(path, 0).reshape(*path.shape, *[1] * (x.ndim - 2)), 1)
            token_positions = TokenPositions(take_path(pending.positions), cache.prompt_length)
            is_committed = jnp.arange(path.shape[1]) < num_nodes[:, None]
            state = policy.update_state(state, jax.tree.map(take_path, pending.records), token_positions, is_committed)
        return SkippingCache(base_cache, cache.prompt_length, state, sparse_length)

    def rewind(cache: SkippingCache, length: Array) -> SkippingCache:
        return cache._replace(base=base.rewind_cache(cache.base, length))

    def widen(pending: SkippingPending, slots: int) -> SkippingPending:
        return SkippingPending(base.widen(pending.base, slots), *batch_axes.widen(tuple(pending[1:]), slots))

    def insert(pending: SkippingPending, new: SkippingPending, place) -> SkippingPending:
        return SkippingPending(
            base.insert(pending.base, new.base, place), *batch_axes.insert(tuple(pending[1:]), tuple(new[1:]), place)
        )

    def axes(arrays: SkippingCache | SkippingPending) -> PyTree:
        return batch_axes.rows_first(arrays)._replace(base=base.axes(arrays.base))

    def shardings(arrays: SkippingCache | SkippingPending) -> PyTree:
        assert base.shardings is not None and base.mesh is not None
        rows = NamedSharding(base.mesh, PartitionSpec("data" if "data" in base.mesh.axis_names else None))
        return jax.tree.map(lambda x: rows, arrays)._replace(base=base.shardings(arrays.base))

    def mark_prompt(cache: SkippingCache, length: Array) -> SkippingCache:
        longest = policy.longest_prompt
        return cache._replace(prompt_length=length if longest is None else jnp.minimum(length, longest))

    read_images = base.images
    of_base = lambda function: function and (lambda params, *arguments: function(params["base"], *arguments))
    return base._replace(
        images=read_images and (lambda cache: read_images(cache.base)),
        init_cache=init_cache,
        encode=of_base(base.encode),
        forward=forward,
        commit=commit,
        mark_prompt=mark_prompt,
        # The update of the state by a token cannot be undone.
        rewind=None if base.rewind is None or jax.tree.leaves(policy.init_state(1, num_layers)) else rewind,
        widen=widen,
        insert=insert,
        axes=axes,
        shardings=None if base.shardings is None else shardings,
        embed=of_base(base.embed),
        unembed=of_base(base.unembed),
        head=of_base(base.head),
        best=None,  # a policy may predict from another layer than the last
        config=None,
        base_config=base.config or base.base_config,
        name=_name(base, policy),
        capabilities=base.capabilities._replace(groups=(), depth=False),
    )


def _sparse_slots(policy: DepthPolicy, capacity: int) -> int:
    """Return the slots of a sparse layer's cache for a text of `capacity` tokens.

    They are for the tokens that run the layer, and for the window of SLOTS entries that a commit writes.
    """
    if policy.longest_prompt is None:
        return capacity
    first = min(policy.longest_prompt, capacity)
    return min(capacity, first + -(-(capacity - first) // policy.sparse_period) + kv.SLOTS)


def _merge_layers(sparse: tuple[int, ...], dense: kv.KVCache, of_sparse: kv.KVCache) -> kv.KVCache:
    """Return `dense` with the keys and values of `of_sparse` in the sparse layers. Both have all layers."""
    merge = lambda dense, other: tuple((other if layer in sparse else dense)[layer] for layer in range(len(dense)))
    return dense._replace(k=merge(dense.k, of_sparse.k), v=merge(dense.v, of_sparse.v))


def _commit_sparse(
    base: Model, sparse: tuple[int, ...], cache: SkippingCache, pending: SkippingPending, path: Array, num_nodes: Array
) -> tuple[kv.KVCache, Array]:
    """Commit tokens, adding to the caches of the `sparse` layers only the tokens that ran them.

    Returns: the cache, and the length int32[B] of the sparse layers.
    """
    index = jnp.arange(path.shape[1])
    ran = take_along(pending.ran.attention[:, :, sparse[0]], jnp.maximum(path, 0), 1) & (index < num_nodes[:, None])
    compacted = take_along(path, jnp.argsort(~ran, axis=1, stable=True), 1)
    count = jnp.sum(ran, 1, dtype=jnp.int32)
    dense_layers = tuple(layer for layer in range(len(cache.base.k)) if layer not in sparse)
    select = lambda arrays, layers: arrays._replace(
        k=tuple(arrays.k[layer] for layer in layers), v=tuple(arrays.v[layer] for layer in layers)
    )
    dense = base.commit(select(cache.base, dense_layers), select(pending.base, dense_layers), path, num_nodes)
    sparse_cache = select(cache.base, sparse)._replace(length=cache.sparse_length)
    for start in range(0, path.shape[1], kv.SLOTS):  # a commit of more entries could write beyond a small cache
        part = compacted[:, start : start + kv.SLOTS]
        num_new = jnp.clip(count - start, 0, part.shape[1])
        sparse_cache = base.commit(sparse_cache, select(pending.base, sparse), part, num_new)
    places = {layer: place for layers in (dense_layers, sparse) for place, layer in enumerate(layers)}
    of_layer = lambda layer: sparse_cache if layer in sparse else dense
    k, v = (tuple(getattr(of_layer(layer), name)[places[layer]] for layer in range(len(places))) for name in ("k", "v"))
    return dense._replace(k=k, v=v), sparse_cache.length
