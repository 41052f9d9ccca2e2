"""Layout of a model over a device mesh.

The axis "data" splits the rows of the batch; the other axes split the work on a row. The split is Megatron's (Shoeybi
et al. 2019, arXiv 1909.08053). Attention is split by heads over "layer", "expert" and "model". The MLP is split by its
inner width, and embedding and head by vocabulary, over all other axes. There are two sums per layer. The slots of the
cache are split over "sequence", for contexts that do not fit one device. A layer-parallel drafter puts its layers on
"layer"; other models use that axis like "model". The experts of a mixture are split over "expert", and the width of
each one over the other axes.

A vocabulary or an MLP that the mesh does not divide is replicated on every device. If there are fewer key/value heads
than devices, each is repeated, so that every device has the head that its query heads read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.arrays import texts
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.storage.joined import join_projections, split_projections
from specjax.numerics.global_arrays import with_auto_axes
from specjax.numerics.quantization import Quantized
from specjax.numerics.quantized_array import is_quantized
from specjax.pallas_kernels.tree_attention.over_slots import shard_over_slots
from specjax.types import Array, Model, PyTree

_PARTS = "weight", "bias"
_RECURRENT_ROWS = "output_gate", "convolved", "beta", "alpha", "time_step", "input"  # projections of recurrent layers

# From the last two names of a parameter's path to its dimensions. All families use the same names.
PARAMETER_DIMENSIONS: Mapping[tuple[str, str] | None, tuple[str | None, ...]] = MappingProxyType(
    {
        ("embed", "weight"): ("vocab", None),
        ("head", "weight"): ("vocab", None),
        ("table", "weight"): ("vocab", None),
        ("q", "weight"): ("heads", None),
        ("k", "weight"): ("heads", None),
        ("v", "weight"): ("heads", None),
        ("q", "bias"): ("heads",),
        ("k", "bias"): ("heads",),
        ("v", "bias"): ("heads",),
        ("qkv", "weight"): ("heads", None),
        ("qkv", "bias"): ("heads",),
        **{(name, "weight"): ("heads", None) for name in ("k_up", "v_up")},
        ("o", "weight"): (None, "heads"),
        ("attention", "sinks"): ("heads",),
        **{(name, part): ("heads", *[None] * (part == "weight")) for name in _RECURRENT_ROWS for part in _PARTS},
        ("out", "weight"): (None, "heads"),
        ("gate", "weight"): ("mlp", None),
        ("up", "weight"): ("mlp", None),
        ("gate_up", "weight"): ("mlp", None),
        ("down", "weight"): (None, "mlp"),
        **{(f"expert_{name}", "weight"): ("experts", "expert_mlp", None) for name in ("gate", "up")},
        **{(f"expert_{name}", "bias"): ("experts", "expert_mlp") for name in ("gate", "up")},
        ("expert_down", "weight"): ("experts", None, "expert_mlp"),
        ("expert_down", "bias"): ("experts", None),
    }
)


REPLICATED = "tower", "connector"
"""Parts of a model whose parameters each device has in full, because they read one image per device at a time."""

AXES = ("data", "layer", "sequence", "expert", "model")
"""Axes of a mesh. A mesh may lack some; they then count as 1."""

SPLIT_AXES = MappingProxyType(
    {
        "data": ("data",),
        "heads": ("layer", "expert", "model"),
        "mlp": ("layer", "sequence", "expert", "model"),
        "vocab": ("layer", "sequence", "expert", "model"),
        "experts": ("expert",),
        "expert_mlp": ("layer", "sequence", "model"),
        "slots": ("sequence",),
        "tiles": ("layer", "sequence", "expert", "model"),
    }
)
"""The mesh axes that split each kind of dimension of a model's arrays."""


