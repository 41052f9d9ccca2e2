"""Arithmetic whose result, to the bit, is the same in every program that holds it.

Compilers keep the order of additions only where they must. XLA on CPU hands long sums to a library whose order goes by
the shape, and with them the exponentials around; LLVM joins a product and a sum into one rounding (FMA) where both
stand in one loop. So here sums have an order that is written down, and products that are added to something are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array

FRACTION = 16  # bits of the fixed-point numbers in `power_of_two`
LOG2_E = 1.4426950408889634
LARGEST = 2.2e4  # of x in exp(x), for its fixed-point number to have 32 bits
SMALLEST = -126  # exponent of the smallest normal float32; what is below counts as 0


def fixed_point(x: Array) -> Array:
    """int32 of float32 x: its value times log2(e) in steps of 2 ** -FRACTION; beyond LARGEST either way, that of it."""
    return jnp.round(jnp.clip(x, -LARGEST, LARGEST) * np.float32(LOG2_E * (1 << FRACTION))).astype(jnp.int32)


def power_of_two(z: Array, exponent: Array | int = 0) -> Array:
    """float32: 2 ** (z / 2 ** FRACTION - exponent) of int32 z, in integers but for an exact last product.

    2 ** f for f in [0, 1) is a polynomial of the fourth degree in 16 bits, off by 4e-5 of itself at most. For another
    integer `exponent` the result is the same but for a power of two: so a softmax may change its mind about the largest
    score.
    """
    f = jax.lax.bitcast_convert_type(z & ((1 << FRACTION) - 1), jnp.uint32)
    sixteen_bits = lambda c: np.uint32(round(c * (1 << FRACTION)))
    y = jnp.full_like(f, sixteen_bits(POLYNOMIAL[0]))
    for c in POLYNOMIAL[1:]:
        y = sixteen_bits(c) + ((y * f) >> FRACTION)  # each factor has 16 bits
    y = (1 << FRACTION) + ((y * f) >> FRACTION)
    return y.astype(jnp.float32) * two_to((z >> FRACTION) - exponent - FRACTION)


POLYNOMIAL = 0.01342668, 0.05224247, 0.24128020, 0.69304484  # of f ** 4 to f; the constant is 1


def two_to(n: Array) -> Array:
    """float32 2 ** n of int32 n; 0 for n below SMALLEST, the largest power for n above 127."""
    bits = jnp.clip(n, SMALLEST - 1, 127) + (1 - SMALLEST)
    return jax.lax.bitcast_convert_type(bits << 23, jnp.float32)


def sum_in_order(x: Array) -> Array:
    """float32[...]: the sum of x [..., n], first the terms of either half one after another.

    A reduction of two arrays at once, which no library takes over and no compiler may reorder.
    """
    half = x.shape[-1] // 2
    zero = np.float32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    first, second = jax.lax.reduce((x[..., :half], x[..., half : 2 * half]), (zero, zero), add, (x.ndim - 1,))
    total = first + second
    return total + x[..., -1] if x.shape[-1] % 2 else total


TILE = 128
"""Rows of what is summed up on TPU, as many as a piece of a prompt has. Fewer cost no less where the weights are what
takes the time."""


def in_tiles(sums: Callable[[Array], Array], x: Array, *, in_loop: bool = False) -> Array:
    """`sums(rows [TILE, D]) -> [TILE, ...]` of all rows of x [..., D], as many at a time; the missing ones are zero.

    A compiler chooses by the shape how it cuts a sum, and here there is one shape. The barriers keep it from seeing
    which rows are used, and from joining what stands around, which may be of another shape.

    in_loop: not for products. One in a loop is cut otherwise than alone, where a layer's weights are cut out of their
    stack within it, so several tiles are written out.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    tiles = jnp.pad(rows, ((0, -count % TILE), (0, 0))).reshape(-1, TILE, x.shape[-1])
    one = lambda rows: jax.lax.optimization_barrier(sums(jax.lax.optimization_barrier(rows)))
    y = jax.lax.map(one, tiles) if in_loop and len(tiles) > 1 else jnp.stack([one(rows) for rows in tiles])
    return y.reshape(-1, *y.shape[2:])[:count].reshape(*x.shape[:-1], *y.shape[2:])


def as_bfloat16(x: Array) -> Array:
    """float32 of x rounded to bfloat16, also where the compiler knows more digits of a bfloat16 x than these."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def exact_factor(x: Array) -> Array:
    """float32 x to 16 bits: its product with a bfloat16 is exact, so that it makes no difference how that is added."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=15)


def root_mean_square(x: Array, eps: float) -> Array:
    """float32[..., 1] of bfloat16 x [..., D]: 1 / sqrt(mean(x ** 2) + eps). The squares are exact.

    The root is apart from the sum and product before it: in one loop with these, XLA on CPU takes it otherwise in
    vectors than in what is left of a vector (since jax 0.12). On TPU it is of a tile too, never of one number.
    """
    size, y = x.shape[-1], as_bfloat16(x)

    def root(squares):
        mean = (sum_in_order(squares) + np.float32(size * eps)) * np.float32(1 / size)
        return jax.lax.rsqrt(jax.lax.optimization_barrier(mean))

    tiles = functools.partial(in_tiles, root, in_loop=True)  # many, where each head of each token has a norm
    return jax.lax.platform_dependent(y * y, tpu=tiles, default=root)[..., None]


@jax.custom_jvp
def sigmoid(x: Array) -> Array:
    """float32 1 / (1 + exp(-x)) of float32 x. Integers have no derivative, so it is said."""
    return 1 / (1 + power_of_two(fixed_point(-x)))


@sigmoid.defjvp
def _derivative(primals, tangents):
    y = sigmoid(*primals)
    return y, y * (1 - y) * tangents[0]


def silu(x: Array) -> Array:
    """float32 x * sigmoid(x) of bfloat16 x."""
    y = as_bfloat16(x)
    return y * sigmoid(y)


def gelu(x: Array) -> Array:
    """float32, the approximation of GELU by tanh, of bfloat16 x: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))."""
    y = as_bfloat16(x)
    cubic = exact_factor(np.float32(0.044715) * (y * y))  # rounded, so no product that a sum could take in
    return y * sigmoid(np.float32(2 * (2 / np.pi) ** 0.5) * y * (1 + cubic))
