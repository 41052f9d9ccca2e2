"""The index of the largest entry, by blocks and plainly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays.indexing import BLOCK, first_largest

VOCAB = 64 * BLOCK


def rows(vocab):
    """Ties within a block and across blocks, rows of one value, infinities, and the largest at either end."""
    x = np.array(jax.random.normal(jax.random.key(0), (12, vocab)))
    x[0, [7, 9, 700, vocab - 1]] = 9.0
    x[1, [700, vocab - 3]] = 9.0
    x[2] = 0.0
    x[3] = -np.inf
    x[4, [300, 500]] = np.inf
    x[5, BLOCK : 2 * BLOCK] = 9.0
    x[6, vocab - 1], x[7, 0] = 9.0, 9.0
    x[8] = np.where(np.arange(vocab) == 1234, -1.0, -np.inf)
    x[9] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    return x


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 1, VOCAB - BLOCK])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_numpys_argmax(vocab, dtype):
    x = jnp.asarray(rows(vocab), dtype)
    index = jax.jit(first_largest)(x.reshape(3, 4, vocab))
    assert index.dtype == jnp.int32
    np.testing.assert_array_equal(index, np.argmax(np.asarray(x, np.float32), -1).reshape(3, 4))


def test_rows_of_a_vmap():
    x = jnp.asarray(rows(VOCAB))
    np.testing.assert_array_equal(jax.vmap(first_largest)(x), np.argmax(x, -1))


def test_a_large_vocabulary_is_read_by_blocks_on_cpu_and_as_it_lies_elsewhere():
    x = jax.ShapeDtypeStruct((4, VOCAB), jnp.float32)
    lowered = {p: jax.jit(first_largest).trace(x).lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu")}
    assert f"tensor<4x{VOCAB // BLOCK}x{BLOCK}xf32>" in lowered["cpu"]
    assert f"x{BLOCK}xf32>" not in lowered["tpu"]
