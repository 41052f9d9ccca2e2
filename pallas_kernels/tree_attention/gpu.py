"""Tree attention as a Pallas kernel for NVIDIA GPUs of the Hopper generation (Mosaic GPU).

The query heads of a key/value head and the new tokens are rows of one matrix, in tiles of ROWS. Both products run on
the tensor cores, and a tile reads each key once. The slots of the cache are divided among several blocks of threads
(split-K), in proportion to the length of the row. One more block attends to the new tokens. Each returns its output
with the logarithm of its softmax's sum, and one operation of XLA joins them (flash-decoding, Dao et al. 2023).

Unlike the form for XLA, the kernel reads no slot beyond the tile of a row's last one. It was compiled for an H200 and
run by Pallas' interpreter. It was never timed, so nothing selects it but its name.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import NEG, finish, group_queries, with_value_size

ROWS = 64
"""Rows of a tile: the smallest matrix of the tensor cores' instruction."""
BLOCK = 64
"""Keys of a tile."""
STAGES = 3
"""Tiles of keys and values that are copied ahead."""
CORES = 132
"""Blocks of threads that run at the same time, at least (H100, H200)."""
LOG2_E = math.log2(math.e)


def unsupported_reason(q, k, prefix_k, *, layer=None, window=None, softcap=None) -> str | None:
    """Return the reason why the kernel cannot run, or None."""
    dim, slots = q.shape[-1], prefix_k.shape[-2]
    if any(getattr(x, "dtype", None) != jnp.bfloat16 for x in (q, k, prefix_k)):
        return "it needs bfloat16 queries, keys and cache"
    if layer is not None:
        return "it does not read stacked layers"
    if window is not None or softcap is not None:
        return "it has no window and no softcap"
    if dim not in (64, 128):
        return f"heads must have 64 or 128 numbers, not {dim}"
    return f"the cache must have at least {BLOCK} slots, not {slots}" if slots < BLOCK else None


