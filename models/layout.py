"""How a model is spread over a mesh with the axes "data" (rows of the batch) and "model" (parts of the weights).

Megatron's split (Shoeybi et al. 2019, arXiv 1909.08053): attention by heads, the MLP by its inner width,
embedding and head by vocabulary; two sums over "model" per layer. What a mesh does not divide stays whole on every
device. Where there are fewer key/value heads than devices, each is repeated, so that every device owns the head that
its query heads read.
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

from specjax import cache as kv
from specjax.errors import UsageError
from specjax.quantization import Quantized
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


@dataclass(frozen=True)
class Layout:
    """Which parts of a model are split over the mesh axis "model"."""

    mesh: Mesh
    heads: bool
    mlp: bool
    vocab: bool

    def sharding(self, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
        """Of an array whose last dimensions count `axes`: "data", "heads", "mlp", "vocab" or None."""
        names = {
            "data": "data",
            **{part: "model" if getattr(self, part) else None for part in ("heads", "mlp", "vocab")},
        }
        spec = [None] * (len(shape) - len(axes)) + [names.get(axis) if axis else None for axis in axes]
        fits = (name and size % self.mesh.shape[name] == 0 for name, size in zip(spec, shape, strict=True))
        return NamedSharding(self.mesh, PartitionSpec(*(n if fit else None for n, fit in zip(spec, fits, strict=True))))

    def place(self, x: Array, *axes: str | None) -> Array:
        """`x` with that sharding, inside of `jit`."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape, *axes))

    def params(self, params: PyTree) -> PyTree:
        """Shardings of parameters, or of their shapes."""

        def one(path, leaf):
            names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            return self.sharding(leaf.shape, *TABLE.get((names[-2], names[-1]) if len(names) > 1 else None, ()))

        return jax.tree_util.tree_map_with_path(one, params)

    def cache(self, cache: PyTree) -> PyTree:
        """Shardings of a `KVCache`, a `Pending` or a part of one: rows over "data", heads as in attention."""

        def one(x) -> Any:
            if isinstance(x, Quantized):
                scale: Any = self.sharding(x.scale.shape, "data", "heads", None)
                return Quantized(one(x.values), scale)
            return self.sharding(x.shape, *(("data", "heads", None, None) if x.ndim > 2 else ("data", None)[: x.ndim]))

        return jax.tree.map(one, cache, is_leaf=lambda x: isinstance(x, Quantized))

    def commit(self, cache: kv.KVCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.KVCache:
        """`cache.commit`, each device its own part: left to itself, the compiler gathers what it cannot split."""
        args = cache, pending, path, num_nodes
        specs = tuple(jax.tree.map(lambda s: s.spec, self.cache(arg)) for arg in args)
        return jax.shard_map(kv.commit, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*args)

    def by_heads(self, attend: Callable[..., Array]) -> Callable[..., Array]:
        """`tree_attention` with each device attending by its own heads; a kernel is opaque to the compiler."""

        def split(q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions, layer, window):
            tokens = k, v, prefix_k, prefix_v
            rows = length, positions, mask, key_positions
            shardings = (
                self.sharding(q.shape, "data", None, "heads", None),
                *self.cache(tokens),
                *(self.sharding(x.shape, *("data", None, None)[: x.ndim]) for x in rows),
            )
            specs = jax.tree.map(lambda s: s.spec, shardings)

            def local(*parts):
                *arrays, key_positions, layer, window = parts
                return attend(*arrays, key_positions=key_positions, layer=layer, window=window)

            scalars = tuple(None if x is None else jnp.asarray(x, jnp.int32) for x in (layer, window))
            everywhere = tuple(None if x is None else PartitionSpec() for x in scalars)
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(*specs, *everywhere), out_specs=specs[0], check_vma=False
            )(q, *tokens, *rows, *scalars)

        return split


def spread(config: Any, mesh: Mesh) -> tuple[Any, Layout]:
    """The config of a model on a mesh, with as many key/value heads as that takes, and its layout.

    Raises: UsageError for a mesh without the axes "data" and "model".
    """
    if set(mesh.axis_names) != {"data", "model"}:
        raise UsageError(
            f'the mesh needs the axes "data" and "model", not {mesh.axis_names}; see specjax.parallel.mesh'
        )
    parts = mesh.shape["model"]
    kv_heads = config.num_kv_heads * copies_of_kv_heads(config, parts)
    heads = config.num_heads % parts == 0 and kv_heads % parts == 0
    layout = Layout(mesh, heads, config.mlp_width % parts == 0, config.vocab_size % parts == 0)
    return dataclasses.replace(config, num_kv_heads=kv_heads), layout


def copies_of_kv_heads(config: Any, parts: int) -> int:
    """How often each key/value head is repeated over `parts` devices."""
    if config.num_heads % parts:
        return 1
    copies = parts // math.gcd(config.num_kv_heads, parts)
    return copies if (config.num_heads // config.num_kv_heads) % copies == 0 else 1


def repeat_kv_heads(params: PyTree, head_dim: int, copies: int) -> PyTree:
    """Parameters with each key/value head `copies` times in a row."""
    if copies == 1:
        return params

    def one(path, leaf):
        names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)][-2:]
        if names[0] not in ("k", "v"):
            return leaf
        axis = leaf.ndim - (2 if names[1] == "weight" else 1)  # [.., K * h, D] and [.., K * h]
        heads = leaf.reshape(*leaf.shape[:axis], -1, head_dim, *leaf.shape[axis + 1 :])
        return jnp.repeat(heads, copies, axis).reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 1 :])

    return jax.tree_util.tree_map_with_path(one, params)
