"""Matmuls of activations and weights, and table lookups, in the form that is fastest with each backend's compiler.

Weights are stored as [out, in], like in the checkpoints. Matrix-vector products then read 18 GB/s, and 13 GB/s as
[in, out] (one token of SmolLM2 in float32, 2-core CPU).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models.products.from_stack import QuantizedMember
from specjax.models.products.grouped import GroupedMatrix
from specjax.models.products.padding import fill_tile
from specjax.models.products.quantized import quantized_matmul
from specjax.models.products.transposed import LANES, TransposedMatrix
from specjax.numerics import reproducible_math
from specjax.numerics.quantized_array import QuantizedArray
from specjax.types import Array

ProductOperand = GroupedMatrix | TransposedMatrix | QuantizedMember
"""Matrices with a product of their own."""


def matmul(x: Array, weight: Array | QuantizedArray | ProductOperand, dtype=None) -> Array:
    """Multiply x [..., I] by the transpose of weight [O, I]. Return [..., O] in `dtype`, by default that of x."""
    if isinstance(weight, ProductOperand):
        return weight.product(x, dtype)
    if isinstance(weight, QuantizedArray):
        return quantized_matmul(x, weight, dtype)
    default, cpu, tpu = (functools.partial(f, dtype=dtype) for f in (_matmul_plain, _matmul_on_cpu, _matmul_on_tpu))
    if x.size == x.shape[-1] and x.dtype == jnp.float32:  # one token: a matrix-vector product
        cpu = default
    if x.size >= MANY_ROWS_CPU * x.shape[-1]:
        # A custom derivative rule works neither with forward-mode derivatives nor inside a caller's `shard_map`.
        has_rule = x.dtype == jnp.bfloat16 and not jax.sharding.get_abstract_mesh().manual_axes
        cpu = functools.partial(_matmul_many_rows if has_rule else _matmul_many_rows_on_cpu, dtype=dtype)
    return jax.lax.platform_dependent(x, weight, cpu=cpu, tpu=tpu, default=default)


def take_rows(table: Array | QuantizedArray, ids: Array) -> Array:
    """Return the rows [..., D] of a table [V, D] at ids int32[...].

    XLA on CPU converts a bfloat16 table to float32 as a whole before it takes rows. It hoists that conversion out of
    the loop around it, so a drafter that drafts in a loop repeats it in every step. A chain of three by an EAGLE-3 head
    of SmolLM2 took 42 ms. The barrier ties the table to the ids, which prevents the hoisting. The chain then takes 3.5
    ms (two cores with AVX-512 BF16, jax 0.10).

    XLA on GPUs turns the lookup of a single row into a slice before it partitions a program. For a slice of a table
    that is split over its rows, every device gathers the complete table. Llama 3 8B on eight GPUs gathered 1 GB per
    step. Two rows stay a lookup, after which a row is summed over the devices.

    XLA on TPUs copies an int8 table to another layout to slice a single row, but not for a lookup of two. For Llama 3
    8B on a v6e chip, the copy takes 2.5 ms of a step by the compiler's schedule.

    TPUs store a table whose width is no multiple of LANES by columns, and the lookup of several rows copies all of it.
    A product with one-hot rows reads it once instead. A pass of SmolLM2 over 4 tokens on a v5e chip takes 1.62 ms by
    the schedule, and 2.20 ms with the copy.
    """
    if isinstance(table, QuantizedArray):
        return jax.tree.map(lambda leaf: take_rows(leaf, ids), table).expand()
    lookup = lambda table, ids: table[ids]
    on_gpu = _take_row_twice if ids.size == 1 else lookup
    if table.dtype != jnp.bfloat16:
        on_tpu = on_gpu if table.dtype.itemsize == 1 else lookup
        return jax.lax.platform_dependent(table, ids, tpu=on_tpu, cuda=on_gpu, rocm=on_gpu, default=lookup)
    guarded = lambda table, ids: lookup(*jax.lax.optimization_barrier((table, ids)))
    is_by_columns = table.shape[-1] % LANES != 0 and 1 < ids.size <= MAX_ONE_HOT_ROWS
    on_tpu = _take_by_product if is_by_columns else lookup
    return jax.lax.platform_dependent(table, ids, cpu=guarded, tpu=on_tpu, cuda=on_gpu, rocm=on_gpu, default=lookup)


MAX_ONE_HOT_ROWS = 64
"""Largest number of rows that TPUs take from a narrow table by a product."""


def _take_by_product(table: Array, ids: Array) -> Array:
    """Return rows as a product with one-hot rows. Each sum has one term that is not zero, so it is exact."""
    one_hot = jax.nn.one_hot(jnp.clip(ids.reshape(-1), 0, len(table) - 1), len(table), dtype=table.dtype)
    rows = fill_tile(one_hot) @ table
    return rows[: ids.size].reshape(*ids.shape, table.shape[-1])


def _take_row_twice(table: Array, ids: Array) -> Array:
    """Return the row of a single id, in a lookup of two."""
    both = jnp.broadcast_to(ids.reshape(1), (2,))
    return table[both][:1].reshape(*ids.shape, table.shape[-1])


MANY_ROWS_CPU = 512
"""Number of rows from which on XLA on CPU is faster with the plain product.

