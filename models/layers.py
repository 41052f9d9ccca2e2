"""The blocks that the model families share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays import scopes
from specjax.models import cache as kv
from specjax.models.layout import Layout
from specjax.models.matmul import project, rows_of, same_project
from specjax.numerics import reproducible_math
from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention import tree_attention
from specjax.types import Appended, Array, Mixture, PyTree, Stream, Sublayers


class Linear(nnx.Module):
    """x @ weight.T (+ bias)."""

    def __init__(
        self, fan_in: int, fan_out: int, *, bias: bool = False, same_bits: bool = False, dtype, rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (fan_out, fan_in), dtype) * fan_in**-0.5)
        self.bias = nnx.Param(jnp.zeros((fan_out,), dtype)) if bias else None
        self.product = same_project if same_bits else project

    def __call__(self, x):
        y = self.product(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table of token vectors, which may also serve as the head."""

    def __init__(self, vocab: int, width: int, *, same_bits: bool = False, dtype, rngs: nnx.Rngs):
        self.product = same_project if same_bits else project
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (vocab, width), dtype) * width**-0.5)

    def __call__(self, tokens: Array | Mixture):
        table = self.weight[...]
        if not isinstance(tokens, Mixture):
            return rows_of(table, tokens)
        rows = rows_of(table, tokens.ids).astype(jnp.float32)  # [B, T, K, D]
        return jnp.sum(rows * tokens.weights[..., None], -2).astype(table.dtype)

    def logits(self, x):
        """float32[..., V]."""
        return self.product(x, self.weight[...], jnp.float32)


