"""Tree attention for TPU in which a token's result, to the bit, does not depend on the pass that it is in.

`by_slot` says what that means and how sums go by slots; here in one Mosaic kernel, a program per row of the batch, or
several with some of its kv heads each. Whole groups of slots that the cache holds are streamed from HBM, as in `tpu`.
What lies behind the last one is a tail of a few groups: scores of the new tokens are moved to their slots by a product
with ones and zeros, and their values are copied into the slots of a buffer, once where all tokens are of one path, else
for one node after another.

Every sum is a product over one group, of rows that do not depend on each other, or of the lanes of one group. So what
the matrix unit does with a row is the same in every pass.

Llama 3 8B on v6e, 8 kv heads, bundles of the compiler's final schedule (libtpu 0.0.42): one node 3.6 a slot and 2,400
for the tail; 64 nodes 24 a slot, 9,200 for the tail's scores and some 450 a node where they are of several paths. A
layer's weights take 640,000 cycles.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.numerics.quantization import Quantized
from specjax.numerics.reproducible_math import FRACTION, fixed_point, power_of_two, two_to
from specjax.pallas_kernels.tree_attention import tpu
from specjax.pallas_kernels.tree_attention.by_slot import NOTHING
from specjax.pallas_kernels.tree_attention.tpu import ANY_DISTANCE, LANES, MAX_ROWS, pack_bits, unpack_bits

GROUP = LANES
TILE = 16  # rows of a tile of bfloat16
AT_ONCE = 1 << 17  # scores of a head that are computed at once
VMEM = 14 << 20  # bytes that a program may take: v4 has 16 MiB


def unsupported(q, k, prefix_k) -> str | None:
    """Why the kernel cannot take these arguments, in a sentence; None if it can: the same for all passes of a model."""
    dim, slots = q.shape[-1], prefix_k.shape[-2]
    if isinstance(prefix_k, Quantized) or not q.dtype == k.dtype == prefix_k.dtype == jnp.bfloat16:
        return f"dtypes {q.dtype}, {k.dtype}, {prefix_k.dtype}; it takes bfloat16"
    if dim % 64 or dim > 256:
        return f"head_dim {dim}; it takes 64, 128, 192 and 256"
    if slots % GROUP:
        return f"a cache of {slots} slots; it takes multiples of {GROUP}"
    if rows_of_node(q.shape[2] // k.shape[1]) > MAX_ROWS:
        return f"{q.shape[2] // k.shape[1]} query heads per kv head; it takes up to {MAX_ROWS}"
    return None


def rows_of_node(heads: int) -> int:
    """Rows for so many query heads of a kv head: a node's lie in one tile, or fill several."""
    return 1 << (heads - 1).bit_length() if heads <= TILE else -(-heads // TILE) * TILE


def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, block=None, interpret=False,
):  # fmt: skip
    """As `by_slot.tree_attention_by_slot`, other bits. block, interpret: as of `tpu.tree_attention`.

    Raises: NotImplementedError for what `unsupported` names.
    """
    reason = unsupported(q, k, prefix_k)
    if reason:
        raise NotImplementedError(f"the TPU tree_attention by slots does not support {reason}")
    batch, t, heads, dim = q.shape
    kv_heads, slots, new = k.shape[1], prefix_k.shape[-2], k.shape[2]
    each = rows_of_node(heads // kv_heads)
    key_positions = positions if key_positions is None else key_positions
    tail = -(-(GROUP - 1 + new) // GROUP) * GROUP
    most = max(1, AT_ONCE // tail // each)
    if t > most:  # tokens do not depend on each other
        parts = [
            tree_attention(
                q[:, i : i + most], k, v, prefix_k, prefix_v, length, positions[:, i : i + most],
                mask[:, i : i + most], key_positions=key_positions, layer=layer, scale=scale, window=window,
                softcap=softcap, block=block, interpret=interpret,
            )
            for i in range(0, t, most)
        ]  # fmt: skip
        return jnp.concatenate(parts, 1)
    if layer is None:
        layer, prefix_k, prefix_v = 0, prefix_k[None], prefix_v[None]
    pad_rows, pad_keys = -(each * t) % TILE, -new % TILE
    rows = each * t + pad_rows
    block = min(slots, block or tpu._block(kv_heads, dim, k.dtype.itemsize, slots))
    block = max(GROUP, min(block, AT_ONCE // rows // GROUP * GROUP))
    heads_at_once = _heads_at_once(kv_heads, rows, new + pad_keys, tail, block, dim)

    by_node = (q * jnp.asarray(scale, q.dtype)).reshape(batch, t, kv_heads, heads // kv_heads, dim)
    by_node = jnp.pad(by_node, ((0, 0), (0, 0), (0, 0), (0, each - heads // kv_heads), (0, 0)))
    queries = by_node.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, each * t, dim)  # row t * each + g
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, pad_rows), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad_keys), (0, 0))) for x in (k, v))
    by_row = lambda x: jnp.pad(jnp.repeat(x, each, 1), ((0, 0), (0, pad_rows), (0, 0)))
    owners, is_one_path, deep = paths(length, key_positions, mask)
    slot_of_key = jnp.pad(key_positions - length[:, None] // GROUP * GROUP, ((0, 0), (0, pad_keys)), constant_values=-1)
    seen_by_any = jnp.pad(jnp.any(mask, 1), ((0, 0), (0, pad_keys)))
    slot_of_key = jnp.where(seen_by_any, slot_of_key, -1)[:, None]  # int32[B, 1, M], in the tail

    per_row = jnp.stack([length, jnp.min(positions, 1), is_one_path.astype(jnp.int32), deep]).astype(jnp.int32)
    shared = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, ANY_DISTANCE if window is None else window)])
    whole = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, *([0] * (x.ndim - 1))))
    some_heads = lambda x: pl.BlockSpec((None, heads_at_once, *x.shape[2:]), lambda b, part, *_: (b, part, 0, 0))
    by_head = queries, k, v
    of_all = by_row(pack_bits(mask)), by_row(positions[:, :, None]), slot_of_key
    of_heads = lambda *shape, dtype=jnp.float32: pltpu.VMEM((heads_at_once, *shape), dtype)
    two_blocks = pltpu.VMEM((2, heads_at_once, block, dim), k.dtype)
    out = pl.pallas_call(
        functools.partial(
            _kernel, nodes=t, each=each, block=block, slots=slots, tail=tail, has_window=window is not None,
            softcap=softcap,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // heads_at_once),
            in_specs=[
                pl.BlockSpec((None, *owners.shape[1:]), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM),
                *map(some_heads, by_head), *map(whole, of_all),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ],
            out_specs=some_heads(queries),
            scratch_shapes=[
                two_blocks, two_blocks,
                *[of_heads(GROUP, dim, dtype=k.dtype)] * 2,
                of_heads(k.shape[2], dim), of_heads(tail, dim), of_heads(rows, tail), of_heads(rows, dim),
                *[of_heads(rows, 1)] * 2,
                pltpu.SemaphoreType.DMA((2, 2)), pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=64 << 20),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * kv_heads * rows * (slots + tail) * dim,
            bytes_accessed=2 * prefix_k.nbytes // len(prefix_k),
            transcendentals=0,
        ),
        interpret=interpret,
        name="tree_attention_by_slot",
    )(per_row, shared, owners, *by_head, *of_all, prefix_k, prefix_v)  # fmt: skip
    out = out[:, :, : each * t].reshape(batch, kv_heads, t, each, dim)[:, :, :, : heads // kv_heads]
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, t, heads, dim)


