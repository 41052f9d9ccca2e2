"""Products of tokens and weights, and rows of tables, in the form that the compiler of each backend is quickest with.

Weights are kept as [out, in], the order of the checkpoints. Measured on a 2-core CPU, one token, SmolLM2 in float32:
the matrix-vector products read 18 GB/s in this order and 13 GB/s as [in, out].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.numerics import reproducible_math
from specjax.types import Array

TILE_ROWS = 8


def project(x: Array, weight: Array, dtype=None) -> Array:
    """x [..., I] times the transpose of weight [O, I]: [..., O], of `dtype` or that of x."""
    plain, cpu, tpu = (functools.partial(f, dtype=dtype) for f in (_project, _project_on_cpu, _project_on_tpu))
    if x.size == x.shape[-1] and x.dtype == jnp.float32:  # one token: a product with a vector
        cpu = plain
    if x.size >= MANY_ROWS * x.shape[-1]:
        # Neither forward-mode derivatives nor a caller's own `shard_map` go with a rule for derivatives.
        has_rule = x.dtype == jnp.bfloat16 and not jax.sharding.get_abstract_mesh().manual_axes
        cpu = functools.partial(_many_in_their_dtype if has_rule else _project_many_on_cpu, dtype=dtype)
    return jax.lax.platform_dependent(x, weight, cpu=cpu, tpu=tpu, default=plain)


def rows_of(table: Array, ids: Array) -> Array:
    """[..., D]: rows of a table [V, D], by int32[...].

    XLA on CPU takes bfloat16 rows from the whole table in float32, which it makes once, ahead of a loop: before each
    round of a drafter that drafts in one. A chain of three by an EAGLE-3 head of SmolLM2 took 42 ms so, and takes 3.5
    where the table is tied to the ids, so that no loop knows it before (two cores with AVX-512 BF16, jax 0.10).
    """
    plain = lambda table, ids: table[ids]
    if table.dtype != jnp.bfloat16:
        return plain(table, ids)
    tied = lambda table, ids: plain(*jax.lax.optimization_barrier((table, ids)))
    return jax.lax.platform_dependent(table, ids, cpu=tied, default=plain)


MANY_ROWS = 512
"""From which on a product on CPU is quicker as it is written, with rows in the result: what follows need not transpose.
SmolLM2, 4 x 512 tokens: float32 4.1 s, 3.4 as written, bfloat16 2.9 and 2.4; 128 tokens 0.19 and 0.22, 0.13 and 0.17
(two cores with AVX-512, jax 0.10)."""


PIECE = 2048 if jax.__version_info__ < (0, 11) else 1024
"""Terms of a sum that every kernel takes in one go: XLA's on CPU cut longer ones for some numbers of rows. Pieces of
the weights are copies: SmolLM2, of whose sums the longest has 1,536 terms, takes 62 ms a pass whole and 90 in pieces
(two cores with AVX-512, jax 0.10)."""


LEAST_ROWS = 2 if jax.__version_info__ < (0, 12) else 16
"""Of a bfloat16 product on CPU. Alone a row is multiplied as a vector, for which there is no kernel (190 ms a pass of
SmolLM2, 24 with a second one). Since jax 0.12 up to 8 rows are summed in another order than more are, and more slowly:
SmolLM2's head 5.7 ms for 2 rows and 5.4 for 16, a matrix of its MLP 0.21 and 0.15 (two cores with AVX-512)."""


