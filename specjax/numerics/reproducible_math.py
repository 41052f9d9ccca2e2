"""Arithmetic with bit-identical results in every compiled program.

Compilers may reorder additions. On CPU, XLA passes long sums to a library whose order depends on the shape, and fuses
the exponentials around them. Inside one loop, LLVM contracts a product and a sum into one rounding (FMA). Here, sums
have a fixed order, and products that are summands are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array

FRACTION = 16  # fractional bits of the fixed-point numbers in `power_of_two`
LOG2_E = 1.4426950408889634
LARGEST = 2.2e4  # largest |x| in exp(x) whose fixed-point number fits 32 bits
SMALLEST = -126  # exponent of the smallest normal float32; smaller numbers become 0


def fixed_point(x: Array) -> Array:
    """Return int32: float32 x times log2(e) in steps of 2 ** -FRACTION, with x clipped to +-LARGEST."""
    return jnp.round(jnp.clip(x, -LARGEST, LARGEST) * np.float32(LOG2_E * (1 << FRACTION))).astype(jnp.int32)


def power_of_two(z: Array, exponent: Array | int = 0) -> Array:
    """Return float32 2 ** (z / 2 ** FRACTION - exponent) of int32 z, in integers except for an exact last product.

    A polynomial of degree four in 16-bit integers computes 2 ** f for f in [0, 1), with a relative error of at most
    4e-5. Another integer `exponent` only changes the result by a power of two, so a softmax may rescale when its
    maximum changes.
    """
    f = jax.lax.bitcast_convert_type(z & ((1 << FRACTION) - 1), jnp.uint32)
    sixteen_bits = lambda c: np.uint32(round(c * (1 << FRACTION)))
    y = jnp.full_like(f, sixteen_bits(POLYNOMIAL[0]))
    for c in POLYNOMIAL[1:]:
        y = sixteen_bits(c) + ((y * f) >> FRACTION)  # each factor has 16 bits
    y = (1 << FRACTION) + ((y * f) >> FRACTION)
    return y.astype(jnp.float32) * two_to((z >> FRACTION) - exponent - FRACTION)


POLYNOMIAL = 0.01342668, 0.05224247, 0.24128020, 0.69304484  # coefficients of f ** 4 to f; the constant is 1


def two_to(n: Array) -> Array:
    """Return float32 2 ** n of int32 n: 0 for n below SMALLEST, and 2 ** 127 for n above 127."""
    bits = jnp.clip(n, SMALLEST - 1, 127) + (1 - SMALLEST)
    return jax.lax.bitcast_convert_type(bits << 23, jnp.float32)


def sum_in_order(x: Array) -> Array:
    """Sum x [..., n] over its last axis in a fixed order: float32[...]. Each half is summed term by term.

    The reduction runs over two arrays in parallel. The compiler neither replaces it by a library call nor reorders it.
    """
    half = x.shape[-1] // 2
    zero = np.float32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    first, second = jax.lax.reduce((x[..., :half], x[..., half : 2 * half]), (zero, zero), add, (x.ndim - 1,))
    total = first + second
    return total + x[..., -1] if x.shape[-1] % 2 else total


TILE = 128
"""Rows of a product on TPU, the number of a prefill chunk. Where reading the weights dominates, fewer rows are no
faster.
"""


def in_tiles(sums: Callable[[Array], Array], x: Array, *, in_loop: bool = False) -> Array:
    """Apply `sums(rows [TILE, D]) -> [TILE, ...]` to all rows of x [..., D] in tiles of one size, padded with zeros.

    A compiler chooses the split of a sum by its shape, so one shape gives one split. The barriers hide from the
    compiler which rows are used. They also prevent fusion with neighbouring operations, whose shapes may differ.

    Args:
      in_loop: run the tiles in a loop instead of unrolling them. Do not use it for products: a product inside a loop is
        split differently from one outside, because the layer's weights are sliced out of their stack in the loop.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    tiles = jnp.pad(rows, ((0, -count % TILE), (0, 0))).reshape(-1, TILE, x.shape[-1])
    one = lambda rows: jax.lax.optimization_barrier(sums(jax.lax.optimization_barrier(rows)))
    y = jax.lax.map(one, tiles) if in_loop and len(tiles) > 1 else jnp.stack([one(rows) for rows in tiles])
    return y.reshape(-1, *y.shape[2:])[:count].reshape(*x.shape[:-1], *y.shape[2:])


def as_bfloat16(x: Array) -> Array:
    """Round x to bfloat16 and return float32, even where the compiler keeps more digits of a bfloat16 x."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def exact_factor(x: Array) -> Array:
    """Round float32 x to 16 bits. Its product with a bfloat16 is exact, so fused and separate additions agree."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=15)


def root_mean_square(x: Array, eps: float) -> Array:
    """Return 1 / sqrt(mean(x ** 2) + eps) as float32[..., 1] of bfloat16 x [..., D]. The squares are exact.

    A barrier separates the root from the sum. In one loop with them, XLA on CPU computes the root of the last elements
    of a vector differently (since jax 0.12). On TPU the root is always computed on a tile, never on one number.
    """
    size, y = x.shape[-1], as_bfloat16(x)

    def root(squares):
        mean = (sum_in_order(squares) + np.float32(size * eps)) * np.float32(1 / size)
        return jax.lax.rsqrt(jax.lax.optimization_barrier(mean))

    tiles = functools.partial(in_tiles, root, in_loop=True)  # there are many if each head of each token has a norm
    return jax.lax.platform_dependent(y * y, tpu=tiles, default=root)[..., None]


@jax.custom_jvp
def sigmoid(x: Array) -> Array:
    """Return float32 1 / (1 + exp(-x)) of float32 x. The derivative is given explicitly because integers have none."""
    return 1 / (1 + power_of_two(fixed_point(-x)))


@sigmoid.defjvp
def _derivative(primals, tangents):
    y = sigmoid(*primals)
    return y, y * (1 - y) * tangents[0]


def silu(x: Array) -> Array:
    """Return float32 x * sigmoid(x) of bfloat16 x."""
    y = as_bfloat16(x)
    return y * sigmoid(y)


def gelu(x: Array) -> Array:
    """Return float32 GELU of bfloat16 x by tanh, x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))."""
    y = as_bfloat16(x)
    cubic = exact_factor(np.float32(0.044715) * (y * y))  # rounded, so the compiler cannot fuse the product into a sum
    return y * sigmoid(np.float32(2 * (2 / np.pi) ** 0.5) * y * (1 + cubic))