def _heads_at_once(kv_heads: int, rows: int, new: int, tail: int, block: int, dim: int) -> int:
    """The most kv heads of a program whose arrays fit into VMEM, a divisor of all; they do not depend on each other."""
    lanes = -(-dim // LANES) * LANES
    spilled = 13 * 4 * rows * max(block, tail)  # by the compiler, from v4 to v6e
    of_all = 16 * rows * LANES
    of_head = lanes * (8 * block + 4 * GROUP + 12 * new + 4 * tail + 12 * rows) + 4 * rows * (tail + 2 * LANES)
    fitting = (VMEM - spilled - of_all) // of_head
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= max(1, fitting))


def paths(length, key_positions, mask):
    """Which keys are to be copied where.

    Returns: int32[B, T, M], the key that a node sees m slots behind the cache, -1: none; in rows whose tokens are of
    one path the first node's is that of all. bool[B], whether they are. int32[B], how many slots are in use.
    """
    nodes, new = mask.shape[1:]
    behind = key_positions - length[:, None]
    is_one_path = jnp.all(behind == behind[:, :1] + jnp.arange(new), 1)
    by_any = jnp.any(mask, 1)
    stands_for_all = is_one_path[:, None, None] & (jnp.arange(nodes) == 0)[:, None]
    known = jnp.where(stands_for_all, by_any[:, None], mask)

    # As a product with the number of the key, 1 and up, where it stands: compared one by one, a tree of 64 nodes takes
    # 29,000 cycles a layer on v6e.
    numbers = jnp.where(behind[:, :, None] == jnp.arange(new), jnp.arange(1.0, new + 1)[:, None], 0.0)  # [B, M, M]
    keys = jnp.matmul(known.astype(jnp.float32), numbers, precision=jax.lax.Precision.HIGHEST).astype(jnp.int32) - 1
    deep = jnp.max(jnp.where(by_any, behind + 1, 0), 1)
    return keys, is_one_path, jnp.clip(deep, 0, new)


