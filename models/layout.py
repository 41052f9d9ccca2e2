"""How a model is spread over a mesh.

The axes of a mesh: "data" splits the rows of the batch, the others the work on a row. Megatron's split (Shoeybi et al.
2019, arXiv 1909.08053): attention by heads over "layer" and "model", the MLP by its inner width and embedding and head
by vocabulary over all three; two sums per layer. The slots of the cache go over "sequence", for contexts that one
device cannot hold. "layer" is where a layer-parallel drafter puts its layers; to all other models it is more of
"model".

A vocabulary or an MLP that the mesh does not divide stays whole on every device. Where there are fewer key/value heads
than devices, each is repeated, so that every device owns the head that its query heads read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention.over_slots import over_slots
from specjax.types import Array, PyTree

# The last names of a parameter's path -> what its dimensions count. All families name these parts alike.
TABLE: Mapping[tuple[str, str] | None, tuple[str | None, ...]] = MappingProxyType(
    {
        ("embed", "weight"): ("vocab", None),
        ("head", "weight"): ("vocab", None),
        ("q", "weight"): ("heads", None),
        ("k", "weight"): ("heads", None),
        ("v", "weight"): ("heads", None),
        ("q", "bias"): ("heads",),
        ("k", "bias"): ("heads",),
        ("v", "bias"): ("heads",),
        ("o", "weight"): (None, "heads"),
        ("gate", "weight"): ("mlp", None),
        ("up", "weight"): ("mlp", None),
        ("down", "weight"): (None, "mlp"),
    }
)


AXES = ("data", "layer", "sequence", "model")
"""Of a mesh; it may lack some, which then count as 1."""

SPLIT = MappingProxyType(
    {
        "data": ("data",),
        "heads": ("layer", "model"),
        "mlp": ("layer", "sequence", "model"),
        "vocab": ("layer", "sequence", "model"),
        "slots": ("sequence",),
    }
)
"""What the dimensions of a model's arrays may count -> the axes of the mesh that it is split over."""