def with_vectors(embedded: Callable[..., Array], tokens: Array | Mixture | Stream | Appended) -> Array:
    """[B, T, D]: what the first layer reads, by what it reads of tokens."""
    if not isinstance(tokens, Appended):
        return embedded(tokens)
    x = embedded(tokens.tokens)
    return jnp.concatenate([x, tokens.vectors.astype(x.dtype)], 1)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, computed in float32. same_bits: as `specjax.numerics.reproducible_math` has it."""

    def __init__(self, width: int, eps: float, *, dtype, same_bits: bool = False):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps
        self.same_bits = same_bits

    def __call__(self, x):
        y = x.astype(jnp.float32)
        if self.same_bits:
            y = reproducible_math.as_bfloat16(x) * reproducible_math.root_mean_square(x, self.eps)
        else:
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, act, *, same_bits: bool = False, dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, same_bits=same_bits, dtype=dtype, rngs=rngs)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)
        self.act = act

    def __call__(self, x):
        return self.down((self.act(self.gate(x)) * self.up(x)).astype(x.dtype))


class RopeScaling(NamedTuple):
    """How rotary frequencies are stretched. `kind`: "linear" (factor only), "llama3", "yarn" or "longrope"."""

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192
    amplitude: float = 1.0  # of rotated queries and of keys (yarn, longrope)
    whole: bool = True  # yarn: between whole dimensions
    short: tuple[float, ...] = ()  # longrope: what each frequency is divided by, of models of short texts
    long: tuple[float, ...] = ()  # and of those of texts longer than `original_positions`


def rope_frequencies(
    dim: int, base: float, scaling: RopeScaling | None = None, max_positions: int | None = None
) -> Array:
    """float32[dim / 2]: radians per position.

    LongRoPE (Ding et al. 2024, arXiv 2402.13753) has two sets of divisors. The longest text that the model takes,
    `max_positions`, says which one holds (None: the long one), and not the text at hand: its keys are kept rotated, so
    one that grew beyond `original_positions` would have to be read again, and the company of a long text would change
    the others. transformers takes the short set for texts, or batches, up to `original_positions`.
    """
    freq = 1.0 / base ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return freq
    if scaling.kind == "longrope":
        is_short = max_positions is not None and max_positions <= scaling.original_positions
        return freq / jnp.array(scaling.short if is_short else scaling.long, jnp.float32)
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "yarn":
        return freq * _kept_by_yarn(dim, base, scaling)
    # Llama 3: long waves are stretched, short ones kept, those between blended.
    waves = scaling.original_positions * freq / (2 * jnp.pi)  # full turns within the original context
    keep = jnp.clip((waves - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / scaling.factor)


def _kept_by_yarn(dim: int, base: float, scaling: RopeScaling) -> Array:
    """float32[dim / 2]: what is left of each frequency; blended by dimension, where Llama 3 blends by full turns.

    Peng, Quesnelle, Fan, Shippole: YaRN: Efficient Context Window Extension of Large Language Models (2023), arXiv
    2309.00071.
    """
    turns = lambda count: dim * math.log(scaling.original_positions / (count * 2 * math.pi)) / (2 * math.log(base))
    first, last = turns(scaling.high), turns(scaling.low)
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = jnp.clip((jnp.arange(dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)
    return 1 - stretched + stretched / scaling.factor


def rope(
    x: Array, positions: Array, frequencies: Array, same_bits: bool = False, amplitude: Array | float | None = None
) -> Array:
    """Rotate the halves of x [B, T, H, h] by its positions int32[B, T]. same_bits: products of bfloat16 are exact.

    Args:
      frequencies: float32[r / 2]; the first r of the h numbers are rotated, the others are left as they are.
      amplitude: what is rotated is multiplied by it.
    """
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies  # [B, T, 1, r/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if amplitude is not None:
        cos, sin = amplitude * cos, amplitude * sin
    if same_bits:
        cos, sin = reproducible_math.exact_factor(cos), reproducible_math.exact_factor(sin)
    half = frequencies.shape[-1]
    y = reproducible_math.as_bfloat16(x) if same_bits else x.astype(jnp.float32)
    a, b, rest = jnp.split(y, (half, 2 * half), -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What every layer of one forward pass shares."""

    positions: Array  # int32[B, T]
    key_positions: Array  # int32[B, P + T], of the earlier tokens and these
    mask: Array  # bool[B, T, P + T]
    length: Array  # int32[B]
    earlier: kv.Pending | None
    first: Array | None = None  # int32[B], as `KVCache.first`
    layers: Sublayers | None = None  # those to run; None: all
    layout: Layout | None = field(default=None, metadata={"static": True})  # of a model that is spread over a mesh

    replace = replace

    def place(self, x: Array, *axes: str | None) -> Array:
        """`x`, laid out over the mesh by these axes of it; as it is without a mesh."""
        return x if self.layout is None else self.layout.place(x, *axes)

    def sum(self, x: Array, part: str) -> Array:
        """x [B, T, D], whose terms lie where the mesh splits `part`, in full on each of these devices."""
        return x if self.layout is None else self.layout.sum(x, part)


def make_step(
    positions: Array,
    mask: Array,
    cache: kv.KVCache,
    earlier: kv.Pending | None,
    layout: Layout | None,
    layers: Sublayers | None = None,
) -> Step:
    """From the arguments of `forward`."""
    keys = positions if earlier is None else jnp.concatenate([earlier.positions, positions], 1)
    return Step(positions, keys, mask, cache.length, earlier, cache.first, layers, layout)


class Prefix(NamedTuple):
    """What one layer knows of the tokens before: its cache, and what is pending still."""

    k: Array | Quantized  # [B, K, S, h], or those of all layers
    v: Array | Quantized
    layer: Array | None = None  # int32[], which of them
    earlier: tuple[Array | Quantized, ...] = ()  # (k, v) [B, K, P, h]


class Reach(NamedTuple):
    """How attention counts positions, and how far back it sees: of all layers alike, or with a leading layer axis."""

    frequencies: Array  # float32[r / 2], or [layers, r / 2]
    window: Array | int | None = None  # int32[layers] where layers differ
    amplitude: Array | float | None = None  # of rotated queries and keys; float32[layers] where layers differ

    def of(self, layer: Array | int) -> Reach:
        """That of one layer."""
        return self if self.frequencies.ndim == 1 else at_layer(self, layer)


