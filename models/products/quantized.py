"""Products of activations with quantised matrices, in the form that is fastest with each backend's compiler.

If rows of activations are rounded to int8, a product with int8 weights sums whole numbers. Its result is exact in every
order of summation, so a token's value does not depend on the number of rows of its pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models.products.by_groups import multiply_groups
from specjax.models.products.padding import fill_tile, num_batch_shards
from specjax.numerics.quantization import Quantized, dequantize, quantize
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray
from specjax.types import Array

MIN_ROWS_CPU = 8
"""Smallest number of rows of a product of whole numbers on CPU; fewer rows are padded.

XLA has no kernel for a single row. For 2,048 x 8,192, one row takes 16.5 ms and eight take 0.65 ms; in float32 they
take 2.3 and 2.7 ms, in bfloat16 1.2 (two cores with AMX). On two cores with AVX2, one row takes 29 ms and eight 2.1.
"""

BLOCK_ELEMENTS = 1 << 20
"""Number of weights that are expanded at a time on CPU, so that they stay in its cache.

For 2,048 x 8,192 in groups of 128 and eight rows, blocks take 2.7 ms in bfloat16 and 3.2 in float32; a product of every
group takes 7.4 (two cores with AMX).
"""


def quantized_matmul(x: Array, weight: QuantizedArray, dtype=None, same_bits: bool = False) -> Array:
    """Multiply x [..., I] by the transpose of a weight [O, I]. Return [..., O] in `dtype`, by default that of x.

    Derivatives pass the rounding of x unchanged. The weight has none.

    Args:
      same_bits: round products of whole numbers in the same way in every program.
    """
    return _product(jnp.dtype(dtype or x.dtype), same_bits, x, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(dtype, same_bits: bool, x: Array, weight: QuantizedArray) -> Array:
    if weight.inputs == "int8" and weight.values.dtype == jnp.int8 and weight.scales.shape[-1] == 1:
        return _matmul_whole_numbers(x, weight, same_bits).astype(dtype)
    return _matmul_expanded(_rounded(x, weight), weight, dtype)


@_product.defjvp
def _product_jvp(dtype, same_bits, primals, tangents):
    """Return the product and its tangent, whose checkpoint stores no expanded weight until the backward pass."""
    x, weight = primals
    linear = jax.checkpoint(functools.partial(_matmul_linear, dtype=dtype))
    return _product(dtype, same_bits, x, weight), linear(tangents[0], weight)


def _rounded(x: Array, weight: QuantizedArray) -> Array:
    """Round the rows of x [..., I] as a weight demands (`WeightFormat.inputs`), and return them in their own dtype."""
    if weight.inputs is None:
        return x
    if weight.inputs == "int8":
        return dequantize(quantize(x)).astype(x.dtype)
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], weight.scales.shape[-1], -1)
    scale = jnp.max(jnp.abs(y), -1, keepdims=True) / float(jnp.finfo(FLOAT8).max)
    step = jnp.where(scale > 0, scale, 1.0)
    return ((y / step).astype(jnp.dtype(weight.inputs)).astype(jnp.float32) * scale).astype(x.dtype).reshape(x.shape)


def _matmul_whole_numbers(x: Array, weight: QuantizedArray, same_bits: bool) -> Array:
    """Multiply rows that are rounded to int8 by a matrix of int8 with one scale per row. Return float32[..., O].

    same_bits: a barrier keeps later additions out of the products with the scales, whose rounding would change with
      them. It takes 2 % of a step of Llama 3 8B on a v6e chip, by the compiler's schedule.
    """
    rows = quantize(x)
    total = jax.lax.platform_dependent(rows.values, weight.values, cpu=_sums_on_cpu, tpu=_sums_on_tpu, default=_sums)
    y = scale_sums(total, rows, weight.scales[..., 0], None if weight.offsets is None else weight.offsets[..., 0])
    return jax.lax.optimization_barrier(y) if same_bits else y


def scale_sums(total: Array, rows: Quantized, scales: Array, offsets: Array | None) -> Array:
    """Return float32[..., O] for sums int32[..., O] of rows of int8 and of weights with scales and offsets [O]."""
    y = total.astype(jnp.float32) * rows.scale[..., None] * scales
    if offsets is None:
        return y
    return y - jnp.sum(rows.values, -1, dtype=jnp.int32)[..., None] * rows.scale[..., None] * offsets


def _sums(x: Array, values: Array) -> Array:
    return jax.lax.dot_general(x, values, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _sums_on_tpu(x: Array, values: Array) -> Array:
    """Sum with at least 8 rows per device.

    A step of Llama 3 8B on a v6e chip takes 26.1 ms by the compiler's schedule without padding, and 7.0 ms with it. In
    bfloat16 it takes 11.6 ms.
    """
    rows = _token_rows(x)
    return _sums(fill_tile(rows), values)[..., : rows.shape[-2], :].reshape(*x.shape[:-1], -1)


def _sums_on_cpu(x: Array, values: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    rows = jax.lax.optimization_barrier(jnp.pad(rows, ((0, max(0, MIN_ROWS_CPU - count)), (0, 0))))
    y = jax.lax.dot_general(values, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return jax.lax.optimization_barrier(y)[:, :count].T.reshape(*x.shape[:-1], -1)


def _matmul_expanded(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply by the expanded weight."""
    cpu, tpu, default = (functools.partial(f, dtype=dtype) for f in (_matmul_by_blocks, _matmul_on_tpu, _matmul_fused))
    return jax.lax.platform_dependent(x, weight, cpu=cpu, tpu=tpu, default=default)


