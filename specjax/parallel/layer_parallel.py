"""Layer-parallel models: the attention of several layers at once, each layer on a device of its own.

Wu et al.: EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025), arXiv 2502.02493;
the drafter that uses them is `specjax.drafters.easyspec`.

Rule: of every group of G middle layers (G: the devices along the axis "layer") device i has the attention of layer i,
split over "model" by heads, and its keys and values. MLPs are split over "layer" and "model", embedding and head by
vocabulary over all axes but "data". The first and the last layer have their attention on every device of "layer".
Collectives of a group: a pass with `group=G` computes its G attentions at once and passes them round by one all-gather
(along "model" too: one sum), then each MLP is one sum: G + 1, where exact tensor parallelism needs 2 G. An exact pass
uses the same weights in sequence: G times, all devices run their layer on the stream of that moment, one of them counts,
a sum that is masked to it: 2 G.
Guarantee: the logits of the model on one device, rounding aside.
Deviations from the card: the first and last layer's MLP is split as all others; along "model" one sum of G slots in
place of a sum and a gather.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import cache as kv
from specjax.errors import UsageError
from specjax.models.bridge import abstract_module
from specjax.models.layers import Prefix, Step, segments, take_turns
from specjax.models.layout import AXES, TABLE, Layout, copies_of_kv_heads, fits_heads, repeat_kv_heads
from specjax.types import Array, Model, PyTree, Target

OWN = ("attention_norm", "attention")
"""The parts of a block that only the layer's own device has; what follows its attention, every device has a share of."""


def place(draft: Target, mesh: Mesh, group: int | None = None) -> Target:
    """`draft` with groups of `group` layers side by side along the axis "layer" of `mesh`: all the devices it has there.

    It is for a target that `specjax.shard` spreads over the same mesh, and works in any drafter; `easyspec` is the one
    that gains. Its `forward` takes `group=1`, exact, or that of the mesh.

    Raises: UsageError for a model that is not one of `specjax.models` or is sharded already, and for a mesh, a group
    and a model that do not fit each other.
    """
    config = draft.model.config
    if config is None or draft.model.mesh is not None:
        reason = "not one of specjax.models" if config is None else "sharded already"
        raise UsageError(f"{draft.model.name} cannot be made layer-parallel: it is {reason}")
    wide = _fit(config, mesh, group)
    model = _model(config, mesh)
    params = repeat_kv_heads(draft.params, config.head_dim, wide.num_kv_heads // config.num_kv_heads)
    arranged = functools.partial(_arrange, num_layers=config.num_layers, group=model.group, stacked=config.stacked)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), _Parts(wide, mesh).params(jax.eval_shape(arranged, params))
    )
    return Target(model, jax.jit(arranged, out_shardings=shardings)(params))


def _fit(config: Any, mesh: Mesh, group: int | None) -> Any:
    """The config with as many key/value heads as the axis "model" takes."""
    if "data" not in mesh.axis_names or not set(mesh.axis_names) <= set(AXES):
        raise UsageError(f"the mesh has the axes {', '.join(mesh.axis_names)}; make it with specjax.mesh")
    size, model = mesh.shape.get("layer", 1), mesh.shape.get("model", 1)
    if size < 2:
        raise UsageError('a layer-parallel model needs a mesh with 2 or more devices along "layer", or specjax.shard')
    if group is not None and group < 1:
        raise UsageError(f"group must be at least 1, not {group}")
    if group not in (None, size):
        raise UsageError(f'group is {group}, but the mesh has {size} devices along "layer"; make the two equal')
    if config.num_layers < size + 2:
        raise UsageError(
            f"{config.name} has {config.num_layers} layers, too few for groups of {size} between the first and the last; "
            'choose a mesh with fewer devices along "layer"'
        )
    if not fits_heads(config, model):
        raise UsageError(
            f"the mesh splits attention into {model} parts (axis model), which does not divide the {config.num_heads} "
            f"query and {config.num_kv_heads} key/value heads of {config.name}"
        )
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies_of_kv_heads(config, model))