class LayerInputs(NamedTuple):
    """What one layer reads besides the stream."""

    step: Step
    prefix: Prefix
    reach: Reach
    runs: Sublayers | None = None  # bool[B] each, what of the layer runs; None: all


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional biases and q/k norms."""

    def __init__(
        self, width, heads, kv_heads, head_dim, *, fan_in=None, bias=False, qk_norm_eps=None, norms_heads=True,
        scale=None, softcap=None, same_bits=False, dtype, rngs,
    ):  # fmt: skip
        """norms_heads: q/k norms are of each head, with one weight for all; else of a whole projection."""
        fan_in = width if fan_in is None else fan_in  # of what it reads, where that is not as wide as the stream
        linear = functools.partial(Linear, same_bits=same_bits, dtype=dtype, rngs=rngs)
        self.q = linear(fan_in, heads * head_dim, bias=bias)
        self.k = linear(fan_in, kv_heads * head_dim, bias=bias)
        self.v = linear(fan_in, kv_heads * head_dim, bias=bias)
        self.o = linear(heads * head_dim, width)
        has_norm = qk_norm_eps is not None
        size = lambda heads: head_dim if norms_heads else heads * head_dim
        norm = lambda heads: RMSNorm(size(heads), qk_norm_eps, dtype=dtype, same_bits=same_bits)
        self.q_norm = norm(heads) if has_norm else None
        self.k_norm = norm(kv_heads) if has_norm else None
        self.norms_heads = norms_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.head_dim = head_dim
        self.same_bits = same_bits

    def __call__(self, x, inputs: LayerInputs):
        """x [B, T, D] -> [B, T, D], (k, v) [B, K, T, h] of the new tokens, as the cache keeps them."""
        step, prefix, reach = inputs.step, inputs.prefix, inputs.reach
        q, k, v = self._by_heads(step, self.q(x), self.k(x), self.v(x))
        q = self._rotated(self._normed(self.q_norm, q), inputs)
        new = self._kept(k, v, inputs)
        join = lambda old, new: jnp.concatenate([old, new], 2)
        all_k, all_v = jax.tree.map(join, prefix.earlier, new) if prefix.earlier else new
        attend: Callable[..., Array] = functools.partial(
            tree_attention, scale=self.scale, softcap=self.softcap,
            implementation="by_slot" if self.same_bits else None,
        )  # fmt: skip
        if step.layout is not None:
            attend = step.layout.by_heads(attend)
        seen = {} if step.first is None else {"first": step.first}
        out = attend(
            kv.fill_lanes(q, prefix.k), all_k, all_v, prefix.k, prefix.v, step.length, step.positions, step.mask,
            key_positions=step.key_positions, layer=prefix.layer, window=reach.window, **seen,
        )  # fmt: skip
        out = out[..., : self.head_dim].reshape(*x.shape[:2], -1)
        return step.sum(self.o(out), "heads"), new

    def keys(self, x, inputs: LayerInputs):
        """(k, v) [B, K, T, h] alone of what `__call__` gives: where a layer is skipped that later tokens read."""
        k, v = self._by_heads(inputs.step, self.k(x), self.v(x))
        return self._kept(k, v, inputs)

    def _by_heads(self, step: Step, *projected: Array) -> tuple[Array, ...]:
        """[B, T, H, h] each."""
        heads = lambda y: step.place(y.reshape(*y.shape[:2], -1, self.head_dim), "data", None, "heads", None)
        # The barrier keeps what follows out of the products, for which the TPU compiler would cut the weights out of
        # their stack first (Llama 3 8B over four v5e chips, 64 tokens: 90,000 cycles per layer against 46,000).
        return tuple(map(heads, jax.lax.optimization_barrier(projected)))

    def _kept(self, k: Array, v: Array, inputs: LayerInputs):
        """Keys and values by heads [B, T, K, h], as the cache keeps them."""
        k = self._rotated(self._normed(self.k_norm, k), inputs)
        return kv.as_kept(k.swapaxes(1, 2), inputs.prefix.k), kv.as_kept(v.swapaxes(1, 2), inputs.prefix.v)

    def _normed(self, norm: RMSNorm | None, x: Array) -> Array:
        """Queries or keys [B, T, H, h]."""
        if norm is None or self.norms_heads:
            return x if norm is None else norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def _rotated(self, x: Array, inputs: LayerInputs) -> Array:
        """Likewise."""
        reach = inputs.reach
        return rope(x, inputs.step.positions, reach.frequencies, self.same_bits, reach.amplitude)


def make_layers(block, num_layers: int, stacked: bool, rngs: nnx.Rngs):
    """`num_layers` blocks: a list, or one block whose parameters have a leading axis."""
    if stacked:
        return nnx.vmap(block, in_axes=0, out_axes=0)(rngs.split(num_layers))
    return nnx.List([block(rngs) for _ in range(num_layers)])


def segments(num_layers: int, group: int) -> list[tuple[int, int, int]]:
    """(first layer, layers per group, groups): in order, all layers of a model.

    The first and the last layer, the most sensitive, are alone; a last group of those between may be smaller.
    """
    if group == 1 or num_layers < 3:
        return [(0, 1, num_layers)]
    full, rest = divmod(num_layers - 2, group)
    middle = [(1, group, full), (1 + full * group, rest, 1)]
    return [(0, 1, 1), *((start, size, count) for start, size, count in middle if size * count), (num_layers - 1, 1, 1)]


def take_turns(x: Array, attended, feed) -> list[Array]:
    """The stream after each layer of a group, of whose input all of them have read the attention.

    attended: [B, T, D] each, what attention adds; feed: (i, stream) -> what the i-th MLP adds: one after another.
    """
    stream = []
    for i, y in enumerate(attended):
        x = x + y
        x = x + feed(i, x)
        stream.append(x)
    return stream


def run_layers(
    layers, x: Array, step: Step, cache: kv.KVCache, reach: Reach, *, group: int = 1
) -> tuple[list | Array, kv.Pending]:
    """Add what each layer's `attend(x, LayerInputs) -> y, (k, v)` and `feed(x, step) -> y` give to the stream, in turn.

    Unstacked layers are unrolled; stacked ones are scanned, which compiles in constant time but copies each layer's
    weights out of the stack on CPU (SmolLM2, one token: 54 ms against 44 ms), so CPU keeps them apart.

    Args:
      layers: from `make_layers`. x: [B, T, D].
      group: consecutive layers, of those in the middle, whose attention reads one stream, that before the group
        (EasySpec). Not together with `step.layers`.

    Returns: the residual stream [layers + 1, B, T, D] (a list if unrolled), and the pending keys and values.
    """
    run = _unrolled if isinstance(layers, nnx.List) else _scanned
    return run(layers, x, step, cache, reach, group)


class Weights(NamedTuple):
    """The parameters of a layer, or of all of them, of which `layer` is cut out where it is needed."""

    graphdef: nnx.GraphDef
    state: PyTree
    layer: Array | None = None

    def block(self):
        return nnx.merge(self.graphdef, self.state if self.layer is None else at_layer(self.state, self.layer))


def at_layer(tree: PyTree, layer: Array | int, axis: int = 0) -> PyTree:
    """One layer of arrays that count layers along `axis`."""

    def cut(leaf):
        if isinstance(layer, int):
            return jax.lax.index_in_dim(leaf, layer, axis, keepdims=False)
        return jax.lax.dynamic_index_in_dim(leaf, layer, axis, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(cut, tree)


def _unrolled(layers, x: Array, step: Step, cache: kv.KVCache, reach: Reach, group: int) -> tuple[list, kv.Pending]:
    earlier = keys_and_values(step.earlier)

    # Under `jit` so that equal layers share one trace: 30 layers in five programs take 2.9 s of CPU time, not 10.3.
    @functools.partial(jax.jit, static_argnums=0)
    def run_layer(graphdef, state, x, inputs):
        return one_layer(Weights(graphdef, state), x, inputs)

    def inputs_of(i: int) -> LayerInputs:
        prefix = Prefix(cache.k[i], cache.v[i], earlier=tuple(part[i] for part in earlier))
        return LayerInputs(step, prefix, reach.of(i), at_layer(step.layers, i, axis=1))

    stream, new = [x], []
    for start, size, count in segments(len(layers), group):
        for first in range(start, start + size * count, size):
            if size == 1:
                x, pending = run_layer(*nnx.split(layers[first]), x, inputs_of(first))
                outputs, pending = [x], [pending]
            else:
                members = range(first, first + size)
                outputs, pending = _run_group([layers[i] for i in members], x, [inputs_of(i) for i in members])
            x = outputs[-1]
            stream += outputs
            new += pending
    k, v = zip(*new, strict=True)
    return stream, kv.Pending(k, v, step.positions, kv.after(x))


def _scanned(layers, x: Array, step: Step, cache: kv.KVCache, reach: Reach, group: int) -> tuple[Array, kv.Pending]:
    graphdef, state = nnx.split(layers)
    earlier = keys_and_values(step.earlier)

    def inputs_of(layer: Array) -> LayerInputs:
        # The whole cache, not a slice of it: a kernel's operand would be copied out of the stack.
        prefix = Prefix(cache.k, cache.v, layer, at_layer(earlier, layer))
        return LayerInputs(step, prefix, reach.of(layer), at_layer(step.layers, layer, axis=1))

    def body(size: int, x: Array, xs):
        first, own = xs
        if own is not None:
            members = [Weights(graphdef, own)]
        else:
            members = [Weights(graphdef, state, first + i) for i in range(size)]
        inputs = [inputs_of(first + i) for i in range(size)]
        if size == 1:
            x, new = one_layer(members[0], x, inputs[0])
            return x, (x[None], jax.tree.map(lambda leaf: leaf[None], new))
        outputs, new = _run_group([weights.block() for weights in members], x, inputs)
        return outputs[-1], (jnp.stack(outputs), jax.tree.map(lambda *leaves: jnp.stack(leaves), *new))

    # The scan cuts out the weights, except of what may be skipped, and of groups.
    cut = state if group == 1 and step.layers is None else None
    flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])  # [groups, layers of each, ..]
    stream, new = [x[None]], []
    for start, size, count in segments(len(cache.k), group):
        numbers = start + size * jnp.arange(count)
        x, (outputs, pending) = jax.lax.scan(functools.partial(body, size), x, (numbers, cut))
        stream.append(flat(outputs))
        new.append(jax.tree.map(flat, pending))
    # The last from what the scan carries: where nobody reads the others, they are not kept.
    stream[-1] = stream[-1][:-1]
    k, v = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *new)
    return jnp.concatenate([*stream, x[None]]), kv.Pending(k, v, step.positions, kv.after(x))


def keys_and_values(earlier: kv.Pending | None) -> tuple:
    return () if earlier is None else (earlier.k, earlier.v)


def _run_group(blocks: list, x: Array, inputs: list[LayerInputs]) -> tuple[list[Array], list]:
    """Layers whose attention reads one stream: the stream after each, and their (k, v)."""
    attended, new = zip(*map(lambda block, own: block.attend(x, own), blocks, inputs), strict=True)
    return take_turns(x, attended, lambda i, x: blocks[i].feed(x, inputs[i].step)), list(new)


def one_layer(weights: Weights, x: Array, inputs: LayerInputs):
    """One layer, or what `inputs.runs` says of it: the stream after it, and (k, v)."""
    if inputs.runs is None:
        block = weights.block()
        y, new = block.attend(x, inputs)
        x = x + y
        return x + block.feed(x, inputs.step), new
    of_row = lambda runs: runs[:, None]
    x, new = run_if(of_row(inputs.runs.attention), lambda x: weights.block().attend(x, inputs), x)
    x, _ = run_if(of_row(inputs.runs.mlp), lambda x: (weights.block().feed(x, inputs.step), ()), x)
    return x, new


def run_if(tokens: Array, sublayer, x: Array, left=None):
    """x with what `sublayer(x) -> y, new` adds to these tokens bool[B, T] or rows bool[B, 1], and `new`.

    It runs if there are any; else `new` is `left(x)`, None: zeros.
    """

    def run(x):
        y, new = sublayer(x)
        return jnp.where(tokens[..., None], x + y, x), new

    shapes = jax.eval_shape(run, x)[1]
    zeros = lambda x: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with jax.named_scope(scopes.SUBLAYER):
        return jax.lax.cond(jnp.any(tokens), run, lambda x: (x, (left or zeros)(x)), x)
