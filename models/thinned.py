"""A model whose tokens run a part of its layers each: `Model` and `Target` as any other."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax import buffers
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.models.depth import Depth, Places, Thinned, Through
from specjax.models.pruning import pruned
from specjax.types import Array, Model, PyTree, Target


class Memory(NamedTuple):
    """The cache of the model, and what its depth knows of a text."""

    base: PyTree
    prompt: Array  # int32[B], tokens of the prompt
    own: PyTree


def thinned(target: Target, depth: Depth) -> Target:
    """`target` with the part of its layers that `depth` chooses, token by token. Its text is another: lossy.

    It is a target as any other: for `decode`, `serve`, streams, drafters and rules, which are exact for *it*. A batch
    runs a sublayer if any of its rows needs it.

    Raises: UsageError for a model that is not of `specjax.models`, and for layers that it does not have.
    """
    num_layers = choosable_layers(target)
    depth.check(num_layers)
    if depth.keeps is not None:
        rest = pruned(target, depth.keeps(num_layers))
        return Target(rest.model._replace(name=_name(target.model, depth)), rest.params)
    return Target(_model(target.model, depth.replace(params=())), {"base": target.params, "depth": depth.params})


def choosable_layers(target: Target) -> int:
    """How many layers a depth chooses from. Raises: UsageError for a model that is not of `specjax.models`."""
    model = target.model
    if model.config is None or not model.capabilities.layer_skipping:
        raise UsageError(f"{model.name} has no layers to choose from; give a model of specjax.models")
    return model.capabilities.num_layers


def over(target: Target, depth: Depth, cache: PyTree, prompt: Array, own: PyTree = ()) -> tuple[Target, Memory]:
    """The thinned target over a cache that the whole one wrote: what drafts for it."""
    model = _model(target.model, depth.replace(params=()))
    return Target(model, {"base": target.params, "depth": depth.params}), Memory(cache, prompt, own)


def _name(base: Model, depth: Depth) -> str:
    return f"{base.name} by {depth.name}"


@functools.cache
def _model(base: Model, depth: Depth) -> Model:
    """`depth` has no parameters here: they come with the model's."""
    num_layers = base.capabilities.num_layers

    def begin(params, inputs, batch: int, capacity: int) -> Memory:
        cache = base.begin(params["base"], inputs, batch, capacity)
        # Who does not say where the prompt ends gets the whole model.
        return Memory(cache, jnp.full((batch,), jnp.iinfo(jnp.int32).max), depth.start(batch, num_layers))

    def forward(params, tokens, memory: Memory, *, positions, mask, taps=(), earlier=None, layers=None):
        places = Places(positions, memory.prompt)
        head = lambda stream: base.head(params["base"], stream)
        through = Through(depth, params["depth"], places, memory.own, head)
        return base.forward(
            params["base"], tokens, memory.base, positions=positions, mask=mask, taps=taps,
            earlier=None if earlier is None else earlier.base, layers=layers, run=through,
        )  # fmt: skip

    def commit(memory: Memory, pending: Thinned, path: Array, num_nodes: Array) -> Memory:
        if not jax.tree.leaves(pending.noted):
            return memory._replace(base=base.commit(memory.base, pending.base, path, num_nodes))
        node = jnp.maximum(path, 0)
        noted = jax.tree.map(lambda x: take_along(x, node.reshape(*node.shape, *[1] * (x.ndim - 2)), 1), pending.noted)
        places = Places(take_along(pending.base.positions, node, 1), memory.prompt)
        taken = jnp.arange(path.shape[1]) < num_nodes[:, None]
        own = depth.learn(memory.own, noted, places, taken)
        return Memory(base.commit(memory.base, pending.base, path, num_nodes), memory.prompt, own)

    def rewind(memory: Memory, length: Array) -> Memory:
        return memory._replace(base=base.rewound(memory.base, length))

    def widen(pending: Thinned, slots: int) -> Thinned:
        return Thinned(base.widen(pending.base, slots), *buffers.widen(tuple(pending[1:]), slots))

    def insert(pending: Thinned, new: Thinned, place) -> Thinned:
        return Thinned(
            base.insert(pending.base, new.base, place), *buffers.insert(tuple(pending[1:]), tuple(new[1:]), place)
        )

    def axes(held: Memory | Thinned) -> PyTree:
        return buffers.rows_first(held)._replace(base=base.axes(held.base))

    def shardings(held: Memory | Thinned) -> PyTree:
        assert base.shardings is not None
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