@dataclass(frozen=True)
class Layout:
    """The placement of a model's arrays: split over some axes of a mesh, and replicated along the others."""

    mesh: Mesh
    over: tuple[str, ...]

    def __post_init__(self):
        object.__setattr__(self, "mesh", with_auto_axes(self.mesh))

    def axes(self, part: str | None) -> tuple[str, ...]:
        """Return the mesh axes that split `part`, a key of SPLIT_AXES."""
        return tuple(axis for axis in SPLIT_AXES.get(part or "", ()) if axis in self.over and self.mesh.shape[axis] > 1)

    def parts(self, part: str) -> int:
        """Return the number of pieces that `part` is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(part))

    def sharding(self, shape: tuple[int, ...], *parts: str | None) -> NamedSharding:
        """Return the sharding of an array whose last dimensions are `parts`, keys of SPLIT_AXES or None."""

        def axes_of_size(size: int, part: str | None):
            fits = part is not None and size % self.parts(part) == 0
            return (self.axes(part) or None) if fits else None

        dimensions = (*[None] * (len(shape) - len(parts)), *parts)
        return NamedSharding(
            self.mesh, PartitionSpec(*(axes_of_size(n, part) for n, part in zip(shape, dimensions, strict=True)))
        )

    def place(self, x: Array, *parts: str | None) -> Array:
        """Constrain `x` to the sharding of these parts, inside of `jit`."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape, *parts))

    def sum(self, x: Array, part: str) -> Array:
        """Sum x [B, T, D] over the devices that split `part`, so that each has the full result.

        The constraint on the sharding makes the compiler add the sum.
        """
        return self.place(x, "data", None, None)

    def params(self, params: PyTree) -> PyTree:
        """Return the shardings of parameters, or of their shapes."""

        def shard_leaf(path, leaf):
            names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            last = (names[-2], names[-1]) if len(names) > 1 and names[0] not in REPLICATED else None
            return self.sharding(leaf.shape, *PARAMETER_DIMENSIONS.get(last, ()))

        return jax.tree_util.tree_map_with_path(shard_leaf, params)

    def with_shardings(self, params: PyTree) -> PyTree:
        """Return the parameters of a pass, whose quantised matrices carry the shardings of their values.

        Products need them for a kernel, which the compiler cannot split by itself.
        """
        add = lambda leaf, placed: dataclasses.replace(leaf, sharding=placed.values) if is_quantized(leaf) else leaf
        return jax.tree.map(add, params, self.params(params), is_leaf=is_quantized)

    def place_logits(self, logits: Array) -> Array:
        """Constrain logits [B, ..., V], or [V], to the devices of their rows and of the head."""
        return self.place(logits, *("data", *[None] * (logits.ndim - 2), "vocab")[-logits.ndim :])

    def map_tiles(self, read: Callable[..., Array], params: PyTree, *images: Array) -> Array:
        """Return `read(params, *images)` [B, N, ...] of images [B, N, ...], with a part of the images on each device.

        Images that the mesh does not divide are read by all of its devices. Then each device has those of its rows.
        """
        shardings = tuple(self.sharding(x.shape, "data", "tiles", *[None] * (x.ndim - 2)) for x in images)
        specs = tuple(sharding.spec for sharding in shardings)
        over = PartitionSpec(*specs[0][:2])
        split = jax.shard_map(read, mesh=self.mesh, in_specs=(PartitionSpec(), *specs), out_specs=over, check_vma=False)
        result = split(params, *images)
        return self.place(result, "data", *[None] * (result.ndim - 1))

    def rows(self, x: Array) -> NamedSharding:
        """Return the sharding of an array [B, ...]."""
        return self.sharding(x.shape, "data", *[None] * (x.ndim - 1))

    def cache(self, cache: kv.KVCache | kv.Pending) -> PyTree:
        """Return the shardings of a cache or of pending tokens: rows over "data", heads as in attention."""
        tokens = "slots" if isinstance(cache, kv.KVCache) else None
        shard_keys = lambda keys: self.keys(keys, tokens)
        k, v = jax.tree.map(shard_keys, (cache.k, cache.v), is_leaf=lambda x: isinstance(x, Quantized))
        other_arrays: Any = (None if x is None else self.rows(x) for x in cache[2:])
        return type(cache)(k, v, *other_arrays)

    def keys(self, x: Array | Quantized | None, tokens: str | None) -> Any:
        """Return the sharding of keys or values [..., B, K, n, h]. `tokens` is the kind of n: "slots" or None.

        Values that are a part of the keys are None, and so is their sharding.
        """
        if x is None:
            return None
        if isinstance(x, Quantized):
            scale: Any = self.sharding(x.scale.shape, "data", "heads", tokens)
            return Quantized(self.keys(x.values, tokens), scale)
        return self.sharding(x.shape, "data", "heads", tokens, None)

    def capacity(self, slots: int) -> int:
        """Return the number of slots of a cache for `slots` tokens.

        Each part of a split cache has extra slots (`cache.commit`).
        """
        parts = self.parts("slots")
        return slots if parts == 1 else parts * (-(-slots // (kv.SLOTS * parts)) + 1) * kv.SLOTS

    def commit(self, cache: kv.KVCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.KVCache:
        """Commit like `cache.commit`, with each device writing its own part.

        The compiler would gather an unsplit update.
        """
        is_text, size = texts.is_in_order(path), path.shape[1]  # a constant stays one on each device
        args = cache, pending, num_nodes if is_text else path, num_nodes
        shardings = self.cache(cache), self.cache(pending), self.rows(args[2]), self.rows(num_nodes)
        specs = jax.tree.map(lambda s: s.spec, shardings)
        axes = self.axes("slots")

        def local(cache, pending, path, num_nodes):
            path = texts.in_order(len(num_nodes), size) if is_text else path
            leaves = jax.tree.leaves(cache.k, is_leaf=lambda x: isinstance(x, Quantized))
            if not axes or not leaves:  # a model without attention has no slots
                return kv.commit(cache, pending, path, num_nodes)
            first = jax.lax.axis_index(axes) * kv.slots_per_device(leaves[0])
            return kv.commit(cache, pending, path, num_nodes, first)

        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*args)

    def shard_attention(self, attend: Callable[..., Array]) -> Callable[..., Array]:
        """Wrap `tree_attention` so that each device attends with its own heads to its own slots.

        The compiler cannot split a kernel by itself.
        """
        slots = self.axes("slots")
        attend = shard_over_slots(attend, slots, kv.slots_per_device) if slots else attend

        def split(
            q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions, layer, window, first=None,
            sinks=None,
        ):  # fmt: skip
            rows: tuple[Array, ...] = (length, positions, mask, key_positions)
            optional = {name: x for name, x in (("first", first), ("sinks", sinks)) if x is not None}
            shardings = (
                self.sharding(q.shape, "data", None, "heads", None),
                *(self.keys(x, None) for x in (k, v)),
                *(self.keys(x, "slots") for x in (prefix_k, prefix_v)),
                *map(self.rows, rows),
                *(self.rows(x) if name == "first" else self.sharding(x.shape, "heads") for name, x in optional.items()),
            )
            specs = jax.tree.map(lambda s: s.spec, shardings)

            def local(*parts):
                arrays, (key_positions, *more, layer, window) = parts[:8], parts[8:]
                named = dict(zip(optional, more, strict=True))
                return attend(*arrays, key_positions=key_positions, layer=layer, window=window, **named)

            scalars = tuple(None if x is None else jnp.asarray(x, jnp.int32) for x in (layer, window))
            everywhere = tuple(None if x is None else PartitionSpec() for x in scalars)
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(*specs, *everywhere), out_specs=specs[0], check_vma=False
            )(q, k, v, prefix_k, prefix_v, *rows, *optional.values(), *scalars)

        return split


def splits_slots(model: Model) -> bool:
    """Return True if the slots of the model's cache are split over devices.

    Each part has spare slots at its end (`Layout.capacity`), so slot s is then not position s.
    """
    if model.mesh is None or model.mesh.shape.get("sequence", 1) == 1:
        return False
    return model.over is None or "sequence" in model.over


def shard_config(config: Any, mesh: Mesh, over: tuple[str, ...] | None = None) -> tuple[Any, Layout]:
    """Return the config of a model on a mesh, with the repeated key/value heads that it needs, and its layout.

    over: the axes that split the model, besides "data"; None: all. Along other axes the model is replicated, so that a
    small draft model may be split less than its target.

    Raises: UsageError for a mesh with other axes, or one that does not divide the heads or the experts.
    """
    check_axes(mesh)
    missing = set(over or ()) - set(mesh.axis_names)
    if missing:
        raise UsageError(
            f"over has the axes {', '.join(sorted(missing))}, which the mesh lacks; it has {', '.join(mesh.axis_names)}"
        )
    layout = Layout(mesh, mesh.axis_names if over is None else ("data", *over))
    num_parts = layout.parts("heads")
    check_heads(config, num_parts, layout.axes("heads"))
    check_experts(config, layout.parts("experts"))
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * kv_head_copies(config, num_parts)), layout


