"""Tree attention for TPU in which no bit of a token's result depends on the pass that computes it.

The module `by_slot` defines this property and the order of sums by slots. Here it is one Mosaic kernel, with one
program per batch row, or several with some of its kv heads each. Full groups of cached slots are streamed from HBM, as
in `tpu`. The slots after the last full group are a tail of a few groups. A product with ones and zeros moves the scores
of new tokens to their slots. Their values are copied into the slots of a buffer: once if all tokens are on one path,
else for one node after another.

Every sum is a product over one group, with rows that do not depend on each other, or a sum over the lanes of one group.
So the matrix unit treats a row the same way in every pass.

Llama 3 8B on v6e, 8 kv heads, bundles of the compiler's final schedule (libtpu 0.0.42): one node takes 3.6 per slot and
2,400 for the tail. 64 nodes take 24 per slot, 9,200 for the tail's scores, and about 450 per node on several paths. A
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
from specjax.pallas_kernels.tree_attention.by_slot import NO_EXPONENT
from specjax.pallas_kernels.tree_attention.reference import with_value_size
from specjax.pallas_kernels.tree_attention.tpu import ANY_DISTANCE, LANES, MAX_ROWS, pack_bits, unpack_bits

GROUP = LANES
TILE = 16  # rows of a tile of bfloat16
AT_ONCE = 1 << 17  # scores of a head computed at once
VMEM = 14 << 20  # bytes that a program may use; v4 has 16 MiB


def unsupported_reason(q, k, prefix_k) -> str | None:
    """Return the reason why the kernel does not support these arguments, or None.

    It is the same for all passes of a model.
    """
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
    """Return the rows for the query heads of one kv head, such that a node's rows lie in one tile or fill several."""
    return 1 << (heads - 1).bit_length() if heads <= TILE else -(-heads // TILE) * TILE


@with_value_size
def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, block=None, interpret=False,
):  # fmt: skip
    """Compute `by_slot.tree_attention_by_slot` with the kernel; the bits differ from those on other backends.

    block, interpret: as in `tpu.tree_attention`.

    Raises: NotImplementedError for the reason that `unsupported_reason` returns.
    """
    reason = unsupported_reason(q, k, prefix_k)
    if reason:
        raise NotImplementedError(f"the TPU tree_attention by slots does not support {reason}")
    batch, t, heads, dim = q.shape
    kv_heads, slots, new = k.shape[1], prefix_k.shape[-2], k.shape[2]
    each = rows_of_node(heads // kv_heads)
    key_positions = positions if key_positions is None else key_positions
    tail = -(-(GROUP - 1 + new) // GROUP) * GROUP
    max_tokens = max(1, AT_ONCE // tail // each)
    if t > max_tokens:  # tokens do not depend on each other
        parts = [
            tree_attention(
                q[:, i : i + max_tokens], k, v, prefix_k, prefix_v, length, positions[:, i : i + max_tokens],
                mask[:, i : i + max_tokens], key_positions=key_positions, layer=layer, scale=scale, window=window,
                softcap=softcap, block=block, interpret=interpret,
            )
            for i in range(0, t, max_tokens)
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
    full_block = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, *([0] * (x.ndim - 1))))
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
                *map(some_heads, by_head), *map(full_block, of_all),
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
    """Return the largest number of kv heads per program, a divisor of all, whose arrays fit into VMEM.

    Heads do not depend on each other.
    """
    lanes = -(-dim // LANES) * LANES
    spilled = 13 * 4 * rows * max(block, tail)  # registers spilled by the compiler, from v4 to v6e
    of_all = 16 * rows * LANES
    of_head = lanes * (8 * block + 4 * GROUP + 12 * new + 4 * tail + 12 * rows) + 4 * rows * (tail + 2 * LANES)
    fitting = (VMEM - spilled - of_all) // of_head
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= max(1, fitting))


def paths(length, key_positions, mask):
    """Find the keys to copy to each slot of the tail.

    Returns: int32[B, T, M], the key that a node attends to m slots after the cache, or -1; in rows whose tokens are on
    one path the first node's entries apply to all. bool[B], True for such rows. int32[B], the number of slots in use.
    """
    nodes, new = mask.shape[1:]
    behind = key_positions - length[:, None]
    is_one_path = jnp.all(behind == behind[:, :1] + jnp.arange(new), 1)
    by_any = jnp.any(mask, 1)
    stands_for_all = is_one_path[:, None, None] & (jnp.arange(nodes) == 0)[:, None]
    visible = jnp.where(stands_for_all, by_any[:, None], mask)

    # This is a product with the number of the key, from 1, at its slot. With separate comparisons a tree of 64 nodes
    # takes 29,000 cycles per layer on v6e.
    numbers = jnp.where(behind[:, :, None] == jnp.arange(new), jnp.arange(1.0, new + 1)[:, None], 0.0)  # [B, M, M]
    keys = jnp.matmul(visible.astype(jnp.float32), numbers, precision=jax.lax.Precision.HIGHEST).astype(jnp.int32) - 1
    deep = jnp.max(jnp.where(by_any, behind + 1, 0), 1)
    return keys, is_one_path, jnp.clip(deep, 0, new)


def _kernel(
    per_row, shared, owners, q, new_k, new_v, words, row_positions, slot_of_key, prefix_k, prefix_v, out, k_buffer,
    v_buffer, partial_k, partial_v, copied_v, tail_v, tail_weights, acc, total, top, arrived, partial_arrived,
    *, nodes, each, block, slots, tail, has_window, softcap,
):  # fmt: skip
    """Process K heads of one batch row. q, out [K, R, h]; owners int32[T, M]; new_k, new_v [K, M, h]; words [R, W]."""
    row, kv_heads = pl.program_id(0), q.shape[0]
    heads = pl.ds(pl.program_id(1) * kv_heads, kv_heads)
    layer, window = shared[0], shared[1]
    length, is_one_path, deep = per_row[0, row], per_row[2, row] == 1, per_row[3, row]
    full_slots = length // GROUP * GROUP
    last = (full_slots + block - 1) // block
    first = jnp.clip((per_row[1, row] - window + 1) // block, 0, last)

    def start_of(i):
        """Return the first slot of block i. The last block may overlap the previous one."""
        return pl.multiple_of(jnp.minimum(i * block, slots - block), GROUP)

    def copies(i, buffer):
        source_index = (layer, row, heads, pl.ds(start_of(i), block))
        pairs = (prefix_k, k_buffer), (prefix_v, v_buffer)
        return [
            pltpu.make_async_copy(source.at[source_index], target.at[buffer], arrived.at[n, buffer])
            for n, (source, target) in enumerate(pairs)
        ]

    def copies_of_partial():
        source_index = (layer, row, heads, pl.ds(pl.multiple_of(jnp.minimum(full_slots, slots - GROUP), GROUP), GROUP))
        pairs = (prefix_k, partial_k), (prefix_v, partial_v)
        return [
            pltpu.make_async_copy(source.at[source_index], target, partial_arrived.at[n])
            for n, (source, target) in enumerate(pairs)
        ]

    def start_copies(transfers):
        for copy in transfers:
            copy.start()

    def wait_copies(transfers):
        for copy in transfers:
            copy.wait()

    start_copies(copies_of_partial())

    @pl.when(first < last)
    def first_block():
        start_copies(copies(first, first % 2))

    acc[...] = jnp.zeros_like(acc)
    total[...] = jnp.zeros_like(total)
    top[...] = jnp.full_like(top, NO_EXPONENT)

    def scores(head, keys):
        """Return the scores float32[R, n] of keys [n, h]."""
        s = _product(q[head], keys, 1)
        return s if softcap is None else softcap * jnp.tanh(s / softcap)

    def weights_of(head, s, attends):
        """Return the weights float32[R, n] of scores, and rescale the sums so far to the new largest exponent."""
        z = fixed_point(s)
        exponent = (z >> FRACTION).astype(jnp.float32)
        new_top = jnp.maximum(top[head], jnp.max(jnp.where(attends, exponent, NO_EXPONENT), -1, keepdims=True))
        fade = two_to((top[head] - new_top).astype(jnp.int32))
        acc[head] = acc[head] * fade
        total[head] = total[head] * fade
        top[head] = new_top
        return jnp.where(attends, power_of_two(z, new_top.astype(jnp.int32)), 0.0)

    def add_up(head, weights):
        for start in range(0, weights.shape[1], GROUP):
            total[head] = total[head] + jnp.sum(weights[:, start : start + GROUP], -1, keepdims=True)

    def in_window(slot):
        """Return bool[R, n]: the slots within the window of each query row."""
        return slot > row_positions[...] - window

    def body(i, _):
        buffer = i % 2

        @pl.when(i + 1 < last)
        def next_block():
            start_copies(copies(i + 1, 1 - buffer))

        wait_copies(copies(i, buffer))
        slot = start_of(i) + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        attends = (slot < full_slots) & (slot >= i * block)
        attends = attends & in_window(slot) if has_window else jnp.broadcast_to(attends, (q.shape[1], block))
        # A weight of zero does not remove a NaN.
        is_text = start_of(i) + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < length
        for head in range(kv_heads):
            weights = weights_of(head, scores(head, k_buffer[buffer, head]), attends)
            add_up(head, weights)
            values = jnp.where(is_text, v_buffer[buffer, head], jnp.zeros_like(v_buffer[buffer, head]))
            for start in range(0, block, GROUP):
                part = slice(start, start + GROUP)
                acc[head] = acc[head] + _product(weights[:, part].astype(values.dtype), values[part], 0)
        return 0

    jax.lax.fori_loop(first, last, body, 0)

    # The tail: the remaining cached slots and the new tokens, each at its slot after the last full group.
    wait_copies(copies_of_partial())
    place = jax.lax.broadcasted_iota(jnp.int32, (tail, 1), 0)
    moves = (slot_of_key[...] == place).astype(jnp.float32)  # [tail, M]
    visible_new = unpack_bits(words[...], new_k.shape[1])
    to_slots = lambda x: jax.lax.dot_general(
        x, moves, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    attends_new = to_slots(visible_new.astype(jnp.float32)) > 0.5  # [R, tail]
    slot = full_slots + jax.lax.broadcasted_iota(jnp.int32, (1, tail), 1)
    attends = attends_new | jnp.broadcast_to(slot < length, attends_new.shape)
    attends = attends & in_window(slot) if has_window else attends
    is_partial = full_slots + jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0) < length
    for head in range(kv_heads):
        keys = jnp.where(is_partial, partial_k[head], jnp.zeros_like(partial_k[head]))
        partial_scores = scores(head, keys)
        if tail > GROUP:
            partial_scores = jnp.concatenate(
                [partial_scores, jnp.zeros((partial_scores.shape[0], tail - GROUP), jnp.float32)], 1
            )
        moved = to_slots(jnp.where(visible_new, scores(head, new_k[head]), 0.0))
        weights = weights_of(head, jnp.where(attends_new, moved, partial_scores), attends)
        add_up(head, weights)
        tail_weights[head] = weights
        copied_v[head] = new_v[head].astype(jnp.float32)
        tail_v[head, :GROUP] = jnp.where(is_partial, partial_v[head].astype(jnp.float32), 0.0)
        if tail > GROUP:
            tail_v[head, GROUP:] = jnp.zeros((tail - GROUP, tail_v.shape[2]), jnp.float32)
    groups_in_use = (length - full_slots + deep + GROUP - 1) // GROUP

    def place_values(node):
        """Copy the values that `node` attends to into `tail_v`."""

        def copy_value(m, _):
            key = owners[node, m]

            @pl.when(key >= 0)
            def copy():
                tail_v[:, pl.ds(length - full_slots + m, 1), :] = copied_v[:, pl.ds(key, 1), :]

            return 0

        jax.lax.fori_loop(0, deep, copy_value, 0)

    def add_values(head, rows, owned):
        """Add the values of `tail_v` to `rows` of `acc`, only where `owned` [rows, 1] is True if it is given."""
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
        place_values(0)
        for head in range(kv_heads):
            add_values(head, slice(None), None)

    @pl.when(jnp.logical_not(is_one_path))
    def one_by_one():
        def add_node(node, _):
            place_values(node)
            size = max(each, TILE)
            start = pl.multiple_of(node * each // size * size, TILE)
            is_row_of_node = (start + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)) // each == node
            for head in range(kv_heads):
                add_values(head, pl.ds(start, size), is_row_of_node)
            return 0

        jax.lax.fori_loop(0, nodes, add_node, 0)

    for head in range(kv_heads):
        weight = jnp.where(total[head] > 0, total[head], 1.0)  # 0: no visible keys
        out[head] = (acc[head] / weight).astype(out.dtype)


def _product(x, y, over: int):
    """Multiply rows x [n, m] of bfloat16 with y, summed over m, which is dimension `over` of y: float32.

    Mosaic has no other precision for bfloat16, and the program's own is for float32.
    """
    dimensions = (((1,), (over,)), ((), ()))
    return jax.lax.dot_general(
        x, y, dimensions, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
