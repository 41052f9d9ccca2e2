"""Layer-parallel models: the attention of several layers runs at the same time, each layer on its own device.

Wu et al.: EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025), arXiv 2502.02493.
The drafter `specjax.drafters.easyspec` uses these models.

Rule: let G be the number of devices along the axis "layer". In every group of G middle layers, device i has the
attention of layer i, split over "model" by heads, and its keys and values. MLPs are split over "layer" and "model".
Embedding and output head are split by vocabulary over all axes but "data". Every device of "layer" has the attention of
the first and the last layer.
Collectives: a pass with `group=G` computes the G attentions of a group at the same time. One all-gather exchanges their
outputs (if "model" is split too, one sum does). Each MLP then needs one sum. A group thus needs G + 1 collectives,
while exact tensor parallelism needs 2 G. An exact pass uses the same weights in sequence. G times, all devices run
their layer on the current stream, and a sum that is masked to one of them distributes its result: 2 G collectives.
Guarantee: an exact pass returns the logits of the model on one device, except for rounding.
Deviations: the MLPs of the first and the last layer are split like all others. Along "model" one sum of G slots
replaces a sum and a gather.
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
    is_text_decoder,
    kv_cache_fields,
)
from specjax.models.hybrid.config import HybridConfig
from specjax.models.layers import AttentionSettings, PassInputs, layer_segments, with_full_tile
from specjax.models.layout import Layout, check_axes, check_heads, kv_head_copies, repeat_kv_heads
from specjax.models.storage import split_projections
from specjax.numerics.global_arrays import place_one, with_shardings
from specjax.parallel.layer_pass import LayerParallelPass, LayerParallelSpecs
from specjax.parallel.sharding import shardable_config
from specjax.types import Capabilities, Model, PyTree, Target

LAYER_DEVICE_PARTS = ("attention_norm", "attention")
"""Parts of a block that only the device of the layer stores."""


def place_layer_parallel(draft: Target, mesh: Mesh, group: int | None = None) -> Target:
    """Place a draft model with groups of `group` layers side by side along the axis "layer" of `mesh`.

    Use the draft model with a target that `specjax.shard` places on the same mesh. All drafters accept it, but only
    `easyspec` benefits from it. Its `forward` takes `group=1`, which is exact, or the group of the mesh.

    Args: group: None, or the number of devices of the mesh along "layer", which is then checked.

    Raises: UsageError for a model that is not from `specjax.models` or is already sharded. It is also raised if mesh,
      group and model do not fit each other.
    """
    stored_config = shardable_config(draft)
    config = dataclasses.replace(stored_config, joined=())  # the parts of attention have a sharding each
    check_layer_parallel(config, mesh, group)
    with _in_host_memory():
        params = _arrange_jit(config, mesh, split_projections(jax.device_get(draft.params), stored_config))
    return Target(_model(config, mesh), jax.tree.map(place_one, params, _shardings(config, mesh, params)))


def abstract_draft(config: Any, mesh: Mesh) -> Target:
    """Return the result of `place_layer_parallel` with shapes in place of weights, to compile without them.

    The shapes are `jax.ShapeDtypeStruct`s with shardings.
    """
    config = dataclasses.replace(config, joined=())
    check_layer_parallel(config, mesh)
    params = jax.eval_shape(lambda params: _arrange_layers(config, mesh, params), abstract_params(config))
    return Target(_model(config, mesh), with_shardings(params, _shardings(config, mesh, params)))


def check_layer_parallel(config: Any, mesh: Mesh, group: int | None = None) -> None:
    """Check that a mesh, a group and a model fit each other.

    Raises: UsageError if they do not.
    """
    check_axes(mesh)
    size, model = mesh.shape.get("layer", 1), mesh.shape.get("model", 1)
    if group is not None and group < 1:
        raise UsageError(f"group must be at least 1, not {group}")
    if size < 2:
        raise UsageError(
            'a layer-parallel model needs a mesh with 2 or more devices along "layer"; otherwise use specjax.shard'
        )
    if group not in (None, size):
        raise UsageError(f'group is {group}, but the mesh has {size} devices along "layer"; make them equal')
    if isinstance(config, HybridConfig):
        raise UsageError(
            f"{config.name} has layers of several kinds, which a layer-parallel model cannot run in groups; use "
            "specjax.shard"
        )
    if not is_text_decoder(config):
        raise UsageError(
            f"{config.name} reads or writes more than text, which a layer-parallel model cannot; choose a model of text"
        )
    if config.experts is not None:
        raise UsageError(
            f"{config.name} is a mixture of experts, which a layer-parallel model cannot run in groups; use "
            "specjax.shard"
        )
    if config.num_layers < size + 2:
        raise UsageError(
            f"{config.name} has {config.num_layers} layers, too few for a group of {size} between the first and the "
            'last; choose a mesh with fewer devices along "layer", or specjax.shard'
        )
    if config.mlp_widths is not None:
        raise UsageError(
            f"{config.name} has MLPs of different widths, which a layer-parallel model cannot stack; use specjax.shard"
        )
    if model > 1 and (config.qk_layer_norm or (config.qk_norm and config.qk_norm_scope == "projection")):
        raise UsageError(
            f"{config.name} has weights of q/k norms for each head, which a layer-parallel model cannot split; "
            'set the axis "model" to 1, or use specjax.shard'
        )
    check_heads(config, model, ("model",))


def _arrange_layers(config: Any, mesh: Mesh, params: PyTree) -> PyTree:
    """Arrange the layers of the parameters as {first, last, device, shared}.

    `device` and `shared` have one entry per segment of groups. `device` has the parts [groups, G, ..] that only the
    layer's device stores; the missing layers of a smaller group are zeros. `shared` has all other parts [groups, layers
    per group, ..].
    """
    copies = kv_head_copies(config, mesh.shape.get("model", 1))
    params = repeat_kv_heads(params, config, copies)
    group, layers = mesh.shape["layer"], params["layers"]
    take = lambda i: jax.tree.map(lambda leaf: leaf[i], layers) if config.stacked else layers[i]
    device_parts, shared_parts = [], []
    for start, size, count in layer_segments(config.num_layers, group)[1:-1]:
        members = [take(i) for i in range(start, start + size * count)]
        stack = lambda *leaves, shape=(count, size): jnp.stack(leaves).reshape(*shape, *leaves[0].shape)
        fill = lambda leaf, lacking=group - size: jnp.pad(leaf, ((0, 0), (0, lacking), *[(0, 0)] * (leaf.ndim - 2)))
        groups = jax.tree.map(stack, *members)
        device_parts.append(
            {name: jax.tree.map(fill, part) for name, part in groups.items() if name in LAYER_DEVICE_PARTS}
        )
        shared_parts.append({name: part for name, part in groups.items() if name not in LAYER_DEVICE_PARTS})
    arranged = {
        "first": take(0),
        "last": take(config.num_layers - 1),
        "device": tuple(device_parts),
        "shared": tuple(shared_parts),
    }
    return params | {"layers": arranged}


_arrange_jit = jax.jit(_arrange_layers, static_argnums=(0, 1))


def _in_host_memory() -> contextlib.AbstractContextManager:
    """Return a context that places arrays in host memory, because the model may not fit on one device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return contextlib.nullcontext()


