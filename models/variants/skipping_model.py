"""A model whose tokens run a part of its layers each: `Model` and `Target` as any other."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.variants.layer_skipping import Depth, Places, Thinned, Through
from specjax.models.variants.pruning import narrowed, pruned
from specjax.types import Array, Model, PyTree, Target


class Memory(NamedTuple):
    """The cache of the model, and what its depth knows of a text."""

    base: PyTree
    prompt: Array  # int32[B], tokens of the prompt
    own: PyTree
    few: Array | None = None  # int32[B], tokens in the caches of sparse layers, if there are any


def thinned(target: Target, depth: Depth) -> Target:
    """`target` with the part of its layers that `depth` chooses, token by token. Its text is another: lossy.

    It is a target as any other: for `decode`, `serve`, streams, drafters and rules, which are exact for *it*. A batch
    runs a sublayer if any of its rows needs it.

    Raises: UsageError for a model that is not of `specjax.models`, and for layers that it does not have.
    """
    num_layers = check_depth(target, depth)
    if depth.sparse(num_layers) and getattr(target.model.config, "stacked", False):
        raise UsageError(f"{depth.name} has layers with caches of their own; load the model with stacked=False")
    if depth.keeps is not None or depth.narrow is not None:
        rest = target if depth.keeps is None else pruned(target, depth.keeps(num_layers))
        rest = rest if depth.narrow is None else _narrowed(rest, depth)
        return Target(rest.model._replace(name=_name(target.model, depth)), rest.params)
    return Target(_model(target.model, depth.replace(params=())), {"base": target.params, "depth": depth.params})


def check_depth(target: Target, depth: Depth) -> int:
    """How many layers it chooses from. Raises: UsageError for a target that it does not fit, as `thinned`."""
    num_layers, width = choosable_layers(target), target.model.config.width
    depth.check(num_layers)
    if depth.width not in (None, width):
        raise UsageError(
            f"what {depth.name} was given reads streams of width {depth.width}, and the model {target.model.name} has "
            f"{width}; train it for this model"
        )
    return num_layers


def choosable_layers(target: Target) -> int:
    """How many layers a depth chooses from. Raises: UsageError for a model that is not of `specjax.models`."""
    model = target.model
    if model.config is None or not model.capabilities.layer_skipping:
        raise UsageError(f"{model.name} has no layers to choose from; give a model of specjax.models")
    return model.capabilities.num_layers


def over(target: Target, depth: Depth, cache: PyTree, prompt: Array) -> tuple[Target, PyTree]:
    """The thinned target over a cache that the whole one wrote: what drafts for it."""
    if depth.narrow is not None:
        return _narrowed(target, depth), cache
    model = _model(target.model, depth.replace(params=()))
    return Target(model, {"base": target.params, "depth": depth.params}), Memory(cache, prompt, ())


def _narrowed(target: Target, depth: Depth) -> Target:
    assert depth.narrow is not None
    return narrowed(target, depth.narrow(target.model.config.mlp_width))


def _name(base: Model, depth: Depth) -> str:
    return f"{base.name} by {depth.name}"


@functools.cache
def _model(base: Model, depth: Depth) -> Model:
    """`depth` has no parameters here: they come with the model's."""
    num_layers = base.capabilities.num_layers
    sparse = depth.sparse(num_layers)

    def begin(params, inputs, batch: int, capacity: int) -> Memory:
        cache = base.begin(params["base"], inputs, batch, capacity)
        # Who does not say where the prompt ends gets the whole model.
        prompt, few = jnp.full((batch,), jnp.iinfo(jnp.int32).max), jnp.zeros((batch,), jnp.int32)
        return Memory(cache, prompt, depth.start(batch, num_layers), few if sparse else None)

    def forward(params, tokens, memory: Memory, *, positions, mask, taps=(), earlier=None, layers=None):
        if earlier is not None and sparse:
            raise UsageError(f"{depth.name} cannot grow drafts; use it for a target, not for a draft model")
        places = Places(positions, memory.prompt, mask[:, :, -positions.shape[1] :])
        assert base.head is not None
        head = functools.partial(base.head, params["base"])
        through = Through(depth, params["depth"], places, memory.own, head, memory.few)
        return base.forward(
            params["base"], tokens, memory.base, positions=positions, mask=mask, taps=taps,
            earlier=None if earlier is None else earlier.base, layers=layers, run=through,
        )  # fmt: skip

    def commit(memory: Memory, pending: Thinned, path: Array, num_nodes: Array) -> Memory:
        if sparse:
            cache, few = _commit_apart(base, sparse, memory, pending, path, num_nodes)
        else:
            cache, few = base.commit(memory.base, pending.base, path, num_nodes), None
        own = memory.own
        if jax.tree.leaves(own):
            at = lambda x: take_along(x, jnp.maximum(path, 0).reshape(*path.shape, *[1] * (x.ndim - 2)), 1)
            places = Places(at(pending.base.positions), memory.prompt)
            taken = jnp.arange(path.shape[1]) < num_nodes[:, None]
            own = depth.learn(own, jax.tree.map(at, pending.noted), places, taken)
        return Memory(cache, memory.prompt, own, few)

    def rewind(memory: Memory, length: Array) -> Memory:
        return memory._replace(base=base.rewound(memory.base, length))

    def widen(pending: Thinned, slots: int) -> Thinned:
        return Thinned(base.widen(pending.base, slots), *batch_axes.widen(tuple(pending[1:]), slots))

    def insert(pending: Thinned, new: Thinned, place) -> Thinned:
        return Thinned(
            base.insert(pending.base, new.base, place), *batch_axes.insert(tuple(pending[1:]), tuple(new[1:]), place)
        )

    def axes(held: Memory | Thinned) -> PyTree:
        return batch_axes.rows_first(held)._replace(base=base.axes(held.base))

    def shardings(held: Memory | Thinned) -> PyTree:
        assert base.shardings is not None and base.mesh is not None
        rows = NamedSharding(base.mesh, PartitionSpec("data" if "data" in base.mesh.axis_names else None))
        return jax.tree.map(lambda x: rows, held)._replace(base=base.shardings(held.base))

    of_base = lambda function: function and (lambda params, *arguments: function(params["base"], *arguments))
    return base._replace(
        begin=begin,
        forward=forward,
        commit=commit,
        prompted=lambda memory, length: memory._replace(prompt=length),
        # What was learnt of tokens cannot be taken back.
        rewind=None if base.rewind is None or jax.tree.leaves(depth.start(1, num_layers)) else rewind,
        widen=widen,
        insert=insert,
        axes=axes,
        shardings=None if base.shardings is None else shardings,
        embed=of_base(base.embed),
        unembed=of_base(base.unembed),
        head=of_base(base.head),
        config=None,
        name=_name(base, depth),
        capabilities=base.capabilities._replace(groups=()),
    )


