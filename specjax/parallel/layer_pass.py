"""Pass over the layers of a layer-parallel model, as each device of the mesh runs it: the body of a `shard_map`.

`specjax.parallel.layer_parallel` describes the placement and the sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.models import cache as kv
from specjax.models.layers import AttentionSettings, LayerCache, LayerInputs, PassInputs, apply_mlps_in_order
from specjax.models.layout import PARAMETER_DIMENSIONS
from specjax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class LayerParallelSpecs:
    """`PartitionSpec`s of the arrays of a layer-parallel model."""

    config: Any
    mesh: Mesh

    @property
    def group(self) -> int:
        """Return G, the number of layers that run at the same time."""
        return self.mesh.shape["layer"]

    def axes(self, part: str) -> tuple[str, ...]:
        """Return the mesh axes that split a part: "data", "heads" or "mlp"."""
        names = {"data": ("data",), "heads": ("model",), "mlp": ("layer", "model")}[part]
        names = tuple(name for name in names if self.mesh.shape.get(name, 1) > 1)
        is_unsplit = part == "mlp" and self.config.mlp_width % math.prod(self.mesh.shape[name] for name in names)
        return () if is_unsplit else names

    def rows(self, batch: int) -> tuple[str, ...] | None:
        """Return the mesh axes that split `batch` rows, or None if the mesh does not divide them."""
        axes = self.axes("data")
        return axes if axes and batch % self.mesh.shape["data"] == 0 else None

    def layers(self, params: PyTree) -> PyTree:
        """Return the specs of the arranged layers, which may be shapes."""

        def leaf_spec(path, leaf):
            names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
            counted = PARAMETER_DIMENSIONS.get((names[-2], names[-1]), ())
            spec: list = [None] * (leaf.ndim - len(counted)) + [part and (self.axes(part) or None) for part in counted]
            if names[0] == "device":
                spec[1] = "layer"
            return P(*spec)

        return jax.tree_util.tree_map_with_path(leaf_spec, params)

    def kv(self, batch: int, num_segments: int) -> PyTree:
        """Return the specs of keys or values, cached or pending.

        They are {first, last: [B, K, ..], groups: [groups, G, B, K, ..] each}.
        """
        rows, heads = self.rows(batch), self.axes("heads") or None
        grouped = P(None, "layer", rows, heads)
        return {"first": P(rows, heads), "last": P(rows, heads), "groups": (grouped,) * num_segments}


@dataclasses.dataclass(frozen=True)
class _DeviceLayout:
    """The `Layout` of a pass on one device: its arrays are local, and only sums involve other devices."""

    sums: dict[str, Callable[[Array], Array]]

    def place(self, x: Array, *parts: str | None) -> Array:
        return x

    def shard_attention(self, attend: Callable[..., Array]) -> Callable[..., Array]:
        return attend

    def sum(self, x: Array, part: str) -> Array:
        return self.sums[part](x)


@dataclasses.dataclass(frozen=True)
class LayerParallelPass:
    """A pass over the layers on one device of the mesh."""

    block: Any  # graphdef
    parts: LayerParallelSpecs
    shared: PassInputs
    cache: kv.KVCache
    earlier: tuple  # (k, v) of earlier pending tokens, in the form of the cache
    settings: AttentionSettings

    def run(self, params: PyTree, x: Array, middle, group: int) -> tuple[Array, kv.Pending]:
        """Return the residual stream [layers + 1, B, T, D], and the pending tokens.

        Args: middle: `layer_segments` without the first and the last one.
        """
        run_group = self._run_in_parallel if group > 1 else self._run_in_sequence
        first, new_first = self._run_single(params["first"], x, "first", 0)
        stream, news = [x[None], first[None]], []
        x = first
        for segment, (start, size, count) in enumerate(middle):

            def body(x, xs, segment=segment, start=start, size=size):
                device_params, shared_params, earlier, i = xs
                # Pass the whole cache, not a slice, as in `layers.run_layers`. Here it is [groups, 1, B, K, S, h].
                k, v = (jax.tree.map(lambda leaf: leaf[:, 0], part["groups"][segment]) for part in self.cache[:2])
                layer_cache = LayerCache(k, v, i, jax.tree.map(lambda leaf: leaf[0], earlier))
                me = jax.lax.axis_index("layer")
                settings = self.settings.at_layer(start + i * size + jnp.minimum(me, size - 1))
                outputs, new = run_group(
                    jax.tree.map(lambda leaf: leaf[0], device_params), shared_params, x, layer_cache, settings
                )
                return outputs[-1], (jnp.stack(outputs), jax.tree.map(lambda leaf: leaf[None], new))

            earlier = tuple(part["groups"][segment] for part in self.earlier)
            xs = params["device"][segment], params["shared"][segment], earlier, jnp.arange(count)
            x, (outputs, new) = jax.lax.scan(body, x, xs)
            stream.append(outputs.reshape(-1, *x.shape))
            news.append(new)
        x, new_last = self._run_single(params["last"], x, "last", -1)
        k, v = (
            {"first": a, "last": b, "groups": tuple(c)} for a, b, *c in zip(new_first, new_last, *news, strict=True)
        )
        return jnp.concatenate([*stream, x[None]]), kv.Pending(k, v, self.shared.positions, kv.write_dependency(x))

    def _run_single(self, params: PyTree, x: Array, name: str, layer: int):
        """Run the first or the last layer."""
        layer_cache = LayerCache(
            self.cache.k[name], self.cache.v[name], earlier=tuple(part[name] for part in self.earlier)
        )
        block, shared = nnx.merge(self.block, nnx.State(params)), self._step(self._sum("heads"))
        y, new = block.attend(x, LayerInputs(shared, layer_cache, self.settings.at_layer(layer)))
        x = x + y
        return x + block.feed(x, shared), new

    def _run_in_parallel(
        self,
        device_params: PyTree,
        shared_params: PyTree,
        x: Array,
        layer_cache: LayerCache,
        settings: AttentionSettings,
    ):
        """Run a group of layers that all read x. Return the stream after each layer, and (k, v) of this device."""
        size = len(jax.tree.leaves(shared_params)[0])
        # The norm after the sum is applied to the outputs of all layers: [size, B, T, D].
        broadcast_params = {
            name: jax.tree.map(lambda leaf: leaf[:, None, None], part) if name.startswith("attention") else part
            for name, part in shared_params.items()
        }
        block, shared = (
            nnx.merge(self.block, nnx.State(device_params | broadcast_params)),
            self._step(lambda y: self._gather(y)[:size]),
        )
        attention_outputs, new = block.attend(x, LayerInputs(shared, layer_cache, settings))
        return apply_mlps_in_order(
            x, list(attention_outputs), lambda i, x: self._block(device_params, shared_params, i).feed(x, shared)
        ), new

    def _run_in_sequence(
        self,
        device_params: PyTree,
        shared_params: PyTree,
        x: Array,
        layer_cache: LayerCache,
        settings: AttentionSettings,
    ):
        """Run a group exactly: each layer reads the stream after the previous one. Return like `_run_in_parallel`."""
        me, size = jax.lax.axis_index("layer"), len(jax.tree.leaves(shared_params)[0])
        stream, new = [], None
        for i in range(size):
            share = lambda y, i=i: jax.lax.psum(jnp.where(me == i, y, 0), ("layer", *self.parts.axes("heads")))
            block, shared = self._block(device_params, shared_params, i), self._step(share)
            y, device_kv = block.attend(x, LayerInputs(shared, layer_cache, settings))
            new = device_kv if new is None else jax.tree.map(lambda a, b, i=i: jnp.where(me == i, a, b), device_kv, new)
            x = x + y
            x = x + block.feed(x, shared)
            stream.append(x)
        return stream, new

    def _block(self, device_params: PyTree, shared_params: PyTree, i: int):
        """Return the block with this device's attention and the MLP of the i-th layer of the group."""
        return nnx.merge(self.block, nnx.State(device_params | self._at(shared_params, i)))

    def _step(self, heads: Callable[[Array], Array]) -> PassInputs:
        within: Any = _DeviceLayout({"heads": heads, "mlp": self._sum("mlp")})
        return self.shared.replace(layout=within)

    def _sum(self, part: str) -> Callable[[Array], Array]:
        axes = self.parts.axes(part)
        return lambda y: jax.lax.psum(y, axes) if axes else y

    def _gather(self, y: Array) -> Array:
        """Gather [B, T, D] of each device along "layer", partial sums over its heads, to [G, B, T, D]."""
        if not self.parts.axes("heads"):
            return jax.lax.all_gather(y, "layer")
        mine = jax.lax.axis_index("layer") == jnp.arange(self.parts.group)
        return jax.lax.psum(jnp.where(mine[:, None, None, None], y, 0), ("layer", "model"))

    @staticmethod
    def _at(tree: PyTree, i) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), tree)
