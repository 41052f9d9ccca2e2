"""Layer-parallel models: the attention of several layers at once, each layer on a device of its own.

Wu et al.: EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025), arXiv 2502.02493;
the drafter that uses them is `specjax.drafters.easyspec`.

Rule: of every group of G middle layers (G: the devices along the axis "layer") device i has the attention of layer i,
split over "model" by heads, and its keys and values. MLPs are split over "layer" and "model", embedding and head by
vocabulary over all axes but "data". The first and the last layer have their attention on every device of "layer".
Collectives of a group: a pass with `group=G` computes its G attentions at once and passes them round by one all-gather
(along "model" too: one sum), then each MLP is one sum: G + 1, where exact tensor parallelism needs 2 G. An exact pass
uses the same weights in sequence: G times, all devices run their layer on the stream of that moment, and a sum that is
masked to one of them passes its result round: 2 G.
Guarantee: the logits of the model on one device, rounding aside.
Deviations from the card: the first and last layer's MLP is split as all others; along "model" one sum of G slots in
place of a sum and a gather.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.bridge import (
    abstract_module,
    abstract_params,
    check_no_inputs,
    embedding_and_head_fields,
    kv_cache_fields,
)
from specjax.models.layers import AttentionSettings, PassInputs, layer_segments
from specjax.models.layout import Layout, check_axes, check_heads, kv_head_copies, repeat_kv_heads
from specjax.numerics.global_arrays import place_one, with_shardings
from specjax.parallel.layer_pass import Parts, Pass
from specjax.parallel.sharding import config_to_spread
from specjax.types import Capabilities, Model, PyTree, Target

OWN = ("attention_norm", "attention")
"""The parts of a block that only the layer's own device has."""


def place(draft: Target, mesh: Mesh, group: int | None = None) -> Target:
    """`draft` with groups of `group` layers side by side along the axis "layer" of `mesh`.

    group: as many as the mesh has devices there, or None. The draft model is for a target that `specjax.shard` spreads
    over the same mesh. Any drafter may use it, `easyspec` gains by it. Its `forward` takes `group=1`, exact, or that of
    the mesh.

    Raises: UsageError for a model that is not one of `specjax.models` or is sharded already, and for a mesh, a group
    and a model that do not fit each other.
    """
    config = config_to_spread(draft)
    check(config, mesh, group)
    with _in_host_memory():
        params = _arranged(config, mesh, jax.device_get(draft.params))
    return Target(_model(config, mesh), jax.tree.map(place_one, params, _shardings(config, mesh, params)))


def abstract_draft(config: Any, mesh: Mesh) -> Target:
    """Shapes of what `place` returns, as `jax.ShapeDtypeStruct` with shardings: to compile without weights."""
    check(config, mesh)
    params = jax.eval_shape(lambda params: _arrange(config, mesh, params), abstract_params(config))
    return Target(_model(config, mesh), with_shardings(params, _shardings(config, mesh, params)))


def check(config: Any, mesh: Mesh, group: int | None = None) -> None:
    """Raises: UsageError for a mesh, a group and a model that do not fit each other."""
    check_axes(mesh)
    size, model = mesh.shape.get("layer", 1), mesh.shape.get("model", 1)
    if group is not None and group < 1:
        raise UsageError(f"group must be at least 1, not {group}")
    if size < 2:
        raise UsageError('a layer-parallel model needs a mesh with 2 or more devices along "layer", or specjax.shard')
    if group not in (None, size):
        raise UsageError(f'group is {group}, but the mesh has {size} devices along "layer"; make the two equal')
    if config.num_layers < size + 2:
        raise UsageError(
            f"{config.name} has {config.num_layers} layers, too few for a group of {size} between the first and the "
            'last; choose a mesh with fewer devices along "layer", or specjax.shard'
        )
    if model > 1 and config.qk_norm and config.qk_norm_scope == "projection":
        raise UsageError(
            f"{config.name} norms the queries of all heads at once, which a layer-parallel model cannot split; make "
            'the axis "model" 1, or use specjax.shard'
        )
    check_heads(config, model, ("model",))


def _arrange(config: Any, mesh: Mesh, params: PyTree) -> PyTree:
    """Parameters with their layers as {first, last, own, rest}.

    own, rest: per segment of groups, the parts that only the layer's device has [groups, G, ..], with zeros for the
    layers that a smaller group lacks, and the others [groups, layers of each, ..].
    """
    copies = kv_head_copies(config, mesh.shape.get("model", 1))
    params = repeat_kv_heads(params, config, copies)
    group, layers = mesh.shape["layer"], params["layers"]
    take = lambda i: jax.tree.map(lambda leaf: leaf[i], layers) if config.stacked else layers[i]
    own, rest = [], []
    for start, size, count in layer_segments(config.num_layers, group)[1:-1]:
        members = [take(i) for i in range(start, start + size * count)]
        stack = lambda *leaves, shape=(count, size): jnp.stack(leaves).reshape(*shape, *leaves[0].shape)
        fill = lambda leaf, lacking=group - size: jnp.pad(leaf, ((0, 0), (0, lacking), *[(0, 0)] * (leaf.ndim - 2)))
        groups = jax.tree.map(stack, *members)
        own.append({name: jax.tree.map(fill, part) for name, part in groups.items() if name in OWN})
        rest.append({name: part for name, part in groups.items() if name not in OWN})
    arranged = {"first": take(0), "last": take(config.num_layers - 1), "own": tuple(own), "rest": tuple(rest)}
    return params | {"layers": arranged}