def _commit_apart(
    base: Model, sparse: tuple[int, ...], memory: Memory, pending: Thinned, path: Array, num_nodes: Array
) -> tuple[kv.KVCache, Array]:
    """`commit` where the caches of the layers `sparse` take only the tokens that ran them; and how many these have."""
    place = jnp.arange(path.shape[1])
    ran = take_along(pending.ran.attention[:, :, sparse[0]], jnp.maximum(path, 0), 1) & (place < num_nodes[:, None])
    in_front = take_along(path, jnp.argsort(~ran, axis=1, stable=True), 1)
    count = jnp.sum(ran, 1, dtype=jnp.int32)

    def only(held, are_sparse: bool):
        pick = lambda parts: tuple(part for layer, part in enumerate(parts) if (layer in sparse) == are_sparse)
        return held._replace(k=pick(held.k), v=pick(held.v))

    dense = base.commit(only(memory.base, False), only(pending.base, False), path, num_nodes)
    few = base.commit(only(memory.base, True)._replace(length=memory.few), only(pending.base, True), in_front, count)

    def joined(dense, few):
        dense, few = iter(dense), iter(few)
        return tuple(next(few if layer in sparse else dense) for layer in range(len(memory.base.k)))

    return dense._replace(k=joined(dense.k, few.k), v=joined(dense.v, few.v)), few.length
