"""Building blocks that the model families share: projections, norms, attention and layer loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.arrays import platforms, scopes
from specjax.arrays.texts import traced_mask
from specjax.models import cache as kv
from specjax.models.gear.attention import gear_attention
from specjax.models.gear.slots import GearSlots
from specjax.models.layout import Layout
from specjax.models.products import fill_tile, matmul, matmul_same_bits, pad_tokens, take_rows
from specjax.models.rotary import Rotation, rotate
from specjax.models.storage.joined import split_outputs
from specjax.models.storage.stacks import layer_state, merge_whole, slice_layer, whole_params
from specjax.numerics import reproducible_math
from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention import tree_attention
from specjax.types import Appended, Array, Mixture, PyTree, Stream, Sublayers


class Linear(nnx.Module):
    """A linear layer: x @ weight.T (+ bias)."""

    def __init__(
        self, fan_in: int, fan_out: int, *, bias: bool = False, same_bits: bool = False, dtype, rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (fan_out, fan_in), dtype) * fan_in**-0.5)
        self.bias = nnx.Param(jnp.zeros((fan_out,), dtype)) if bias else None
        self.product = matmul_same_bits if same_bits else matmul

    def __call__(self, x):
        y = self.product(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table of token vectors [V, D], which may also serve as the output head."""

    def __init__(self, vocab: int, width: int, *, same_bits: bool = False, dtype, rngs: nnx.Rngs):
        self.product = matmul_same_bits if same_bits else matmul
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (vocab, width), dtype) * width**-0.5)

    def __call__(self, tokens: Array | Mixture):
        table = self.weight[...]
        if not isinstance(tokens, Mixture):
            return take_rows(table, tokens)
        rows = take_rows(table, tokens.ids).astype(jnp.float32)  # [B, T, K, D]
        return jnp.sum(rows * tokens.weights[..., None], -2).astype(table.dtype)

    def logits(self, x):
        """Compute logits float32[..., V] of hidden states [..., D]."""
        return self.product(x, self.weight[...], jnp.float32)


def embed_inputs(embed: Callable[..., Array], tokens: Array | Mixture | Stream | Appended) -> Array:
    """Return the inputs [B, T, D] of the first layer: embedded tokens, and then any appended vectors."""
    if not isinstance(tokens, Appended):
        return embed(tokens)
    x = embed(tokens.tokens)
    return jnp.concatenate([x, tokens.vectors.astype(x.dtype)], 1)