def _matmul_linear(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply by the expanded weight, in products that JAX transposes for gradients. It cannot transpose the kernel.

    JAX transposes the forms of all backends, so the kernel must not be among them on any backend.
    """
    cpu, default = (functools.partial(f, dtype=dtype) for f in (_linear_by_blocks, _matmul_fused))
    return jax.lax.platform_dependent(x, weight, cpu=cpu, default=default)


def _matmul_on_tpu(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply with at least 8 rows per device, or by a kernel if the inputs have groups."""
    if weight.scales.shape[-1] > 1 and (product := multiply_groups(x, weight)) is not None:
        return product.astype(dtype)
    rows = _token_rows(x)
    return _matmul_fused(fill_tile(rows), weight, dtype)[..., : rows.shape[-2], :].reshape(*x.shape[:-1], -1)


def _token_rows(x: Array) -> Array:
    """Return x [..., I] as rows [R, I], or with its batch axis if that may be sharded over devices."""
    return x if num_batch_shards() > 1 and x.ndim > 1 else x.reshape(-1, x.shape[-1])


def _matmul_fused(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply in one product, into which compilers fuse the expansion of the weight.

    A scale per row multiplies the result instead.
    """
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    if weight.scales.shape[-1] > 1 or weight.offsets is not None:
        return jax.lax.dot_general(x, weight.expand(x.dtype), dimensions, preferred_element_type=dtype)
    y = jax.lax.dot_general(x, weight.values.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)
    return (y * weight.scales[..., 0]).astype(dtype)


def _matmul_by_blocks(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply blocks of the weight.

    The barrier ties the weight to the rows. XLA otherwise moves the expansion of a single block out of the loop of a
    decode, and an expanded copy of all small matrices stays in memory.
    """
    rows, weight = jax.lax.optimization_barrier((x.reshape(-1, x.shape[-1]), weight))
    count = len(rows)
    rows = jnp.pad(rows, ((0, max(0, 2 - count)), (0, 0)))
    y = _multiply_blocks(rows, weight, x.dtype, jnp.float32)[:, :count]
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1).astype(dtype)


def _linear_by_blocks(x: Array, weight: QuantizedArray, dtype) -> Array:
    """Multiply so that the transpose adds the gradients of blocks in float32, the dtype of the rows."""
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _multiply_blocks(rows, weight, x.dtype, dtype).T.reshape(*x.shape[:-1], -1)


def _multiply_blocks(rows: Array, weight: QuantizedArray, factors, dtype) -> Array:
    """Multiply rows [R, I] by blocks of the weight, which are expanded one at a time. Return [O, R] in `dtype`.

    The checkpoint makes the transpose expand them one at a time, too. factors: dtype of the rows and of the blocks.
    """
    blocks = _num_blocks(*weight.shape)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(_, block: QuantizedArray):
        matrix, x = jax.lax.optimization_barrier(block.expand(factors)), rows.astype(factors)
        product = jax.lax.dot_general(matrix, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return None, product.astype(dtype)

    parts = jax.tree.map(lambda leaf: leaf.reshape(blocks, -1, *leaf.shape[1:]), weight)
    return jax.lax.scan(body, None, parts)[1].reshape(weight.shape[0], -1)


def _num_blocks(num_rows: int, inputs: int) -> int:
    """Return a divisor of `num_rows`, so that a block has about BLOCK_ELEMENTS weights."""
    minimum = -(-num_rows * inputs // BLOCK_ELEMENTS)
    return next(n for n in range(min(minimum, num_rows), num_rows + 1) if num_rows % n == 0)