def _quick_rows(count: int) -> int:
    """How many rows a float32 product on CPU takes, of which `count` are wanted: kernels are of 4, 8 and 16.

    SmolLM2, passes over one token: 5 tokens 1.67, 7 1.71, 8 1.45; 9 2.16, 12 2.18, 15 2.57, 16 1.97; 17 2.62, 24 2.94,
    26 4.17, 32 3.18 (two cores with AVX-512, jax 0.10).
    """
    return max(2, 1 << (count - 1).bit_length()) if count <= 16 else -(-count // 8) * 8


def _may_be_split(x: Array) -> bool:
    """Whether rows of a batch may lie on several devices: to pad them would be to move them."""
    return x.ndim > 2 and x.shape[0] > 1 and jax.device_count() > 1


def same_project(x: Array, weight: Array, dtype=None) -> Array:
    """As `project`, with the same bits for a row whatever others there are: on TPU in tiles of rows, so that every pass
    has the same products; elsewhere in pieces that every kernel sums up in one go."""
    tiles, pieces = (functools.partial(f, dtype=dtype) for f in (_project_tiles, _project_pieces))
    return jax.lax.platform_dependent(x, weight, tpu=tiles, default=pieces)


def _project_tiles(x: Array, weight: Array, dtype) -> Array:
    return reproducible_math.in_tiles(lambda rows: _project(rows, weight, dtype), x)


def _project_pieces(x: Array, weight: Array, dtype) -> Array:
    if x.shape[-1] <= PIECE:
        return _project_piece(x, weight, dtype)
    parts = [
        _project_piece(x[..., start : start + PIECE], weight[:, start : start + PIECE], jnp.float32)
        for start in range(0, x.shape[-1], PIECE)
    ]
    return functools.reduce(jnp.add, parts).astype(dtype or x.dtype)


def _project_piece(x: Array, weight: Array, dtype) -> Array:
    """In one form for any number of rows."""
    cpu, plain = (functools.partial(f, dtype=dtype) for f in (_project_on_cpu, _project))
    return jax.lax.platform_dependent(x, weight, cpu=cpu, default=plain)


def _project(x: Array, weight: Array, dtype) -> Array:
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def _project_on_tpu(x: Array, weight: Array, dtype) -> Array:
    """At least 8 rows on a device, a full tile: the compiler keeps fewer off the matrix unit.

    Llama 3 8B over four v5e chips, one token by the compiler's schedule: 673,000 cycles per layer and 1,840,000 for the
    head without, 394,000 and 688,000 with padding, 376,000 and 667,000 with the barriers that keep it apart.
    """
    tokens = x.shape[-2] if x.ndim > 1 else 1
    batch = x.size // (x.shape[-1] * tokens * _parts_of_batch())
    wanted = -(-TILE_ROWS // max(batch, 1))
    if tokens >= wanted:
        return _project(x, weight, dtype)
    # More tokens, not more rows of the batch: these may lie on several devices.
    some = x.reshape(*x.shape[:-2], tokens, x.shape[-1])
    some = jnp.pad(some, [(0, 0)] * (some.ndim - 2) + [(0, wanted - tokens), (0, 0)])
    y = jax.lax.optimization_barrier(_project(jax.lax.optimization_barrier(some), weight, dtype))
    return y[..., :tokens, :].reshape(*x.shape[:-1], -1)


def _parts_of_batch() -> int:
    """Over how many devices the rows of the batch are split in the program that is traced; 1 where arrays are local."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else dict(mesh.shape).get("data", 1)


def _project_on_cpu(x: Array, weight: Array, dtype) -> Array:
    """The weight as the left operand and a float32 result, which XLA's fast CPU kernels ask for.

    SmolLM2, 2 cores with AMX, 500 cached tokens, ms for 1 / 8 / 16 / 32 new tokens: float32 35 / 58 / 76 / 111,
    bfloat16 24 / 32 / 41 / 62. A bfloat16 result is computed by plain loops (about 180 ms), the weight on the right
    costs half as much again. Few rows take others along (`LEAST_ROWS`, `_quick_rows`). The barriers keep the compiler
    from folding transpose and conversion into the product.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    least = LEAST_ROWS if x.dtype == jnp.bfloat16 else 2 if _may_be_split(x) else _quick_rows(count)
    rows = jax.lax.optimization_barrier(jnp.pad(rows, ((0, max(0, least - count)), (0, 0))))
    y = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y)[:, :count].T.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def _project_many_on_cpu(x: Array, weight: Array, dtype) -> Array:
    """With a float32 result, as above."""
    return _project(x, weight, jnp.float32).astype(dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _many_in_their_dtype(x: Array, weight: Array, dtype) -> Array:
    """The same, of which derivatives are products in the dtype of x too.

    Without that, they are float32's, whose kernels take twice as long: a step of training an EAGLE-3 head of SmolLM2,
    1,300 rounds of three, takes 1.36 s in bfloat16, and 1.07 s so (two cores with AVX-512 BF16, jax 0.10).
    """
    return _project_many_on_cpu(x, weight, dtype)


def _many_forward(x: Array, weight: Array, dtype) -> tuple[Array, tuple[Array, Array]]:
    return _project_many_on_cpu(x, weight, dtype), (x, weight)


def _many_backward(dtype, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    gradient = gradient.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    of_x = product(gradient, weight, (((x.ndim - 1,), (0,)), ((), ())))
    of_weight = product(gradient, x, ((rows, rows), ((), ())))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_many_in_their_dtype.defvjp(_many_forward, _many_backward)