def _shardings(config: Any, mesh: Mesh, params: PyTree) -> PyTree:
    """Return the shardings of arranged parameters, which may be shapes."""
    other_params = {name: part for name, part in params.items() if name != "layers"}
    layers = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), LayerParallelSpecs(config, mesh).layers(params["layers"])
    )
    return Layout(mesh, mesh.axis_names).params(other_params) | {"layers": layers}


def cache_shardings(config: Any, mesh: Mesh, cache: kv.KVCache | kv.Pending) -> PyTree:
    """Return the shardings of a layer-parallel model's cache or pending tokens, given as arrays or shapes."""
    batch = (cache.length if isinstance(cache, kv.KVCache) else cache.write_dependency).shape[0]
    specs = _specs(LayerParallelSpecs(config, mesh), type(cache), batch)
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec), part), specs, cache)


def _specs(parts: LayerParallelSpecs, kind: type, batch: int) -> Any:
    """Return `PartitionSpec`s of a `KVCache` or a `Pending` with an array per segment and field."""
    keys, rows = parts.kv(batch, len(layer_segments(parts.config.num_layers, parts.group)) - 2), P(parts.rows(batch))
    return kind(keys, keys, *[rows] * (len(kind._fields) - 2))  # type: ignore[attr-defined]


@functools.cache
def _model(config: Any, mesh: Mesh) -> Model:
    """Build the `Model` of parameters from `_arrange_layers`."""
    copies = kv_head_copies(config, mesh.shape.get("model", 1))
    full_config = dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)
    parts, layout = LayerParallelSpecs(config, mesh), Layout(mesh, mesh.axis_names)
    middle = layer_segments(config.num_layers, parts.group)[1:-1]
    # All parts of the module except its layers, which are arranged differently.
    outer_graphdef, _ = nnx.split(abstract_module(dataclasses.replace(full_config, num_layers=0, stacked=False)))
    one_layer: Any = abstract_module(dataclasses.replace(full_config, num_layers=1, stacked=False))
    block, _ = nnx.split(one_layer.layers[0])

    specs_of_cache = functools.partial(_specs, parts, kv.KVCache)
    specs_of_pending = functools.partial(_specs, parts, kv.Pending)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.KVCache:
        check_no_inputs(config.name, inputs)
        layer_keys = kv.init(
            batch, capacity, 1, full_config.num_kv_heads, full_config.head_dim,
            full_config.cache_dtype or full_config.dtype, False, full_config.cache_lanes, full_config.cache_bits,
        ).k[0]  # fmt: skip
        zeros = lambda *leading: jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), layer_keys)
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

    def run_layers(group_size: int, params, _, x, shared: PassInputs, cache, settings: AttentionSettings):
        """Run the arranged layers, like `layers.run_layers`."""
        batch = x.shape[0]
        rows, of_cache, of_pending = P(parts.rows(batch)), specs_of_cache(batch), specs_of_pending(batch)
        earlier = () if shared.earlier is None else (shared.earlier.k, shared.earlier.v)
        stripped = shared.replace(earlier=None, layout=None)
        shared_specs = jax.tree.map(lambda _: rows, stripped)
        settings_specs = jax.tree.map(lambda _: P(), settings)
        # [B, T, 1, r/2], with a leading axis if the layers differ
        rotation_specs = jax.tree.map(lambda x: P(*[None] * (x.ndim - 4), *rows), settings.rotation)

        def local(params, x, shared, cache, earlier, settings):
            layers = LayerParallelPass(block, parts, shared, cache, earlier, settings)
            return with_full_tile(lambda x: layers.run(params, x, middle, group_size), x)

        stream, pending = jax.shard_map(
            local, mesh=mesh,
            in_specs=(
                parts.layers(params), rows, shared_specs, of_cache, (of_pending.k,) * len(earlier),
                settings_specs._replace(rotation=rotation_specs),
            ),
            out_specs=(P(None, *rows), of_pending), check_vma=False,
        )(params, x, stripped, cache, earlier, settings)  # fmt: skip
        return stream, pending, None

    def module_of(params):
        return nnx.merge(outer_graphdef, nnx.State({name: part for name, part in params.items() if name != "layers"}))

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