def _kernel(
    per_row, shared, owners, q, new_k, new_v, words, row_positions, slot_of_key, prefix_k, prefix_v, out, k_buffer,
    v_buffer, rest_k, rest_v, copied_v, tail_v, tail_weights, acc, total, top, arrived, rest_arrived,
    *, nodes, each, block, slots, tail, has_window, softcap,
):  # fmt: skip
    """K heads of one row of the batch. q, out [K, R, h]; owners int32[T, M]; new_k, new_v [K, M, h]; words [R, W]."""
    row, kv_heads = pl.program_id(0), q.shape[0]
    heads = pl.ds(pl.program_id(1) * kv_heads, kv_heads)
    layer, window = shared[0], shared[1]
    length, is_one_path, deep = per_row[0, row], per_row[2, row] == 1, per_row[3, row]
    held = length // GROUP * GROUP
    last = (held + block - 1) // block
    first = jnp.clip((per_row[1, row] - window + 1) // block, 0, last)

    def start_of(i):
        """The last block may overlap the one before."""
        return pl.multiple_of(jnp.minimum(i * block, slots - block), GROUP)

    def copies(i, buffer):
        here = (layer, row, heads, pl.ds(start_of(i), block))
        pairs = (prefix_k, k_buffer), (prefix_v, v_buffer)
        return [
            pltpu.make_async_copy(source.at[here], kept.at[buffer], arrived.at[n, buffer])
            for n, (source, kept) in enumerate(pairs)
        ]

    def copies_of_rest():
        here = (layer, row, heads, pl.ds(pl.multiple_of(jnp.minimum(held, slots - GROUP), GROUP), GROUP))
        pairs = (prefix_k, rest_k), (prefix_v, rest_v)
        return [
            pltpu.make_async_copy(source.at[here], kept, rest_arrived.at[n]) for n, (source, kept) in enumerate(pairs)
        ]

    def begin(found):
        for copy in found:
            copy.start()

    def end(found):
        for copy in found:
            copy.wait()

    begin(copies_of_rest())

    @pl.when(first < last)
    def first_block():
        begin(copies(first, first % 2))

    acc[...] = jnp.zeros_like(acc)
    total[...] = jnp.zeros_like(total)
    top[...] = jnp.full_like(top, NOTHING)

    def scores(head, keys):
        """float32[R, n]."""
        s = _product(q[head], keys, 1)
        return s if softcap is None else softcap * jnp.tanh(s / softcap)

    def weights_of(head, s, seen):
        """float32[R, n] of scores, with the sums so far made relative to the new largest exponent."""
        z = fixed_point(s)
        exponent = (z >> FRACTION).astype(jnp.float32)
        higher = jnp.maximum(top[head], jnp.max(jnp.where(seen, exponent, NOTHING), -1, keepdims=True))
        fade = two_to((top[head] - higher).astype(jnp.int32))
        acc[head] = acc[head] * fade
        total[head] = total[head] * fade
        top[head] = higher
        return jnp.where(seen, power_of_two(z, higher.astype(jnp.int32)), 0.0)

    def add_up(head, weights):
        for start in range(0, weights.shape[1], GROUP):
            total[head] = total[head] + jnp.sum(weights[:, start : start + GROUP], -1, keepdims=True)

    def near(slot):
        """Which slots lie within the window of each query row: bool[R, n]."""
        return slot > row_positions[...] - window

    def body(i, _):
        buffer = i % 2

        @pl.when(i + 1 < last)
        def next_block():
            begin(copies(i + 1, 1 - buffer))

        end(copies(i, buffer))
        slot = start_of(i) + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        seen = (slot < held) & (slot >= i * block)
        seen = seen & near(slot) if has_window else jnp.broadcast_to(seen, (q.shape[1], block))
        # A weight of zero does not silence a NaN.
        is_text = start_of(i) + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < length
        for head in range(kv_heads):
            weights = weights_of(head, scores(head, k_buffer[buffer, head]), seen)
            add_up(head, weights)
            values = jnp.where(is_text, v_buffer[buffer, head], jnp.zeros_like(v_buffer[buffer, head]))
            for start in range(0, block, GROUP):
                part = slice(start, start + GROUP)
                acc[head] = acc[head] + _product(weights[:, part].astype(values.dtype), values[part], 0)
        return 0

    jax.lax.fori_loop(first, last, body, 0)

    # The tail: the rest of what the cache holds and the new tokens, each at its slot behind the last whole group.
    end(copies_of_rest())
    place = jax.lax.broadcasted_iota(jnp.int32, (tail, 1), 0)
    moves = (slot_of_key[...] == place).astype(jnp.float32)  # [tail, M]
    among = unpack_bits(words[...], new_k.shape[1])
    to_slots = lambda x: jax.lax.dot_general(
        x, moves, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    seen_new = to_slots(among.astype(jnp.float32)) > 0.5  # [R, tail]
    slot = held + jax.lax.broadcasted_iota(jnp.int32, (1, tail), 1)
    seen = seen_new | jnp.broadcast_to(slot < length, seen_new.shape)
    seen = seen & near(slot) if has_window else seen
    is_rest = held + jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0) < length
    for head in range(kv_heads):
        keys = jnp.where(is_rest, rest_k[head], jnp.zeros_like(rest_k[head]))
        at_rest = scores(head, keys)
        if tail > GROUP:
            at_rest = jnp.concatenate([at_rest, jnp.zeros((at_rest.shape[0], tail - GROUP), jnp.float32)], 1)
        moved = to_slots(jnp.where(among, scores(head, new_k[head]), 0.0))
        weights = weights_of(head, jnp.where(seen_new, moved, at_rest), seen)
        add_up(head, weights)
        tail_weights[head] = weights
        copied_v[head] = new_v[head].astype(jnp.float32)
        tail_v[head, :GROUP] = jnp.where(is_rest, rest_v[head].astype(jnp.float32), 0.0)
        if tail > GROUP:
            tail_v[head, GROUP:] = jnp.zeros((tail - GROUP, tail_v.shape[2]), jnp.float32)
    groups_in_use = (length - held + deep + GROUP - 1) // GROUP

    def put(node):
        """Into `tail_v` the values that it sees."""

        def one(m, _):
            key = owners[node, m]

            @pl.when(key >= 0)
            def copy():
                tail_v[:, pl.ds(length - held + m, 1), :] = copied_v[:, pl.ds(key, 1), :]

            return 0

        jax.lax.fori_loop(0, deep, one, 0)

    def add_values(head, rows, owned):
        """To rows of `acc` what they see of `tail_v`; where `owned` [rows, 1] is False, nothing."""
        for group in range(tail // GROUP):

            @pl.when(group < groups_in_use)
            def add(group=group):
                part = pl.ds(group * GROUP, GROUP)
                weights = tail_weights[head, rows, part]
                weights = weights if owned is None else jnp.where(owned, weights, 0.0)
                values = tail_v[head, part].astype(new_v.dtype)
                acc[head, rows] = acc[head, rows] + _product(weights.astype(values.dtype), values, 0)

    @pl.when(is_one_path)
    def all_at_once():
        put(0)
        for head in range(kv_heads):
            add_values(head, slice(None), None)

    @pl.when(jnp.logical_not(is_one_path))
    def one_by_one():
        def of(node, _):
            put(node)
            size = max(each, TILE)
            start = pl.multiple_of(node * each // size * size, TILE)
            mine = (start + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)) // each == node
            for head in range(kv_heads):
                add_values(head, pl.ds(start, size), mine)
            return 0

        jax.lax.fori_loop(0, nodes, of, 0)

    for head in range(kv_heads):
        weight = jnp.where(total[head] > 0, total[head], 1.0)  # 0: sees nothing
        out[head] = (acc[head] / weight).astype(out.dtype)


def _product(x, y, over: int):
    """float32: rows x [n, m] with y, summed over m, its dimension `over`."""
    return jax.lax.dot_general(x, y, (((1,), (over,)), ((), ())), preferred_element_type=jnp.float32)