class RMSNorm(nnx.Module):
    """Root-mean-square norm: x / rms(x) * weight, computed in float32.

    same_bits: use the reproducible form of `specjax.numerics.reproducible_math`.
    """

    def __init__(self, width: int, eps: float, *, dtype, same_bits: bool = False):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps
        self.same_bits = same_bits

    def __call__(self, x):
        y = x.astype(jnp.float32)
        if self.same_bits:
            y = reproducible_math.as_bfloat16(x) * reproducible_math.root_mean_square(x, self.eps)
        else:
            y = divide_by_rms(y, self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def divide_by_rms(y: Array, eps: float) -> Array:
    """Return y / sqrt(mean(y^2) + eps) along the last axis."""
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """Norm of the deviations from the mean: (x - mean) / std * weight + bias, computed in float32."""

    def __init__(self, width: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = divide_by_rms(y - jnp.mean(y, -1, keepdims=True), self.eps)
        return (y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class HeadLayerNorm(LayerNorm):
    """Layer norm of each head, whose weight and bias [heads * head_dim] differ from head to head."""

    def __call__(self, x: Array) -> Array:
        """Normalise queries or keys [B, T, H, h]."""
        y = x.astype(jnp.float32)
        y = divide_by_rms(y - jnp.mean(y, -1, keepdims=True), self.eps)
        by_head = lambda part: part[...].astype(jnp.float32).reshape(x.shape[-2:])
        return (y * by_head(self.weight) + by_head(self.bias)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """Gated feed-forward block: down(act(gate(x)) * up(x)).

    joined: store gate and up as one matrix, see `specjax.models.storage.joined`.
    """

    def __init__(
        self, width: int, hidden: int, act, *, joined: bool = False, same_bits: bool = False, dtype, rngs: nnx.Rngs
    ):
        linear = functools.partial(Linear, same_bits=same_bits, dtype=dtype, rngs=rngs)
        if joined:
            self.gate_up = linear(width, 2 * hidden)
        else:
            self.gate = linear(width, hidden)
            self.up = linear(width, hidden)
        self.down = linear(hidden, width)
        self.act = act
        self.joined = joined

    def __call__(self, x):
        if self.joined:
            gate, up = (y[..., 0] for y in split_outputs(self.gate_up(x), (1, 1)))
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down((self.act(gate) * up).astype(x.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassInputs:
    """Inputs that all layers of one forward pass share."""

    positions: Array  # int32[B, T]
    key_positions: Array  # int32[B, P + T], of the pending earlier tokens and the new ones
    mask: Array  # bool[B, T, P + T]
    length: Array  # int32[B], committed tokens
    earlier: kv.Pending | None  # P tokens that are pending
    first: Array | None = None  # int32[B], see `KVCache.first`
    layers: Sublayers | None = None  # the sublayers to run; None: all
    layout: Layout | None = field(default=None, metadata={"static": True})  # of a sharded model
    history: PyTree = None  # `PassHistory` of a mixture of experts; None: others
    rotary: Array | None = None  # int32[B, T], positions of the rotation; None: `positions`

    replace = replace

    def place(self, x: Array, *axes: str | None) -> Array:
        """Constrain `x` to the sharding of these axes; without a mesh, return it unchanged."""
        return x if self.layout is None else self.layout.place(x, *axes)

    def sum(self, x: Array, part: str) -> Array:
        """Sum x [B, T, D] over the devices that split `part`, so that each has the full result."""
        return x if self.layout is None else self.layout.sum(x, part)


def make_pass_inputs(
    positions: Array,
    mask: Array,
    cache: kv.KVCache,
    earlier: kv.Pending | None,
    layout: Layout | None,
    layers: Sublayers | None = None,
    history: PyTree = None,
) -> PassInputs:
    """Build the `PassInputs` from the arguments of `forward`."""
    keys = positions if earlier is None else jnp.concatenate([earlier.positions, positions], 1)
    return PassInputs(positions, keys, traced_mask(mask), cache.length, earlier, cache.first, layers, layout, history)


class LayerCache(NamedTuple):
    """Cached and pending keys and values that one layer attends to."""

    k: Any  # Array, Quantized or GearSlots [B, K, S, h], or of all layers with a leading layer axis
    v: Any
    layer: Array | None = None  # int32[], the layer if `k` and `v` have a layer axis
    earlier: tuple[Array | Quantized, ...] = ()  # pending (k, v) [B, K, P, h]

    @classmethod
    def of_layer(cls, cache: kv.KVCache, layer: int, earlier: tuple) -> LayerCache:
        """Return the cache of one of the separate layers of a model, with the pending (k, v) of all layers.

        The cache itself may have a layer axis, if a model with stacked layers wrote it.
        """
        pending = tuple(part[layer] for part in earlier)
        if kv.has_layer_axis(cache.k):
            return cls(cache.k, cache.v, jnp.int32(layer), pending)
        return cls(cache.k[layer], cache.v[layer], earlier=pending)


class AttentionSettings(NamedTuple):
    """Rotation and window of attention in one pass, for all layers alike or with a leading axis of kinds of layers."""

    rotation: Rotation | None  # None: attention does not depend on positions
    window: Array | int | None = None  # tokens that attention looks back; int32[kinds] if layers differ
    kind: np.ndarray | Array | None = None  # int32[layers], the kind of each layer; None: layers do not differ
    bias: Array | None = None  # float32[H, D], added to scores by the distance of a key; None: nothing

    def at_layer(self, layer: Array | int) -> AttentionSettings:
        """Return the settings of one layer."""
        if self.kind is None:
            return self
        if isinstance(layer, int) and isinstance(self.kind, np.ndarray):
            kind: Array | int = int(self.kind[layer])
        else:
            kind = at_layer(jnp.asarray(self.kind), layer)
        rotation, window, bias = at_layer((self.rotation, self.window, self.bias), kind)
        return AttentionSettings(rotation, window, bias=bias)


class LayerInputs(NamedTuple):
    """Inputs of one layer besides the residual stream."""

    shared: PassInputs
    cache: LayerCache
    settings: AttentionSettings
    runs: Sublayers | None = None  # bool[B] each, the sublayers that run; None: both
    keys: tuple | None = None  # new (k, v) of the layer whose cache a layer without keys of its own reads


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional biases and q/k norms."""

    def __init__(
        self, width, heads, kv_heads, head_dim, *, fan_in=None, bias=False, qk_norm_eps=None, norms_heads=True,
        scale=None, softcap=None, gated=False, same_bits=False, joined=False, queries_only=False,
        keys_are_values=False, value_norm=False, out_bias=False, key_bias=True, sinks=False,
        head_layer_norm_eps=None, dtype, rngs,
    ):  # fmt: skip
        """Create the projections and norms.

        Args:
          fan_in: input width, if it differs from the width of the stream.
          norms_heads: normalise queries and keys per head, with one weight for all heads; otherwise per projection.
          gated: multiply the output of each head by the sigmoid of a projection of the input.
          joined: store the projections as one matrix, see `specjax.models.storage.joined`.
          queries_only: have no keys and values; a pass reads `LayerInputs.keys` and the cache of another layer.
          keys_are_values: values are the projection of the keys, before its norm and rotation.
          value_norm: divide values by their root mean square per head; it has no weight.
          out_bias: the projection of the output has a bias.
          key_bias: with `bias`, keys have a bias too; joined projections need it.
          sinks: each head has one more score in its softmax, whose weight is dropped.
          head_layer_norm_eps: apply a `HeadLayerNorm` to queries and keys instead of `qk_norm_eps`.
        """
        fan_in = width if fan_in is None else fan_in
        linear = functools.partial(Linear, same_bits=same_bits, dtype=dtype, rngs=rngs)
        if joined:
            self.qkv = linear(fan_in, (heads + 2 * kv_heads) * head_dim, bias=bias)
        else:
            self.q = linear(fan_in, heads * head_dim, bias=bias)
            has_key_bias = bias and key_bias
            self.k: Any = None if queries_only else linear(fan_in, kv_heads * head_dim, bias=has_key_bias)
            self.v: Any = None if queries_only or keys_are_values else linear(fan_in, kv_heads * head_dim, bias=bias)
        self.output_gate = linear(fan_in, heads * head_dim) if gated else None
        self.o = linear(heads * head_dim, width, bias=out_bias)
        self.sinks = nnx.Param(jnp.zeros((heads,), dtype)) if sinks else None
        has_norm = qk_norm_eps is not None or head_layer_norm_eps is not None
        size = lambda heads: head_dim if norms_heads and head_layer_norm_eps is None else heads * head_dim
        norm: Callable[[int], Any] = functools.partial(RMSNorm, eps=qk_norm_eps, dtype=dtype, same_bits=same_bits)
        if head_layer_norm_eps is not None:
            norm = functools.partial(HeadLayerNorm, eps=head_layer_norm_eps, dtype=dtype)
        self.q_norm = norm(size(heads)) if has_norm else None
        self.k_norm = norm(size(kv_heads)) if has_norm and not queries_only else None
        self.value_eps = qk_norm_eps if value_norm else None
        self.norms_heads = norms_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.head_dim = head_dim
        self.same_bits = same_bits
        self.joined = joined
        self.group = heads // kv_heads  # query heads of each key/value head

    def __call__(self, x, inputs: LayerInputs):
        """Attend from x [B, T, D], which may have more tokens than the pass (`run_layers`).

        Returns: the output, like x, and (k, v) [B, K, T, h] of the pass's tokens in the form of the cache.
        """
        shared, layer_cache, settings = inputs.shared, inputs.cache, inputs.settings
        if inputs.keys is None:
            q, k, v = self._project(x, shared)
            new = self._to_cache(k, v, inputs)
        else:
            (q,), new = self._by_heads(shared, self.q(x)), inputs.keys
        q = self._rotate(self._normalize(self.q_norm, q), settings)
        join = lambda old, new: jnp.concatenate([old, new], 2)
        all_k, all_v = jax.tree.map(join, layer_cache.earlier, new) if layer_cache.earlier else new
        attend: Callable[..., Array] = functools.partial(tree_attention, scale=self.scale, softcap=self.softcap)
        if self.same_bits:
            attend = functools.partial(attend, implementation="by_slot")
        elif isinstance(layer_cache.k, GearSlots):
            attend = functools.partial(gear_attention, scale=self.scale, softcap=self.softcap)
        if shared.layout is not None:
            attend = shared.layout.shard_attention(attend)
        optional = {} if shared.first is None else {"first": shared.first}
        optional |= {} if self.sinks is None else {"sinks": self.sinks[...]}
        optional |= {} if settings.bias is None else {"bias": settings.bias}
        out = attend(
            kv.pad_head_dim(q, layer_cache.k), all_k, all_v, layer_cache.k, layer_cache.v, shared.length,
            shared.positions, shared.mask,
            key_positions=shared.key_positions, layer=layer_cache.layer, window=settings.window, **optional,
        )  # fmt: skip
        out = out[..., : self.head_dim].reshape(*out.shape[:2], -1)
        if self.output_gate is not None:
            out = out * jax.nn.sigmoid(self.output_gate(x)[:, : out.shape[1]])
        return shared.sum(self.o(pad_tokens(out, x.shape[1])), "heads"), new

    def queries(self, x, shared: PassInputs, settings: AttentionSettings) -> Array:
        """Compute only the queries [B, T, H, h] of `__call__`, rotated and scaled."""
        q = self._project(x, shared)[0] if self.joined else self._by_heads(shared, self.q(x))[0]
        return self._rotate(self._normalize(self.q_norm, q), settings) * self.scale

    def keys(self, x, inputs: LayerInputs):
        """Compute only the (k, v) [B, K, T, h] of `__call__`, for a skipped layer whose cache later tokens read."""
        if self.joined:
            _, k, v = self._project(x, inputs.shared)
        else:
            k, v = self._by_heads(inputs.shared, *self._keys_and_values(x))
        return self._to_cache(k, v, inputs)

    def _project(self, x: Array, shared: PassInputs) -> tuple[Array, ...]:
        """Compute queries [B, T, H, h], keys and values [B, T, K, h], before norms and rotation."""
        if not self.joined:
            return self._by_heads(shared, self.q(x), *self._keys_and_values(x))
        size = self.head_dim
        y = shared.place(isolated(self.qkv(x)), "data", None, "heads")[:, : shared.positions.shape[1]]
        parts = split_outputs(y, (self.group * size, size, size))
        return tuple(self._split_heads(shared, y.reshape(*y.shape[:2], -1)) for y in parts)

    def _keys_and_values(self, x: Array) -> tuple[Array, Array]:
        """Compute the projections [B, T, K h] of keys and values."""
        assert self.k is not None, "a layer that only has queries needs the keys of another one"
        keys = self.k(x)
        return keys, keys if self.v is None else self.v(x)

    def _by_heads(self, shared: PassInputs, *projected: Array) -> tuple[Array, ...]:
        """Split projections [B, T, H h] into heads [B, T, H, h]."""
        return tuple(self._split_heads(shared, y) for y in isolated(projected))

    def _split_heads(self, shared: PassInputs, y: Array) -> Array:
        """Split a projection of the pass's tokens, which may be followed by others."""
        y = y[:, : shared.positions.shape[1]]
        return shared.place(y.reshape(*y.shape[:2], -1, self.head_dim), "data", None, "heads", None)

    def _to_cache(self, k: Array, v: Array, inputs: LayerInputs):
        """Convert keys and values [B, T, K, h] to the form of the cache [B, K, T, h]."""
        k = self._rotate(self._normalize(self.k_norm, k), inputs.settings)
        v = v if self.value_eps is None else divide_by_rms(v.astype(jnp.float32), self.value_eps).astype(v.dtype)
        return kv.to_cache_dtype(k.swapaxes(1, 2), inputs.cache.k), kv.to_cache_dtype(v.swapaxes(1, 2), inputs.cache.v)

    def _normalize(self, norm: RMSNorm | None, x: Array) -> Array:
        """Normalise queries or keys [B, T, H, h] if the model has q/k norms."""
        if norm is None or self.norms_heads:
            return x if norm is None else norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def _rotate(self, x: Array, settings: AttentionSettings) -> Array:
        """Rotate queries or keys [B, T, H, h] by their positions, if the model does."""
        rotation = settings.rotation
        return x if rotation is None else rotate(x, rotation, self.same_bits)


def isolated(products: PyTree) -> PyTree:
    """Keep later operations out of the products of projections.

    To fuse them, the TPU compiler would first slice the weights out of their stack (Llama 3 8B on four v5e chips, 64
    tokens: 90,000 cycles per layer, and 46,000 isolated). On a GPU the rotation is fused into the sum of a product.
    """
    return products if platforms.of_program() == "gpu" else jax.lax.optimization_barrier(products)


def layer_segments(num_layers: int, group: int) -> list[tuple[int, int, int]]:
    """Return (first layer, layers per group, number of groups) of consecutive segments that cover all layers.

    The first and the last layer are the most sensitive and form groups of their own. The last middle group may be
    smaller.
    """
    if group == 1 or num_layers < 3:
        return [(0, 1, num_layers)]
    full, remainder = divmod(num_layers - 2, group)
    middle = [(1, group, full), (1 + full * group, remainder, 1)]
    return [(0, 1, 1), *((start, size, count) for start, size, count in middle if size * count), (num_layers - 1, 1, 1)]


def apply_mlps_in_order(x: Array, attention_outputs, feed) -> list[Array]:
    """Return the stream after each layer of a group whose attention all read the same input.

    Args:
      attention_outputs: [B, T, D] of each layer.
      feed: (i, stream) -> output of the i-th MLP. The MLPs run one after another.
    """
    stream = []
    for i, y in enumerate(attention_outputs):
        x = x + y
        x = x + feed(i, x)
        stream.append(x)
    return stream


def run_layers(
    layers, x: Array, shared: PassInputs, cache: kv.KVCache, settings: AttentionSettings, *, group: int = 1,
    taps: tuple[int, ...] | None = None,
) -> tuple[list | dict[int, Array] | Array, kv.Pending, PyTree]:  # fmt: skip
    """Run the layers in order, adding each layer's attention and MLP outputs to the residual stream.

    Each layer has `attend(x, LayerInputs) -> y, (k, v)` and `feed(x, shared) -> y`. Unstacked layers are unrolled and
    stacked ones are scanned. A scan compiles in constant time, but on CPU it copies each layer's weights out of the
    stack (SmolLM2, one token: 54 ms against 44 ms). A GPU copies them too. So only models on TPU have stacked layers.

    Args:
      layers: a list of modules, or one module whose parameters have a leading layer axis.
      x: [B, T, D].
      group: number of consecutive middle layers whose attention reads the same stream, the input of the group
        (EasySpec). It cannot be combined with `shared.layers`.
      taps: places in the residual stream that are read besides the last one. None: all.

    Returns: the residual stream [layers + 1, B, T, D], the pending keys and values, and `PassInputs.history` after the
      last layer, or None if `group` or `shared.layers` leave sublayers out of it. The stream of unrolled layers is a
      list. With `taps` that of scanned layers is a dict by place, so that other places take no memory.
    """
    scanned = functools.partial(_scanned, taps=taps)
    run: Callable[..., tuple] = _unrolled if isinstance(layers, nnx.List) else scanned
    stream, pending, history = with_full_tile(lambda x: run(layers, x, shared, cache, settings, group), x)
    return stream, pending, history if group == 1 and shared.layers is None else None


def with_full_tile(run: Callable[[Array], tuple], x: Array) -> tuple:
    """Return `run(x)`: the residual stream [B, T, D] around each layer of a pass, the pending entries, and any others.

    On a TPU the layers run with as many tokens of zeros behind those of x [B, T, D] as fill a tile. The pass then pads
    once, and not in each product.
    """
    if platforms.of_program() != "tpu":
        return run(x)
    stream, *entries = run(fill_tile(x))
    return jax.tree.map(lambda padded: padded[..., : x.shape[1], :], stream), *entries


class LayerWeights(NamedTuple):
    """Parameters of one layer, or of all layers if `layer` is set; `block` then slices that layer out."""

    graphdef: nnx.GraphDef
    state: PyTree
    layer: Array | int | None = None

    def block(self):
        return nnx.merge(self.graphdef, self.state if self.layer is None else layer_state(self.state, self.layer))


def at_layer(tree: PyTree, layer: Array | int, axis: int = 0) -> PyTree:
    """Slice one layer out of arrays whose axis `axis` counts layers."""
    return jax.tree.map(lambda leaf: slice_layer(leaf, layer, axis), tree)


def _unrolled(
    layers, x: Array, shared: PassInputs, cache: kv.KVCache, settings: AttentionSettings, group: int
) -> tuple[list, kv.Pending, PyTree]:
    earlier = keys_and_values(shared.earlier)

    # `jit` lets equal layers share one trace: 30 layers in five programs take 2.9 s of CPU time, not 10.3.
    @functools.partial(jax.jit, static_argnums=0)
    def run_layer(graphdef, state, x, inputs):
        return apply_layer_with_history(LayerWeights(graphdef, state), x, inputs)

    history = shared.history

    def inputs_of(i: int) -> LayerInputs:
        layer_cache = LayerCache.of_layer(cache, i, earlier)
        return LayerInputs(
            shared.replace(history=history), layer_cache, settings.at_layer(i), at_layer(shared.layers, i, axis=1)
        )

    stream, new = [x], []
    for start, size, count in layer_segments(len(layers), group):
        for first in range(start, start + size * count, size):
            if size == 1:
                x, pending, history = run_layer(*nnx.split(layers[first]), x, inputs_of(first))
                outputs, pending = [x], [pending]
            else:
                members = range(first, first + size)
                outputs, pending = _run_group([layers[i] for i in members], x, [inputs_of(i) for i in members])
            x = outputs[-1]
            stream += outputs
            new += pending
    k, v = zip(*new, strict=True)
    return stream, kv.Pending(k, v, shared.positions, kv.write_dependency(x)), history


def _scanned(
    layers, x: Array, shared: PassInputs, cache: kv.KVCache, settings: AttentionSettings, group: int,
    taps: tuple[int, ...] | None,
) -> tuple[dict[int, Array] | Array, kv.Pending, PyTree]:  # fmt: skip
    graphdef, state = nnx.split(layers)
    num_layers = len(cache.k)
    inner = sorted({tap for tap in taps or () if 0 < tap < num_layers})
    stores_taps = taps is not None and group == 1
    # Other layers write to the last place. A branch would copy the array.
    place = np.full(num_layers + 1, len(inner), np.int32)
    place[inner] = np.arange(len(inner))
    earlier = keys_and_values(shared.earlier)

    def inputs_of(layer: Array, history: PyTree) -> LayerInputs:
        # Pass the whole cache, not a slice of it. A slice that is a kernel's operand is copied out of the stack.
        layer_cache = LayerCache(cache.k, cache.v, layer, at_layer(earlier, layer))
        runs = at_layer(shared.layers, layer, axis=1)
        return LayerInputs(shared.replace(history=history), layer_cache, settings.at_layer(layer), runs)

    # The number of the first layer is carried. As an input of the scan it would be sliced out of an array.
    def body(size: int, carried: tuple[Array, Array, PyTree, Array | None], group_weights):
        x, first, history, tapped = carried
        if group_weights is not None:
            members = [LayerWeights(graphdef, merge_whole(group_weights, stacks, first))]
        else:
            members = [LayerWeights(graphdef, state, first + i) for i in range(size)]
        inputs = [inputs_of(first + i, history) for i in range(size)]
        if size == 1:
            x, new, history = apply_layer_with_history(members[0], x, inputs[0])
            if tapped is not None:
                tapped = jax.lax.dynamic_update_index_in_dim(tapped, x, jnp.asarray(place)[first + 1], 0)
            outputs = None if stores_taps else x[None]
            return (x, first + size, history, tapped), (outputs, jax.tree.map(lambda leaf: leaf[None], new))
        outputs, new = _run_group([weights.block() for weights in members], x, inputs)
        return (outputs[-1], first + size, history, tapped), (
            jnp.stack(outputs),
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *new),
        )

    # The scan slices the weights, except those of layers that may be skipped, and of groups.
    stacks = whole_params(state)
    sliced_state = state if group == 1 and shared.layers is None else None
    flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])  # [groups, layers of each, ..]
    embedded, stream, new, history = x, [x[None]], [], shared.history
    tapped = jnp.zeros((len(inner) + 1, *x.shape), x.dtype) if stores_taps and inner else None
    for start, size, count in layer_segments(num_layers, group):
        carried = x, jnp.int32(start), history, tapped
        (x, _, history, tapped), (outputs, pending) = jax.lax.scan(
            functools.partial(body, size), carried, sliced_state, length=count
        )
        stream += [] if outputs is None else [flat(outputs)]
        new.append(jax.tree.map(flat, pending))
    if stores_taps:
        k, v = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *new)
        by_place: dict[int, Array] = dict(zip(inner, () if tapped is None else tapped, strict=False))
        by_place |= {0: embedded, num_layers: x, -1: x}
        return by_place, kv.Pending(k, v, shared.positions, kv.write_dependency(x)), history
    # Take the last stream from the scan carry, so that the others are not stored if they are unused.
    stream[-1] = stream[-1][:-1]
    k, v = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *new)
    return jnp.concatenate([*stream, x[None]]), kv.Pending(k, v, shared.positions, kv.write_dependency(x)), history


def keys_and_values(earlier: kv.Pending | None) -> tuple:
    return () if earlier is None else (earlier.k, earlier.v)


def _run_group(blocks: list, x: Array, inputs: list[LayerInputs]) -> tuple[list[Array], list]:
    """Run layers whose attention reads the same stream. Return the stream after each layer, and their (k, v)."""
    attention_outputs, new = zip(
        *map(lambda block, layer_inputs: block.attend(x, layer_inputs), blocks, inputs), strict=True
    )
    return apply_mlps_in_order(x, attention_outputs, lambda i, x: blocks[i].feed(x, inputs[i].shared)), list(new)


def apply_layer(weights: LayerWeights, x: Array, inputs: LayerInputs):
    """Run one layer, or the sublayers of `inputs.runs`. Return the stream after it, and (k, v)."""
    return apply_layer_with_history(weights, x, inputs)[:2]


def apply_layer_with_history(weights: LayerWeights, x: Array, inputs: LayerInputs):
    """Run one layer like `apply_layer`. Return the stream after it, (k, v), and `PassInputs.history` after it."""
    history = inputs.shared.history
    if inputs.runs is None:
        block = weights.block()
        y, new = block.attend(x, inputs)
        x = x + y
        if history is None:
            return x + block.feed(x, inputs.shared), new, None
        y, history = block.feed_with_history(x, inputs.shared)
        return x + y, new, history
    of_row = lambda runs: runs[:, None]
    x, new = run_where(of_row(inputs.runs.attention), lambda x: weights.block().attend(x, inputs), x)
    x, _ = run_where(of_row(inputs.runs.mlp), lambda x: (weights.block().feed(x, inputs.shared), ()), x)
    return x, new, history


def run_where(tokens: Array, sublayer, x: Array, otherwise=None):
    """Add the output of `sublayer(x) -> y, new` to x for these tokens bool[B, T] or rows bool[B, 1].

    The sublayer only runs if any entry of `tokens` is true. Otherwise `new` is `otherwise(x)`, or zeros if that is
    None.

    Returns: the stream and `new`.
    """

    def run(x):
        y, new = sublayer(x)
        return jnp.where(tokens[..., None], x + y, x), new

    shapes = jax.eval_shape(run, x)[1]
    zeros = lambda x: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with jax.named_scope(scopes.SUBLAYER):
        return jax.lax.cond(jnp.any(tokens), run, lambda x: (x, (otherwise or zeros)(x)), x)