_arranged = jax.jit(_arrange, static_argnums=(0, 1))


def _in_host_memory() -> contextlib.AbstractContextManager:
    """The whole model need not fit on one of the devices that it is spread over."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves CPU out
        return contextlib.nullcontext()


def _shardings(config: Any, mesh: Mesh, params: PyTree) -> PyTree:
    """Of arranged parameters, or of their shapes."""
    others = {name: part for name, part in params.items() if name != "layers"}
    layers = jax.tree.map(lambda spec: NamedSharding(mesh, spec), Parts(config, mesh).layers(params["layers"]))
    return Layout(mesh, mesh.axis_names).params(others) | {"layers": layers}


def cache_shardings(config: Any, mesh: Mesh, cache: kv.KVCache | kv.Pending) -> PyTree:
    """Of the cache of such a model, or of what is pending; shapes will do."""
    batch = (cache.length if isinstance(cache, kv.KVCache) else cache.write_dependency).shape[0]
    specs = _specs(Parts(config, mesh), type(cache), batch)
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec), part), specs, cache)


def _specs(parts: Parts, kind: type, batch: int) -> Any:
    """`PartitionSpec`s of a `KVCache` or a `Pending`, in the form of one with an array per segment and field."""
    keys, rows = parts.kv(batch, len(layer_segments(parts.config.num_layers, parts.group)) - 2), P(parts.rows(batch))
    return kind(keys, keys, *[rows] * (len(kind._fields) - 2))  # type: ignore[attr-defined]


@functools.cache
def _model(config: Any, mesh: Mesh) -> Model:
    """The `Model` of parameters from `_arrange`."""
    copies = kv_head_copies(config, mesh.shape.get("model", 1))
    wide = dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)
    parts, layout = Parts(config, mesh), Layout(mesh, mesh.axis_names)
    middle = layer_segments(config.num_layers, parts.group)[1:-1]
    # All but the layers, which are not those of the module.
    outside, _ = nnx.split(abstract_module(dataclasses.replace(wide, num_layers=0, stacked=False)))
    one_layer: Any = abstract_module(dataclasses.replace(wide, num_layers=1, stacked=False))
    block, _ = nnx.split(one_layer.layers[0])

    specs_of_cache = functools.partial(_specs, parts, kv.KVCache)
    specs_of_pending = functools.partial(_specs, parts, kv.Pending)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.KVCache:
        check_no_inputs(config.name, inputs)
        one = kv.init(
            batch, capacity, 1, wide.num_kv_heads, wide.head_dim, wide.cache_dtype or wide.dtype, False,
            wide.cache_lanes, wide.cache_bits,
        ).k[0]  # fmt: skip
        zeros = lambda *leading: jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), one)
        groups = lambda: tuple(zeros(count, parts.group) for _, _, count in middle)
        keys = lambda: {"first": zeros(), "last": zeros(), "groups": groups()}
        cache = kv.KVCache(keys(), keys(), jnp.zeros((batch,), jnp.int32))
        return jax.lax.with_sharding_constraint(cache, cache_shardings(config, mesh, cache))

    def commit(cache, pending, path, num_nodes):
        batch = path.shape[0]
        rows, of_cache = P(parts.rows(batch)), specs_of_cache(batch)
        return jax.shard_map(
            kv.commit, mesh=mesh, in_specs=(of_cache, specs_of_pending(batch), rows, rows), out_specs=of_cache,
            check_vma=False,
        )(cache, pending, path, num_nodes)  # fmt: skip

    def run_layers(at_once: int, params, _, x, shared: PassInputs, cache, settings: AttentionSettings):
        """`layers.run_layers` on the arranged layers."""
        batch = x.shape[0]
        rows, of_cache, of_pending = P(parts.rows(batch)), specs_of_cache(batch), specs_of_pending(batch)
        earlier = () if shared.earlier is None else (shared.earlier.k, shared.earlier.v)
        bare = shared.replace(earlier=None, layout=None)
        of_step = jax.tree.map(lambda _: rows, bare)

        def local(params, x, shared, cache, earlier, settings):
            return Pass(block, parts, shared, cache, earlier, settings).run(params, x, middle, at_once)

        return jax.shard_map(
            local, mesh=mesh,
            in_specs=(parts.layers(params), rows, of_step, of_cache, (of_pending.k,) * len(earlier), P()),
            out_specs=(P(None, *rows), of_pending), check_vma=False,
        )(params, x, bare, cache, earlier, settings)  # fmt: skip

    def module_of(params):
        return nnx.merge(outside, nnx.State({name: part for name, part in params.items() if name != "layers"}))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None, layers=None, group=1):
        if layers is not None:
            raise UsageError(f"{config.name} is layer-parallel and cannot skip layers; use specjax.shard for it")
        if group not in (1, parts.group):
            raise UsageError(f"{config.name} takes groups of 1 or {parts.group} layers, not {group}")
        return module_of(params)(
            tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier, layout=layout,
            run_layers=functools.partial(run_layers, group, params["layers"]),
        )  # fmt: skip

    return Model(
        init_cache=init_cache,
        forward=forward,
        commit=commit,
        shardings=functools.partial(cache_shardings, config, mesh),
        config=config,
        mesh=mesh,
        capabilities=Capabilities(config.num_layers, taps=True, groups=(parts.group,), mixtures=True, vectors=True),
        **kv_cache_fields(config),
        **embedding_and_head_fields(module_of, layout),
    )