@with_value_size
def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, parts=None, interpret=None,
):  # fmt: skip
    """Compute `reference.tree_attention`.

    Args:
      parts: parts of the cache that run in parallel; None: as many as the GPU runs at the same time.
      interpret: parameters of Pallas' interpreter, which runs the kernel on a CPU; None: run it on the GPU.

    Raises: NotImplementedError for what `unsupported_reason` names.
    """
    del positions, key_positions  # only a window compares them
    reason = unsupported_reason(q, k, prefix_k, layer=layer, window=window, softcap=softcap)
    if reason is not None:
        raise NotImplementedError(f"tree attention on GPUs by Mosaic: {reason}")
    (batch, t, heads, dim), kv_heads, slots = q.shape, k.shape[1], prefix_k.shape[2]
    grouped = group_queries(q * jnp.asarray(scale, q.dtype), kv_heads)  # [B, K, G*T, h]
    num_rows = grouped.shape[2]
    flat = lambda x: x.reshape(batch * kv_heads, *x.shape[2:])
    padded = lambda x, size: jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0)))
    rows, new = padded(flat(grouped), ROWS), [padded(flat(x), BLOCK) for x in (k, v)]
    bias = jnp.where(jnp.tile(mask, (1, heads // kv_heads, 1)), 0.0, NEG).astype(jnp.bfloat16)  # [B, G*T, M]
    bias = jnp.pad(bias, ((0, 0), (0, -num_rows % ROWS), (0, -bias.shape[2] % BLOCK)), constant_values=NEG)
    tiles = rows.shape[1] // ROWS
    parts = parts or max(1, min(-(-CORES // (batch * kv_heads * tiles)), -(-slots // (2 * BLOCK))))
    run = _kernel(batch * kv_heads, kv_heads, tiles, parts, slots, bias.shape[2], dim, interpret)
    out, total = run(rows, *new, flat(prefix_k), flat(prefix_v), bias, length.astype(jnp.int32))
    top = jnp.max(total, 0)  # the parts' sums are logarithms of base 2
    weight = jnp.exp2(total - top)
    total = jnp.sum(weight, 0)
    out = jnp.sum(out * weight[..., None], 0) / total[..., None]
    split = lambda x: x.reshape(batch, kv_heads, *x.shape[1:])[:, :, :num_rows]
    return finish(split(out), split(top / LOG2_E)[..., None], split(total)[..., None], t, q.dtype, with_total)


@functools.cache
def _kernel(heads: int, kv_heads: int, tiles: int, parts: int, slots: int, new: int, dim: int, interpret):
    """Return the kernel for `heads` key/value heads of all rows, `parts` parts of the cache and `new` padded new keys.

    It returns outputs float32[parts + 1, heads, tiles * ROWS, dim] and their sums in logarithms of base 2.
    """
    out = jax.ShapeDtypeStruct((parts + 1, heads, tiles * ROWS, dim), jnp.float32)
    total = jax.ShapeDtypeStruct((parts + 1, heads, tiles * ROWS), jnp.float32)
    layout = lambda columns: (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    tile = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=layout(64))
    barriers = plgpu.Barrier(num_barriers=STAGES)
    scratch: dict[str, Any] = dict(
        q_tile=tile(ROWS, dim), k_tiles=tile(STAGES, BLOCK, dim), v_tiles=tile(STAGES, BLOCK, dim),
        bias_tile=tile(ROWS, BLOCK), weight_tile=tile(ROWS, BLOCK),
        out_tile=plgpu.SMEM((ROWS, dim), jnp.float32, transforms=layout(32)),
        total_tile=plgpu.SMEM((ROWS,), jnp.float32), q_copied=plgpu.Barrier(), k_copied=barriers, v_copied=barriers,
        bias_copied=plgpu.Barrier(),
    )  # fmt: skip
    return plgpu.kernel(
        functools.partial(_attend, kv_heads=kv_heads, parts=parts, slots=slots, new=new),
        out_type=(out, total), scratch_types=scratch, grid=(heads, tiles, parts + 1),
        grid_names=("head", "tile", "part"), interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip


def _attend(
    q_ref, k_ref, v_ref, prefix_k_ref, prefix_v_ref, bias_ref, length_ref, out_ref, total_ref, *, kv_heads, parts,
    slots, new, q_tile, k_tiles, v_tiles, bias_tile, weight_tile, out_tile, total_tile, q_copied, k_copied, v_copied,
    bias_copied,
):  # fmt: skip
    """Attend from a tile of rows to a part of the cache, or to the new tokens in the last part."""
    head, tile, part = (jax.lax.axis_index(name) for name in ("head", "tile", "part"))
    row = jax.lax.div(head, jnp.int32(kv_heads))
    rows = pl.ds(tile * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[head, rows], q_tile, q_copied)
    plgpu.barrier_wait(q_copied)

    def stream(keys, values, count, start_of, hide):
        """Fold `count` tiles of keys and values into the softmax, copying STAGES tiles ahead, and write the result."""

        def fetch(i):
            stage = jax.lax.rem(i, jnp.int32(STAGES))
            place = pl.ds(start_of(i), BLOCK)
            plgpu.copy_gmem_to_smem(keys.at[head, place], k_tiles.at[stage], k_copied.at[stage])
            plgpu.copy_gmem_to_smem(values.at[head, place], v_tiles.at[stage], v_copied.at[stage])

        for i in range(STAGES):
            pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))

        def fold(i, carry):
            acc, top, total = carry
            stage = jax.lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(k_copied.at[stage])

            s = hide(i, _product(q_tile, _transposed(k_tiles.at[stage]), (ROWS, BLOCK)) * LOG2_E)
            new_top = jnp.maximum(top, s.max(axis=1))
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(s - jax.lax.broadcast_in_dim(new_top, s.shape, [0]))
            weight_tile[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_copied.at[stage])
            values_sum = _product(weight_tile, v_tiles.at[stage], acc.shape)
            plgpu.commit_smem()  # every warp has read its tiles before one of them copies into the same memory
            pl.when(i + STAGES < count)(functools.partial(fetch, i + STAGES))
            acc = acc * jax.lax.broadcast_in_dim(fade, acc.shape, [0]) + values_sum
            return acc, new_top, total * fade + weights.sum(axis=1)

        full = lambda value, shape, kind: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), kind)
        per_row = plgpu.Layout.WGMMA.reduce(1)
        start = (
            full(0.0, out_tile.shape, plgpu.Layout.WGMMA), full(NEG, (ROWS,), per_row), full(0.0, (ROWS,), per_row)
        )  # fmt: skip
        acc, top, total = jax.lax.fori_loop(0, count, fold, start)
        total = jnp.maximum(total, 1e-30)  # a part without a key
        out_tile[...] = acc / jax.lax.broadcast_in_dim(total, acc.shape, [0])
        total_tile[...] = top + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[part, head, rows])
        plgpu.copy_smem_to_gmem(total_tile, total_ref.at[part, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(part == parts)
    def to_new_tokens():
        def hide(i, s):
            plgpu.copy_gmem_to_smem(bias_ref.at[row, rows, pl.ds(i * BLOCK, BLOCK)], bias_tile, bias_copied)
            plgpu.barrier_wait(bias_copied)
            return s + bias_tile[...].astype(jnp.float32)

        stream(k_ref, v_ref, jnp.int32(new // BLOCK), lambda i: i * BLOCK, hide)

    @pl.when(part < parts)
    def to_cache():
        length = length_ref[row]
        used = jax.lax.div(length + (BLOCK - 1), jnp.int32(BLOCK))  # tiles
        share = jax.lax.div(used + (parts - 1), jnp.int32(parts))
        first = jnp.minimum(part * share, used)
        start_of = lambda i: jnp.minimum((first + i) * BLOCK, slots - BLOCK)  # the last tile may begin earlier

        def hide(i, s):
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            slot = start_of(i) + column
            return jnp.where((slot < length) & (slot >= (first + i) * BLOCK), s, NEG)

        stream(prefix_k_ref, prefix_v_ref, jnp.minimum(share, used - first), start_of, hide)


def _product(a, b, shape):
    """Multiply matrices in shared memory -> float32 of a shape, in registers."""

    def run(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _transposed(ref):
    """Return a transposed view of a matrix in shared memory. JAX 0.10 has a function for it, and later a method."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))