That product has rows in its result, so the next operation needs no transpose. SmolLM2 with 4 x 512 tokens takes 4.1 s
in float32, and 3.4 s plain; in bfloat16 2.9 s and 2.4 s. With 128 tokens it takes 0.19 s and 0.22 s, in bfloat16 0.13 s
and 0.17 s (two cores with AVX-512, jax 0.10).
"""


MAX_SUM_LENGTH = 2048 if jax.__version_info__ < (0, 11) else 1024
"""Largest number of terms that every XLA kernel on CPU sums in one pass.

Longer sums are split differently for some numbers of rows. The parts of the weights are copies. SmolLM2, with sums of
at most 1,536 terms, takes 62 ms per pass unsplit and 90 ms in parts (two cores with AVX-512, jax 0.10).
"""


MIN_BFLOAT16_ROWS = 2 if jax.__version_info__ < (0, 12) else 16
"""Smallest number of rows of a bfloat16 product on CPU; fewer rows are padded.

A single row is multiplied as a vector, for which XLA has no kernel: a pass of SmolLM2 takes 190 ms, and 24 ms with a
second row. Since jax 0.12, up to 8 rows are summed in another order than more rows, and more slowly. SmolLM2's head
takes 5.7 ms for 2 rows and 5.4 ms for 16, a matrix of its MLP 0.21 ms and 0.15 ms (two cores with AVX-512).
"""


def _padded_row_count(count: int) -> int:
    """Return the number of rows to which a float32 product of `count` rows on CPU is padded.

    Kernels take 4, 8 and 16 rows.
    SmolLM2, cost in passes over one token: 5 tokens 1.67, 7 1.71, 8 1.45; 9 2.16, 12 2.18, 15 2.57, 16 1.97; 17 2.62,
    24 2.94, 26 4.17, 32 3.18 (two cores with AVX-512, jax 0.10).
    """
    return max(2, 1 << (count - 1).bit_length()) if count <= 16 else -(-count // 8) * 8


def _may_be_sharded(x: Array) -> bool:
    """Return True if the batch rows of x may lie on several devices. Padding them would move data between devices."""
    return x.ndim > 2 and x.shape[0] > 1 and jax.device_count() > 1


def matmul_same_bits(x: Array, weight: Array | QuantizedArray, dtype=None) -> Array:
    """Multiply like `matmul`, so that the bits of a row do not depend on the other rows.

    On TPU the product is computed in tiles of rows, so that every pass has the same products. Elsewhere it is computed
    in parts that every kernel sums in one pass. Quantised weights need products of whole numbers, which are exact.
    """
    if isinstance(weight, QuantizedArray):
        return quantized_matmul(x, weight, dtype, same_bits=True)
    tiles, pieces = (functools.partial(f, dtype=dtype) for f in (_matmul_tiles, _matmul_in_parts))
    return jax.lax.platform_dependent(x, weight, tpu=tiles, default=pieces)


def _matmul_tiles(x: Array, weight: Array, dtype) -> Array:
    return reproducible_math.in_tiles(lambda rows: _matmul_plain(rows, weight, dtype), x)


def _matmul_in_parts(x: Array, weight: Array, dtype) -> Array:
    if x.shape[-1] <= MAX_SUM_LENGTH:
        return _matmul_part(x, weight, dtype)
    parts = [
        _matmul_part(x[..., start : start + MAX_SUM_LENGTH], weight[:, start : start + MAX_SUM_LENGTH], jnp.float32)
        for start in range(0, x.shape[-1], MAX_SUM_LENGTH)
    ]
    return functools.reduce(jnp.add, parts).astype(dtype or x.dtype)


def _matmul_part(x: Array, weight: Array, dtype) -> Array:
    """Multiply in the same form for any number of rows."""
    cpu, default = (functools.partial(f, dtype=dtype) for f in (_matmul_on_cpu, _matmul_plain))
    return jax.lax.platform_dependent(x, weight, cpu=cpu, default=default)


def _matmul_plain(x: Array, weight: Array, dtype) -> Array:
    """Multiply with the default precision if all numbers are bfloat16, whose products are exact in one pass.

    For one row of bfloat16 and "highest", which is the precision of float32 products (`arrays.modes`), the CUDA
    compiler sums elements and does not call a matmul kernel (jax 0.11, H200).
    """
    precision = jax.lax.Precision.DEFAULT if x.dtype == weight.dtype == jnp.bfloat16 else None
    dimensions = ((x.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(x, weight, dimensions, precision, preferred_element_type=dtype)


def _matmul_on_tpu(x: Array, weight: Array, dtype) -> Array:
    """Multiply with at least 8 rows per device, a full tile. The compiler uses no matrix unit for fewer rows.

    Llama 3 8B on four v5e chips with one token, by the compiler's schedule: 673,000 cycles per layer and 1,840,000 for
    the head. With padding it takes 394,000 and 688,000, and with the barriers that isolate the product 376,000 and
    667,000.
    """
    tokens = x.shape[-2] if x.ndim > 1 else 1
    padded = fill_tile(x.reshape(*x.shape[:-2], tokens, x.shape[-1]))
    if padded.shape[-2] == tokens:
        return _matmul_plain(x, weight, dtype)
    y = jax.lax.optimization_barrier(_matmul_plain(jax.lax.optimization_barrier(padded), weight, dtype))
    return y[..., :tokens, :].reshape(*x.shape[:-1], -1)


def _matmul_on_cpu(x: Array, weight: Array, dtype) -> Array:
    """Multiply with the weight as the left operand and a float32 result, the form of XLA's fast CPU kernels.

    SmolLM2 on 2 cores with AMX, 500 cached tokens, ms for 1 / 8 / 16 / 32 new tokens: float32 35 / 58 / 76 / 111,
    bfloat16 24 / 32 / 41 / 62. A bfloat16 result is computed by plain loops (about 180 ms), and the weight on the right
    costs half as much again. A few rows are padded (`MIN_BFLOAT16_ROWS`, `_padded_row_count`). The barriers keep the
    compiler from fusing transpose and conversion into the product.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    min_rows = MIN_BFLOAT16_ROWS if x.dtype == jnp.bfloat16 else 2 if _may_be_sharded(x) else _padded_row_count(count)
    rows = jax.lax.optimization_barrier(jnp.pad(rows, ((0, max(0, min_rows - count)), (0, 0))))
    y = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y)[:, :count].T.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def _matmul_many_rows_on_cpu(x: Array, weight: Array, dtype) -> Array:
    """Multiply with a float32 result, without the transpose of `_matmul_on_cpu`."""
    return _matmul_plain(x, weight, jnp.float32).astype(dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul_many_rows(x: Array, weight: Array, dtype) -> Array:
    """Multiply many rows; the derivatives are products in the dtype of x.

    Without that they are float32 products, and their kernels take twice as long. Training an EAGLE-3 head of SmolLM2 in
    bfloat16 takes 1.36 s per step of 1,300 x 3 positions, and 1.07 s with the rule (two cores, AVX-512 BF16, jax 0.10).
    """
    return _matmul_many_rows_on_cpu(x, weight, dtype)


def _matmul_forward(x: Array, weight: Array, dtype) -> tuple[Array, tuple[Array, Array]]:
    return _matmul_many_rows_on_cpu(x, weight, dtype), (x, weight)


def _matmul_backward(dtype, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = residuals
    gradient = gradient.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    of_x = product(gradient, weight, (((x.ndim - 1,), (0,)), ((), ())))
    of_weight = product(gradient, x, ((rows, rows), ((), ())))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_matmul_many_rows.defvjp(_matmul_forward, _matmul_backward)
