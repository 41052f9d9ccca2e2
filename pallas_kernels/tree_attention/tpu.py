"""Tree attention for TPU in one Mosaic kernel: flash decoding over the cached prefix, and the tree under its mask.

One program runs per batch row. It holds the query rows of all kv heads, with the query heads of one kv head packed
together. It folds in the new tokens first, then streams the row's prefix from HBM block by block, all kv heads of a
block in one copy. The copy of the next block, or of the next row's first block, overlaps the arithmetic. So the time
grows with each row's length (and window), never with the capacity, and the prefix is read once for any number of nodes.
The mask among the new tokens is packed into bits, 32 per word. Empty slots may contain anything, NaN included.

Quantised keys and values are read as int8. Their scales, [heads, slots], are copied separately, in lanes like the
scores and the weights, which they multiply. No dequantised block is stored.

A bias by distance is a table per head in lanes, and each score gathers its entry. Blocks that are further from all
queries than the table add its last entry.

In latent attention the values are the first numbers of the keys (`value_size`). Then a block is copied once, and both
products read the same buffer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.arrays import platforms
from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention.reference import NEG, finish, group_queries, ungroup_queries
from specjax.pallas_kernels.tuning import tuned_sizes

LANES = 128
ANY_DISTANCE = 1 << 30
MAX_DIM = 256
MAX_SHARED_DIM = 640  # of keys that contain their values: 576 numbers of DeepSeek-V2 and V3 in whole tiles
MAX_ROWS = 1024  # query rows per kv head of one call; the scores of a block are [rows, block] float32
MAX_TOKENS = 512  # new tokens of several calls: each of them holds the keys and values of all


def unsupported_reason(q, k, prefix_k, value_size=None, bias=None) -> str | None:
    """Return the reason why the kernel does not support these arguments, or None."""
    dim, rows = q.shape[-1], q.shape[1] * (q.shape[2] // k.shape[1])
    slots = prefix_k.shape[-2]
    cache_dtype = jnp.int8 if isinstance(prefix_k, Quantized) else q.dtype
    if q.dtype not in (jnp.float32, jnp.bfloat16) or k.dtype != cache_dtype or prefix_k.dtype != cache_dtype:
        return (
            f"dtypes {q.dtype}, {k.dtype}, {prefix_k.dtype}; it takes float32 or bfloat16, all equal, or these with "
            "quantised keys and values"
        )
    if bias is not None and bias.shape[1] < 2:
        return "a bias of one distance; it takes two or more"
    if bias is not None and q.shape[2] != k.shape[1]:
        return f"a bias by distance with {q.shape[2]} query heads and {k.shape[1]} kv heads; it takes equal numbers"
    if value_size is not None and (value_size % LANES or not 0 < value_size <= dim):
        return f"values of {value_size} numbers in keys of {dim}; it takes multiples of {LANES} that are no larger"
    largest = MAX_DIM if value_size is None else MAX_SHARED_DIM
    if dim % 64 or dim > largest:
        return f"head_dim {dim}; it takes " + (
            "64, 128, 192 and 256" if value_size is None else f"multiples of 64 up to {largest}"
        )
    if slots % LANES:
        return f"a cache of {slots} slots; it takes multiples of {LANES}"
    if rows > MAX_ROWS and k.shape[2] > MAX_TOKENS:
        return (
            f"{rows} query rows per kv head with {k.shape[2]} new tokens; more than {MAX_ROWS} need up to {MAX_TOKENS}"
        )
    return None


def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, value_size=None, bias=None, block=None, interpret=False,
):  # fmt: skip
    """Compute `reference.tree_attention` with the kernel.

    More than MAX_ROWS queries are computed in several calls, each of which reads the prefix.

    Args:
      block: slots per copy, a multiple of 128. None: from tuned.json, halved until two blocks of keys and two of values
        fit into its `buffer_bytes`, or `chunk_buffer_bytes` for many rows. Keys that contain their values need half.
      interpret: True or `pltpu.InterpretParams`, to run on CPU.

    Raises: NotImplementedError for the reason that `unsupported_reason` returns.
    """
    reason = unsupported_reason(q, k, prefix_k, value_size, bias)
    if reason:
        raise NotImplementedError(f"the TPU tree_attention does not support {reason}")
    key_positions = positions if key_positions is None else key_positions
    arrays = 2 if value_size is None else 1
    attend = lambda q, positions, mask: _attend(
        q, (k, v)[:arrays], (prefix_k, prefix_v)[:arrays], length, positions, mask, key_positions, layer, scale, window,
        softcap, with_total, value_size, bias, block, interpret,
    )  # fmt: skip
    groups, t = q.shape[2] // k.shape[1], q.shape[1]
    if groups * t <= MAX_ROWS:
        return attend(q, positions, mask)
    size = max(1, _part_rows(k.shape[1]) // groups)
    parts = [attend(*(x[:, start : start + size] for x in (q, positions, mask))) for start in range(0, t, size)]
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)


def _attend(
    q, new, prefix, length, positions, mask, key_positions, layer, scale, window, softcap, with_total, value_size,
    bias, block, interpret,
):  # fmt: skip
    """Compute the attention of at most MAX_ROWS queries per kv head in one call of the kernel.

    new, prefix: keys and values, or only keys if they contain the values.
    """
    batch, t, heads, dim = q.shape
    k = new[0]
    kv_heads, slots = k.shape[1], prefix[0].shape[-2]
    groups, value_dim = heads // kv_heads, value_size or dim
    if layer is None:
        layer = 0
        prefix = jax.tree.map(lambda x: x[None], prefix)
    itemsize = k.dtype.itemsize
    block = min(slots, block or _block(kv_heads, dim, itemsize, slots, len(new), groups * t))

    pad_rows, pad_keys = -(groups * t) % (32 // q.dtype.itemsize), -k.shape[2] % (32 // itemsize)
    rows = groups * t + pad_rows
    grouped = group_queries(q, kv_heads) * jnp.asarray(scale, q.dtype)  # [B, K, G*T, h], row g * T + t
    # Rows of padding repeat the first ones, which is one operation; zeros would be a second one in each layer.
    by_row = lambda x: jnp.tile(x, (1, -(-rows // t), 1))[:, :rows]
    words = by_row(pack_bits(mask))  # int32[B, R, W]
    places: tuple[jax.Array, ...] = ()  # positions of rows and keys, which only a window and a bias need
    if window is not None or bias is not None:
        places = by_row(positions[:, :, None]), jnp.pad(key_positions, ((0, 0), (0, pad_keys)))[:, None]
    table = () if bias is None else _table_of(bias)

    per_row = jnp.stack([length, jnp.min(positions, 1)]).astype(jnp.int32)
    scalar = lambda x: jnp.asarray(x, jnp.int32).reshape(1)
    full_block = lambda *shape: pl.BlockSpec((None, *shape), lambda b, *_: (b, *([0] * len(shape))))
    full_blocks = lambda tree: jax.tree.map(lambda x: full_block(*x.shape[1:]), tree)
    two_blocks = lambda x: pltpu.VMEM((2, kv_heads, block, *x.shape[4:]), x.dtype)
    # The kernel pads. Outside of it, each padding is an operation of its own in every layer.
    tile_of = lambda padding: lambda x: pltpu.VMEM((x.shape[1], x.shape[2] + padding, *x.shape[3:]), x.dtype)
    result_rows = batch, kv_heads, groups * t  # without padding
    results = [jax.ShapeDtypeStruct((*result_rows, value_dim), jnp.float32 if with_total else q.dtype)]
    if with_total:
        results += [jax.ShapeDtypeStruct((*result_rows, 1), jnp.float32)] * 2
    outputs = pl.pallas_call(
        functools.partial(
            _kernel,
            block=block,
            slots=slots,
            has_window=window is not None,
            softcap=softcap,
            value_size=value_size,
            furthest=0 if bias is None else bias.shape[1] - 1,
        ),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch,),
            in_specs=[
                *full_blocks((grouped, new, words, places)),
                jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda b, *_: (0, 0, 0)), table),
                jax.tree.map(lambda x: pl.BlockSpec(memory_space=pl.ANY), prefix),
            ],
            out_specs=full_blocks(results),
            scratch_shapes=[
                tile_of(pad_rows)(grouped) if pad_rows else (),
                jax.tree.map(tile_of(pad_keys), new) if pad_keys else (),
                jax.tree.map(two_blocks, prefix),
                pltpu.VMEM((kv_heads, rows, value_dim), jnp.float32),
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((len(jax.tree.leaves(prefix)), 2)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=64 << 20),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * kv_heads * rows * slots * (dim + value_dim),
            bytes_accessed=sum(x.nbytes // len(x) for x in jax.tree.leaves(prefix)),
            transcendentals=batch * kv_heads * rows * slots,
        ),
        interpret=interpret,
        name="tree_attention",
    )(
        per_row,
        scalar(layer),
        scalar(ANY_DISTANCE if window is None else window),
        grouped,
        new,
        words,
        places,
        table,
        prefix,
    )
    if not with_total:
        return ungroup_queries(outputs[0], t)
    out, top, total = outputs
    return finish(out, top, total, t, q.dtype, True)


def _table_of(bias):
    """Return a bias float[H, D] as float32 [H, 1, n] in whole tiles, and its last entries [H, 1, 1]."""
    table = bias.astype(jnp.float32)
    padding = -(table.shape[1] - 1) % LANES
    return jnp.pad(table[:, :-1], ((0, 0), (0, padding)), mode="edge")[:, None], table[:, None, -1:]


def _part_rows(kv_heads: int) -> int:
    """Return the query rows per kv head of a call, if the queries need several.

    v4 has 16 MiB of on-chip memory. With 8 kv heads of 128 and 512 new tokens, 512 rows need 19 MiB there.
    """
    sizes = tuned_sizes("tree_attention", platforms.kind_of_device())
    return min(sizes["part_rows"], sizes["rows_of_all_heads"] // kv_heads)


def _block(kv_heads: int, dim: int, itemsize: int, slots: int, arrays: int = 2, rows: int = 1) -> int:
    """Return the slots per copy.

    rows: query rows per kv head. Many rows, as in chunks of a prompt, have larger blocks on chips with room for them.

    Larger blocks take fewer cycles per slot, but a row reads on average half a block too much. On v5e, 2 kv heads of
    128, the compiler schedules these cycles per slot in blocks of 256, 512 and 1024. One node: 1.50, 1.01 and 0.82;
    1.97, 1.15 and 0.83 with int8. 64 nodes: 6.6, 4.0 and 2.8; 7.5, 4.4 and 2.9 with int8. A copy takes 1.9 cycles, or
    0.97 with int8. 512 rows and 8 kv heads take 17.0 bundles per slot on v6e in blocks of 1,024, and 13.7 in blocks of
    2,048.
    """
    sizes = tuned_sizes("tree_attention", platforms.kind_of_device())
    is_chunk = rows >= sizes["chunk_rows"]
    size = sizes["block"] if slots < sizes["long"] else sizes["chunk_block" if is_chunk else "long_block"]
    room = sizes["chunk_buffer_bytes" if is_chunk else "buffer_bytes"]
    while size > LANES and 2 * arrays * kv_heads * size * max(dim, LANES) * itemsize > room:
        size //= 2
    return size


def pack_bits(mask):
    """Pack bool[B, T, M] -> int32[B, T, ceil(M / 32)]: bit m % 32 of word m // 32."""
    batch, t, m = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -m % 32))).reshape(batch, t, -1, 32)
    words = jnp.sum(bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), -1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _kernel(
    per_row, layer, window, q, new, words, places, table, prefix, out, *refs, block, slots, has_window, softcap,
    value_size, furthest,
):  # fmt: skip
    """Process one batch row.

    q and out [K, G T, h]; words [R, W] of the rows of full tiles; new keys and values [K, M, h]; prefix in HBM; buffers
    of two blocks. With `value_size` there are only keys, and out is [K, G T, value_size]. Quantised keys and values
    include their scales. `places` has the positions of these rows [R, 1] and of the keys of full tiles [1, n] for a
    window or a bias. `table` has the bias of distances below `furthest` [K, 1, n], and of others [K, 1, 1]. `refs` has
    the softmax's maxima and sums [K, G T, 1] first, if they are results.
    """
    *totals, full_q, full_new, buffers, acc, top, total, copied, arrived = refs
    row, num_rows = pl.program_id(0), pl.num_programs(0)
    kv_heads = q.shape[0]
    q, new = _fill_tiles(q, full_q), _fill_tiles(new, full_new)
    layer, window = layer[0], window[0]
    length = per_row[0, row]

    def blocks(row):
        """Return [first, last) of a row: at least one block, so that the copies of all rows form one chain."""
        last = jnp.maximum((per_row[0, row] + block - 1) // block, 1)
        return jnp.clip((per_row[1, row] - window + 1) // block, 0, last - 1), last

    first, last = blocks(row)

    def start_of(i):
        """Return the first slot of block i. The last block may overlap the previous one."""
        return pl.multiple_of(jnp.minimum(i * block, slots - block), LANES)

    def copies(row, i, slot):
        source_index = (layer, row, slice(None), pl.ds(start_of(i), block))
        pairs = zip(jax.tree.leaves(prefix), jax.tree.leaves(buffers), strict=True)
        return [
            pltpu.make_async_copy(source.at[source_index], buffer.at[slot], arrived.at[n, slot])
            for n, (source, buffer) in enumerate(pairs)
        ]

    def fetch(row, i, slot):
        for copy in copies(row, i, slot):
            copy.start()

    @pl.when(row == 0)
    def first_of_all():
        copied[0] = 0
        fetch(row, first, 0)

    def in_window(positions):
        """Return bool[R, n]: the keys at `positions` that lie within the window of each query row."""
        return positions > places[0][...] - window

    def load(x, *index):
        """Return the keys or values [n, h] of a head for a product, and their scales [1, n] or None."""
        if not isinstance(x, Quantized):
            return x[index], None
        *first, head = index
        return x.values[index].astype(q.dtype), x.scale[*first, pl.ds(head, 1)]

    def load_both(arrays, *index):
        """Return the keys and the values of a head as from `load`."""
        keys = load(arrays[0], *index)
        return keys, load(arrays[1], *index) if value_size is None else (keys[0][:, :value_size], keys[1])

    def bias_at(head, positions):
        """Return the bias float32[R, n] of the keys at `positions` int32[1, n]."""
        distance = jnp.clip(places[0][...] - positions, 0, furthest)
        tiles = []
        for first in range(0, distance.shape[1], LANES):
            part = distance[:, first : first + LANES]
            added = jnp.broadcast_to(table[1][head], part.shape)
            for low in range(0, table[0].shape[2], LANES):
                entries = jnp.broadcast_to(table[0][head, :, low : low + LANES], (part.shape[0], LANES))
                at = jnp.clip(part - low, 0, LANES - 1)
                near = jnp.take_along_axis(entries, at, 1, mode="promise_in_bounds")
                added = jnp.where((part >= low) & (part < min(low + LANES, furthest)), near, added)
            tiles.append(added)
        return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, 1)

    def add_keys(head, keys, values, visible, bias=None):
        """Add keys and values [n, h], from `load`, where visible bool[R, n], by an online softmax."""
        # Mosaic has no other precision for bfloat16, and the program's own is for float32.
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        (keys, key_scales), (values, value_scales) = keys, values
        s = jax.lax.dot_general(
            q[head], keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        s = s if key_scales is None else s * key_scales
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        s = s if bias is None else s + bias
        s = jnp.where(visible, s, NEG)
        new_top = jnp.maximum(top[head], jnp.max(s, -1, keepdims=True))
        weights, fade = jnp.exp(s - new_top), jnp.exp(top[head] - new_top)
        total[head] = total[head] * fade + jnp.sum(weights, -1, keepdims=True)
        weights = weights if value_scales is None else weights * value_scales
        acc[head] = acc[head] * fade + jax.lax.dot_general(
            weights.astype(values.dtype), values, (((1,), (0,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        top[head] = new_top

    # New tokens first: each attends to itself, so the maximum is finite before a block that may be fully masked.
    visible_new = unpack_bits(words[...], new[0].shape[1])
    if has_window:
        visible_new &= in_window(places[1][...])
    bias_of_new = lambda head: None
    if furthest:
        new_at = places[1][...]
        count = new_at.shape[1]
        lanes = -(-count // LANES) * LANES if count > LANES else LANES
        padded = jnp.concatenate([new_at, jnp.zeros((1, lanes - count), jnp.int32)], 1) if lanes > count else new_at
        bias_of_new = lambda head: bias_at(head, padded)[:, :count]
    acc[...] = jnp.zeros_like(acc)
    total[...] = jnp.zeros_like(total)
    top[...] = jnp.full_like(top, NEG)
    for head in range(kv_heads):
        keys, values = load_both(new, head)
        add_keys(head, keys, values, visible_new, bias_of_new(head))

    def body(i, _, is_near=True):
        slot = copied[0] % 2
        copied[0] += 1

        @pl.when(i + 1 < last)
        def next_block():
            fetch(row, i + 1, 1 - slot)

        @pl.when((i + 1 == last) & (row + 1 < num_rows))
        def next_row():
            fetch(row + 1, blocks(row + 1)[0], 1 - slot)

        for copy in copies(row, i, slot):
            copy.wait()
        start = start_of(i)
        position = start + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        visible = (position < length) & (position >= i * block)
        visible = visible & in_window(position) if has_window else jnp.broadcast_to(visible, (q.shape[1], block))
        # A weight of zero does not remove a NaN, neither in values nor in scales.
        is_text = start + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < length
        for head in range(kv_heads):
            keys, (values, scales) = load_both(buffers, slot, head)
            if scales is None:
                values = jnp.where(is_text, values, jnp.zeros_like(values))
            else:
                scales = jnp.where(position < length, scales, 0.0)
            bias = None
            if furthest:
                bias = bias_at(head, position) if is_near else table[1][head]
            add_keys(head, keys, (values, scales), visible, bias)
        return 0

    near = first
    if furthest:  # the first block with a key that is nearer to a query than the end of the table
        near = jnp.clip((per_row[1, row] - furthest + 1) // block, first, last)
        jax.lax.fori_loop(first, near, functools.partial(body, is_near=False), 0)
    jax.lax.fori_loop(near, last, body, 0)
    count = out.shape[1]
    for head in range(kv_heads):
        out[head] = (acc[head] / total[head])[:count].astype(out.dtype)
    for result, value in zip(totals, (top, total), strict=False):  # neither or both
        result[...] = value[:, :count]


def _fill_tiles(refs, tiles):
    """Copy arrays [K, n, ..] to their tiles of more than n rows, and return these. Without tiles, return the arrays."""
    if isinstance(tiles, tuple) and not tiles:
        return refs

    def fill(ref, tile):
        tile[...] = jnp.zeros_like(tile)
        tile[:, : ref.shape[1]] = ref[...]

    jax.tree.map(fill, refs, tiles)
    return tiles


def unpack_bits(words, count: int):
    """Unpack int32[R, W] -> bool[R, count]. Each tile of lanes reads the four words of its own keys."""
    tiles = []
    for first in range(0, count, LANES):
        shape = words.shape[0], min(LANES, count - first)
        key = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        bits = jnp.zeros(shape, jnp.int32)
        for w in range(first // 32, min(words.shape[1], (first + LANES) // 32)):
            bit = jax.lax.shift_right_logical(jnp.broadcast_to(words[:, w : w + 1], shape), key & 31) & 1
            bits = jnp.where(key >> 5 == w, bit, bits)
        tiles.append(bits)
    return (tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, 1)) == 1