def axis_of_other_bits(sizes: Mapping[str, int]) -> str | None:
    """The first axis that cuts passes into unlike parts: over it the same bits are not promised. None: they are."""
    return next((axis for axis in ("data", "sequence") if sizes.get(axis, 1) > 1), None)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model lie: split over some axes of a mesh, equal along the others."""

    mesh: Mesh
    over: tuple[str, ...]

    def axes(self, part: str | None) -> tuple[str, ...]:
        """The axes of the mesh that split `part`, one of SPLIT."""
        return tuple(axis for axis in SPLIT.get(part or "", ()) if axis in self.over and self.mesh.shape[axis] > 1)

    def parts(self, part: str) -> int:
        """Into how many."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(part))

    def sharding(self, shape: tuple[int, ...], *parts: str | None) -> NamedSharding:
        """Of an array whose last dimensions count `parts`: names in SPLIT, or None."""

        def one(size: int, part: str | None):
            fits = part is not None and size % self.parts(part) == 0
            return (self.axes(part) or None) if fits else None

        counted = (*[None] * (len(shape) - len(parts)), *parts)
        return NamedSharding(self.mesh, PartitionSpec(*(one(n, part) for n, part in zip(shape, counted, strict=True))))

    def place(self, x: Array, *parts: str | None) -> Array:
        """`x` with that sharding, inside of `jit`."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape, *parts))

    def sum(self, x: Array, part: str) -> Array:
        """x [B, T, D], whose terms lie where the mesh splits `part`, in full everywhere: the compiler adds them."""
        return self.place(x, "data", None, None)

    def params(self, params: PyTree) -> PyTree:
        """Shardings of parameters, or of their shapes."""

        def one(path, leaf):
            names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            return self.sharding(leaf.shape, *TABLE.get((names[-2], names[-1]) if len(names) > 1 else None, ()))

        return jax.tree_util.tree_map_with_path(one, params)

    def over_vocabulary(self, logits: Array) -> Array:
        """Logits [B, ..., V], or [V], where their rows and the head lie."""
        return self.place(logits, *("data", *[None] * (logits.ndim - 2), "vocab")[-logits.ndim :])

    def rows(self, x: Array) -> NamedSharding:
        """Sharding of an array [B, ...]."""
        return self.sharding(x.shape, "data", *[None] * (x.ndim - 1))

    def cache(self, held: kv.KVCache | kv.Pending) -> PyTree:
        """Shardings of a cache, or of what is pending: rows over "data", heads as in attention."""
        tokens = "slots" if isinstance(held, kv.KVCache) else None
        one = lambda keys: self.keys(keys, tokens)
        k, v = jax.tree.map(one, (held.k, held.v), is_leaf=lambda x: isinstance(x, Quantized))
        rest: Any = (None if x is None else self.rows(x) for x in held[2:])
        return type(held)(k, v, *rest)

    def keys(self, x: Array | Quantized, tokens: str | None) -> Any:
        """Sharding of keys or values [..., B, K, n, h]; `tokens`: what n counts, "slots" or None."""
        if isinstance(x, Quantized):
            scale: Any = self.sharding(x.scale.shape, "data", "heads", tokens)
            return Quantized(self.keys(x.values, tokens), scale)
        return self.sharding(x.shape, "data", "heads", tokens, None)

    def capacity(self, slots: int) -> int:
        """Slots of a cache for `slots` tokens; every part of one that is split has some more (`cache.commit`)."""
        parts = self.parts("slots")
        return slots if parts == 1 else parts * (-(-slots // (kv.SLOTS * parts)) + 1) * kv.SLOTS

    def commit(self, cache: kv.KVCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.KVCache:
        """`cache.commit`, each device its own part: left to itself, the compiler gathers what it cannot split."""
        args = cache, pending, path, num_nodes
        shardings = self.cache(cache), self.cache(pending), self.rows(path), self.rows(num_nodes)
        specs = jax.tree.map(lambda s: s.spec, shardings)
        axes = self.axes("slots")

        def local(cache, pending, path, num_nodes):
            if not axes:
                return kv.commit(cache, pending, path, num_nodes)
            one = jax.tree.leaves(cache.k, is_leaf=lambda x: isinstance(x, Quantized))[0]
            first = jax.lax.axis_index(axes) * kv.slots_of_part(one)
            return kv.commit(cache, pending, path, num_nodes, first)

        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*args)

    def by_heads(self, attend: Callable[..., Array]) -> Callable[..., Array]:
        """`tree_attention` with each device attending by its own heads, to its own slots; a kernel is opaque to the
        compiler.
        """
        slots = self.axes("slots")
        attend = over_slots(attend, slots, kv.slots_of_part) if slots else attend

        def split(q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions, layer, window, first=None):
            rows: tuple[Array, ...] = (length, positions, mask, key_positions)
            rows = rows if first is None else (*rows, first)
            shardings = (
                self.sharding(q.shape, "data", None, "heads", None),
                *(self.keys(x, None) for x in (k, v)),
                *(self.keys(x, "slots") for x in (prefix_k, prefix_v)),
                *map(self.rows, rows),
            )
            specs = jax.tree.map(lambda s: s.spec, shardings)

            def local(*parts):
                arrays, (key_positions, *more, layer, window) = parts[:8], parts[8:]
                seen = {"first": more[0]} if more else {}
                return attend(*arrays, key_positions=key_positions, layer=layer, window=window, **seen)

            scalars = tuple(None if x is None else jnp.asarray(x, jnp.int32) for x in (layer, window))
            everywhere = tuple(None if x is None else PartitionSpec() for x in scalars)
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(*specs, *everywhere), out_specs=specs[0], check_vma=False
            )(q, k, v, prefix_k, prefix_v, *rows, *scalars)

        return split


def spread(config: Any, mesh: Mesh, over: tuple[str, ...] | None = None) -> tuple[Any, Layout]:
    """The config of a model on a mesh, with as many key/value heads as that takes, and its layout.

    over: the axes that split it, besides "data"; None: all. Along the others every device has the same, so that a small
    draft model may be split less than its target.

    Raises: UsageError for a mesh with other axes, or one that does not divide the heads.
    """
    check_axes(mesh)
    missing = set(over or ()) - set(mesh.axis_names)
    if missing:
        raise UsageError(f"over names {', '.join(sorted(missing))}, but the mesh has {', '.join(mesh.axis_names)}")
    layout = Layout(mesh, mesh.axis_names if over is None else ("data", *over))
    parts = layout.parts("heads")
    check_heads(config, parts, layout.axes("heads"))
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies_of_kv_heads(config, parts)), layout


def check_axes(mesh: Mesh) -> None:
    """Raises: UsageError for a mesh with other axes than AXES, or without "data"."""
    if "data" not in mesh.axis_names or not set(mesh.axis_names) <= set(AXES):
        raise UsageError(
            f'the mesh has the axes {", ".join(mesh.axis_names)}; it needs "data" and may have '
            '"layer", "sequence" and "model"; make it with specjax.mesh'
        )


def check_heads(config: Any, parts: int, axes: tuple[str, ...]) -> None:
    """Raises: UsageError for `parts` of attention, along these axes, that do not divide its heads."""
    if not fits_heads(config, parts):
        counts = [n for n in range(1, max(parts, jax.device_count()) + 1) if fits_heads(config, n)]
        raise UsageError(
            f"the mesh splits attention into {parts} parts (axes {', '.join(axes)}), which does not "
            f"divide the {config.num_heads} query and {config.num_kv_heads} key/value heads of {config.name}; "
            f"choose {' or '.join(map(str, counts))}"
        )


def fits_heads(config: Any, parts: int) -> bool:
    """Whether attention can be split into so many parts, with key/value heads repeated where that helps."""
    return config.num_heads % parts == 0 and config.num_kv_heads * copies_of_kv_heads(config, parts) % parts == 0


def copies_of_kv_heads(config: Any, parts: int) -> int:
    """How often each key/value head is repeated over `parts` devices."""
    if config.num_heads % parts:
        return 1
    copies = parts // math.gcd(config.num_kv_heads, parts)
    return copies if (config.num_heads // config.num_kv_heads) % copies == 0 else 1


def counts_kv_heads(config: Any, part: str) -> bool:
    """Whether the rows of a layer's `part` are those of key/value heads."""
    return part in ("k", "v") or (part == "k_norm" and config.qk_norm_of == "projection")


def repeat_kv_heads(params: PyTree, config: Any, copies: int) -> PyTree:
    """Parameters of `config` with each key/value head `copies` times in a row."""
    if copies == 1:
        return params

    def one(path, leaf):
        names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)][-2:]
        if not counts_kv_heads(config, names[0]):
            return leaf
        is_matrix = names[0] != "k_norm" and names[1] == "weight"
        axis = leaf.ndim - (2 if is_matrix else 1)  # [.., K * h, D] and [.., K * h]
        heads = leaf.reshape(*leaf.shape[:axis], -1, config.head_dim, *leaf.shape[axis + 1 :])
        return jnp.repeat(heads, copies, axis).reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 1 :])

    return jax.tree_util.tree_map_with_path(one, params)