def _arrange(params: PyTree, num_layers: int, group: int, stacked: bool) -> PyTree:
    """Parameters with their layers as {first, last, own, rest}.

    own, rest: per segment of groups, the parts that only the layer's device has [groups, G, ..], with zeros for the
    layers that a smaller group lacks, and the others [groups, layers of each, ..].
    """
    layers = params["layers"]
    take = lambda i: jax.tree.map(lambda leaf: leaf[i], layers) if stacked else layers[i]
    own, rest = [], []
    for start, size, count in segments(num_layers, group)[1:-1]:
        numbers = range(start, start + size * count)
        stack = jax.tree.map(
            lambda *leaves, count=count, size=size: jnp.stack(leaves).reshape(count, size, *leaves[0].shape),
            *map(take, numbers),
        )
        lacking = group - size
        fill = lambda leaf, n=lacking: jnp.pad(leaf, ((0, 0), (0, n), *[(0, 0)] * (leaf.ndim - 2)))
        own.append({name: jax.tree.map(fill, part) for name, part in stack.items() if name in OWN})
        rest.append({name: part for name, part in stack.items() if name not in OWN})
    arranged = {"first": take(0), "last": take(num_layers - 1), "own": tuple(own), "rest": tuple(rest)}
    return params | {"layers": arranged}


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Which axes of the mesh split what, as `PartitionSpec`s."""

    config: Any
    mesh: Mesh

    def axes(self, part: str) -> tuple[str, ...]:
        """Those that split "data", "heads" or "mlp"."""
        names = {"data": ("data",), "heads": ("model",), "mlp": ("layer", "model")}[part]
        names = tuple(name for name in names if self.mesh.shape.get(name, 1) > 1)
        whole = part == "mlp" and self.config.mlp_width % math.prod(self.mesh.shape[name] for name in names)
        return () if whole else names

    def rows(self, batch: int) -> tuple[str, ...] | None:
        """The axes of a dimension of so many rows."""
        axes = self.axes("data")
        return axes if axes and batch % self.mesh.shape["data"] == 0 else None

    def layers(self, params: PyTree) -> PyTree:
        """Of the arranged layers, or of their shapes."""

        def one(path, leaf):
            names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
            counted = TABLE.get((names[-2], names[-1]), ())
            spec = [None] * (leaf.ndim - len(counted)) + [part and (self.axes(part) or None) for part in counted]
            if names[0] == "own":
                spec[1] = "layer"
            return P(*spec)

        return jax.tree_util.tree_map_with_path(one, params)

    def params(self, params: PyTree) -> PyTree:
        """Of all of a model's arranged parameters."""
        layout = Layout(self.mesh, self.mesh.axis_names)
        others = layout.params({name: part for name, part in params.items() if name != "layers"})
        return jax.tree.map(lambda s: s.spec, others) | {"layers": self.layers(params["layers"])}

    def kv(self, batch: int, num_segments: int) -> PyTree:
        """Of keys or values, in the cache or pending: {first, last: [B, K, ..], groups: [groups, G, B, K, ..] each}."""
        rows, heads = self.rows(batch), self.axes("heads") or None
        grouped = P(None, "layer", rows, heads)
        return {"first": P(rows, heads), "last": P(rows, heads), "groups": (grouped,) * num_segments}


@dataclasses.dataclass(frozen=True)
class _Within:
    """The `Layout` of a pass over what one device has: all places are its own, only sums reach others."""

    sums: dict[str, Callable[[Array], Array]]

    def place(self, x: Array, *parts: str | None) -> Array:
        return x

    def by_heads(self, attend: Callable[..., Array]) -> Callable[..., Array]:
        return attend

    def sum(self, x: Array, part: str) -> Array:
        return self.sums[part](x)