def check_axes(mesh: Mesh) -> None:
    """Check the axes of a mesh.

    Raises: UsageError for axes outside of AXES, or a mesh without "data".
    """
    if "data" not in mesh.axis_names or not set(mesh.axis_names) <= set(AXES):
        raise UsageError(
            f'the mesh has the axes {", ".join(mesh.axis_names)}; it needs "data" and may have '
            '"layer", "sequence", "expert" and "model"; make it with specjax.mesh'
        )


def check_heads(config: Any, num_parts: int, axes: tuple[str, ...]) -> None:
    """Check that `num_parts` parts of attention, along these axes, divide its heads.

    Raises: UsageError if they do not.
    """
    if not fits_heads(config, num_parts):
        counts = [n for n in range(1, max(num_parts, jax.device_count()) + 1) if fits_heads(config, n)]
        raise UsageError(
            f"the mesh splits attention into {num_parts} parts (axes {', '.join(axes)}), which does not "
            f"divide the {config.num_heads} query and {config.num_kv_heads} key/value heads of {config.name}; "
            f"choose {' or '.join(map(str, counts))}"
        )


def check_experts(config: Any, num_parts: int) -> None:
    """Check that `num_parts` parts divide the experts of a mixture, because each device would else have all of them.

    Raises: UsageError if they do not.
    """
    sizes = getattr(config, "experts", None)
    if sizes is not None and sizes.num_experts % num_parts:
        raise UsageError(
            f"the mesh splits the {sizes.num_experts} experts of {config.name} into {num_parts} parts (axis expert), "
            "which must divide them"
        )


def fits_heads(config: Any, num_parts: int) -> bool:
    """Return True if attention can be split into `num_parts` parts, with repeated key/value heads where necessary.

    Heads are not repeated if the layers have different heads.
    """
    if not has_attention(config):
        return True
    if getattr(config, "has_own_heads", False):
        layers = (config.of_layer(i) for i, kind in enumerate(config.kinds) if kind.attends)
        heads = lambda c: (c.num_heads,) if c.latent is not None else (c.num_heads, c.num_kv_heads)
        return all(count % num_parts == 0 for layer in layers for count in heads(layer))
    return (
        config.num_heads % num_parts == 0 and config.num_kv_heads * kv_head_copies(config, num_parts) % num_parts == 0
    )


def has_attention(config: Any) -> bool:
    """Return False for a hybrid model without a layer that attends."""
    kinds = getattr(config, "kinds", None)
    return kinds is None or any(kind.attends for kind in kinds)


def kv_head_copies(config: Any, num_parts: int) -> int:
    """Return the number of copies of each key/value head over `num_parts` devices."""
    if not has_attention(config) or config.num_heads % num_parts or getattr(config, "has_own_heads", False):
        return 1
    copies = num_parts // math.gcd(config.num_kv_heads, num_parts)
    return copies if (config.num_heads // config.num_kv_heads) % copies == 0 else 1


def has_kv_head_rows(config: Any, keys: Sequence[Any], part: str) -> bool:
    """Return True if the rows of `part`, below `keys` in the parameters, belong to key/value heads of the decoder."""
    if keys[0] in REPLICATED:
        return False
    has_norm_by_head = config.qk_norm_scope == "projection" or config.qk_layer_norm
    return part in ("k", "v") or (part == "k_norm" and has_norm_by_head)


def repeat_kv_heads(params: PyTree, config: Any, copies: int) -> PyTree:
    """Repeat each key/value head of the parameters of `config` `copies` times in a row."""
    if copies == 1:
        return params

    def repeat_leaf(path, leaf):
        names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
        if not has_kv_head_rows(config, names, names[-2]):
            return leaf
        is_matrix = names[-2] != "k_norm" and names[-1] == "weight"
        axis = leaf.ndim - (2 if is_matrix else 1)  # [.., K * h, D] and [.., K * h]
        heads = leaf.reshape(*leaf.shape[:axis], -1, config.head_dim, *leaf.shape[axis + 1 :])
        return jnp.repeat(heads, copies, axis).reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 1 :])

    repeated_config = dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)
    repeated = jax.tree_util.tree_map_with_path(repeat_leaf, split_projections(params, config))
    return join_projections(repeated, repeated_config)