@functools.cache
def _model(config: Any, mesh: Mesh) -> Model:
    """The `Model` of parameters from `_arrange`."""
    wide = _fit(config, mesh, None)
    group = mesh.shape["layer"]
    parts, layout = _Parts(wide, mesh), Layout(mesh, mesh.axis_names)
    middle = segments(config.num_layers, group)[1:-1]
    # All but the layers, which are not those of the module.
    outside, _ = nnx.split(abstract_module(dataclasses.replace(wide, num_layers=0, stacked=False)))
    block, _ = nnx.split(abstract_module(dataclasses.replace(wide, num_layers=1, stacked=False)).layers[0])

    def specs_of_cache(batch: int) -> kv.KVCache:
        keys = parts.kv(batch, len(middle))
        return kv.KVCache(keys, keys, P(parts.rows(batch)))

    def specs_of_pending(batch: int) -> kv.Pending:
        keys = parts.kv(batch, len(middle))
        return kv.Pending(keys, keys, P(parts.rows(batch)), P(parts.rows(batch)))

    def init_cache(batch: int, capacity: int) -> kv.KVCache:
        one = kv.init(batch, capacity, 1, wide.num_kv_heads, wide.head_dim, wide.cache_dtype or wide.dtype, False).k[0]
        zeros = lambda *leading: jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), one)
        keys = lambda: {
            "first": zeros(),
            "last": zeros(),
            "groups": tuple(zeros(count, group) for _, _, count in middle),
        }
        cache = kv.KVCache(keys(), keys(), jnp.zeros((batch,), jnp.int32))
        specs = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec), part), specs_of_cache(batch), cache
        )
        return jax.lax.with_sharding_constraint(cache, specs)

    def commit(cache, pending, path, num_nodes):
        batch = path.shape[0]
        rows, of_cache = P(parts.rows(batch)), specs_of_cache(batch)
        return jax.shard_map(
            kv.commit, mesh=mesh, in_specs=(of_cache, specs_of_pending(batch), rows, rows), out_specs=of_cache,
            check_vma=False,
        )(cache, pending, path, num_nodes)  # fmt: skip

    def run_layers(at_once: int, params, _, x, step: Step, cache, per_layer, attend, feed):
        """`layers.run_layers` on the arranged layers."""
        batch = x.shape[0]
        rows, of_cache, of_pending = P(parts.rows(batch)), specs_of_cache(batch), specs_of_pending(batch)
        earlier = () if step.earlier is None else (step.earlier.k, step.earlier.v)
        bare = step._replace(earlier=None, layout=None)
        of_step = jax.tree.map(lambda _: rows, bare)

        def local(params, x, step, cache, earlier, per_layer):
            pass_ = _Pass(block, group, parts, step, cache, earlier, per_layer, attend, feed)
            return pass_.run(params, x, middle, at_once, config.num_layers)

        stream, pending = jax.shard_map(
            local, mesh=mesh,
            in_specs=(parts.layers(params), rows, of_step, of_cache, (of_pending.k,) * len(earlier), P()),
            out_specs=(P(None, *rows), of_pending), check_vma=False,
        )(params, x, bare, cache, earlier, per_layer)  # fmt: skip
        return stream, pending

    def module_of(params):
        return nnx.merge(outside, nnx.State({name: part for name, part in params.items() if name != "layers"}))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None, layers=None, group=1):
        if layers is not None:
            raise UsageError(f"{config.name} is layer-parallel and cannot skip layers; use specjax.shard for it")
        if group not in (1, mesh.shape["layer"]):
            raise UsageError(f"{config.name} takes groups of 1 or {mesh.shape['layer']} layers, not {group}")
        return module_of(params)(
            tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier, layout=layout,
            run_layers=functools.partial(run_layers, group, params["layers"]),
        )  # fmt: skip

    def head(params, stream):
        module = module_of(params)
        return module.predict(module.norm(stream), layout)

    return Model(
        init_cache, forward, commit, config.vocab_size, config.max_positions, config.name, config, mesh,
        config.num_layers, head, group,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass over the layers, as one device of the mesh sees it."""

    block: Any  # graphdef
    group: int  # G
    parts: _Parts
    step: Step
    cache: kv.KVCache
    earlier: tuple  # (k, v), like the cache's
    per_layer: PyTree
    attend: Callable
    feed: Callable

    def run(self, params: PyTree, x: Array, middle, at_once: int, num_layers: int) -> tuple[Array, kv.Pending]:
        """The residual stream [layers + 1, B, T, D], and what is pending."""
        run_group = self._attend_at_once if at_once > 1 else self._attend_in_turn
        first, new_first = self._alone(params["first"], x, "first", 0)
        stream, news = [x[None], first[None]], []
        x = first
        for segment, (start, size, count) in enumerate(middle):

            def body(x, xs, segment=segment, start=start, size=size):
                own, rest, earlier, i = xs
                # The whole cache, not a slice of it, as in `layers.run_layers`; here [groups, 1, B, K, S, h].
                k, v = (jax.tree.map(lambda leaf: leaf[:, 0], part["groups"][segment]) for part in self.cache[:2])
                prefix = Prefix(k, v, i, jax.tree.map(lambda leaf: leaf[0], earlier))
                me = jax.lax.axis_index("layer")
                slice_ = self._at(self.per_layer, start + i * size + jnp.minimum(me, size - 1))
                outputs, new = run_group(jax.tree.map(lambda leaf: leaf[0], own), rest, x, prefix, slice_)
                return outputs[-1], (jnp.stack(outputs), jax.tree.map(lambda leaf: leaf[None], new))

            earlier = tuple(part["groups"][segment] for part in self.earlier)
            xs = params["own"][segment], params["rest"][segment], earlier, jnp.arange(count)
            x, (outputs, new) = jax.lax.scan(body, x, xs)
            stream.append(outputs.reshape(-1, *x.shape))
            news.append(new)
        x, new_last = self._alone(params["last"], x, "last", num_layers - 1)
        k, v = (
            {"first": a, "last": b, "groups": tuple(c)}
            for a, b, *c in zip(new_first, new_last, *news, strict=True)
        )
        return jnp.concatenate([*stream, x[None]]), kv.Pending(k, v, self.step.positions, kv.after(x))

    def _alone(self, params: PyTree, x: Array, name: str, layer: int):
        """The first or the last layer."""
        prefix = Prefix(self.cache.k[name], self.cache.v[name], earlier=tuple(part[name] for part in self.earlier))
        block, step = nnx.merge(self.block, nnx.State(params)), self._step(self._sum("heads"))
        y, new = self.attend(block, x, step, prefix, self._at(self.per_layer, layer))
        x = x + y
        return x + self.feed(block, x, step), new

    def _attend_at_once(self, own: PyTree, rest: PyTree, x: Array, prefix: Prefix, slice_: PyTree):
        """A group of which every device's layer reads x: the stream after each layer, and the own layer's (k, v)."""
        size = len(jax.tree.leaves(rest)[0])
        # Norms behind the sum are those of all layers, since it brings what all of them add: [size, B, T, D].
        behind = {
            name: jax.tree.map(lambda leaf: leaf[:, None, None], part) if name.startswith("attention") else part
            for name, part in rest.items()
        }
        attended, new = self.attend(
            nnx.merge(self.block, nnx.State(own | behind)), x, self._step(lambda y: self._gather(y)[:size]), prefix, slice_
        )
        return self._feed_in_turn(own, rest, x, attended), new

    def _attend_in_turn(self, own: PyTree, rest: PyTree, x: Array, prefix: Prefix, slice_: PyTree):
        """The same, exact: layer i reads the stream after layer i - 1."""
        me, size, new = jax.lax.axis_index("layer"), len(jax.tree.leaves(rest)[0]), None
        outputs = []
        for i in range(size):
            mine = lambda y, i=i: jax.lax.psum(jnp.where(me == i, y, 0), ("layer", *self.parts.axes("heads")))
            block, step = self._block(own, rest, i), self._step(mine)
            y, found = self.attend(block, x, step, prefix, slice_)
            new = found if new is None else jax.tree.map(lambda a, b, i=i: jnp.where(me == i, a, b), found, new)
            x = x + y
            x = x + self.feed(block, x, step)
            outputs.append(x)
        return outputs, new

    def _feed_in_turn(self, own: PyTree, rest: PyTree, x: Array, attended: Array) -> list[Array]:
        step = self._step(self._sum("heads"))
        return take_turns(x, list(attended), lambda i, x: self.feed(self._block(own, rest, i), x, step))

    def _block(self, own: PyTree, rest: PyTree, i: int):
        """This device's attention with the MLP of the i-th layer of the group."""
        return nnx.merge(self.block, nnx.State(own | self._at(rest, i)))

    def _step(self, heads: Callable[[Array], Array]) -> Step:
        return self.step._replace(layout=_Within({"heads": heads, "mlp": self._sum("mlp")}))

    def _sum(self, part: str) -> Callable[[Array], Array]:
        axes = self.parts.axes(part)
        return lambda y: jax.lax.psum(y, axes) if axes else y

    def _gather(self, y: Array) -> Array:
        """[B, T, D] of each device along "layer", its heads' part -> [G, B, T, D]."""
        if not self.parts.axes("heads"):
            return jax.lax.all_gather(y, "layer")
        mine = jax.lax.axis_index("layer") == jnp.arange(self.group)
        return jax.lax.psum(jnp.where(mine[:, None, None, None], y, 0), ("layer", "model"))

    @staticmethod
    def _at(tree: PyTree, i) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), tree)
