"""The kernel for weights with scales per group, against NumPy in float64 and by the TPU compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels.grouped_matmul import grouped_matmul, unsupported_reason


@pytest.mark.parametrize(
    "outputs, inputs, group, rows",
    [(256, 512, 128, 5), (128, 256, 32, 3), (128, 768, 384, 8), (200, 256, 16, 1)],
)
def test_sums_of_groups_are_scaled(outputs, inputs, group, rows):
    random = np.random.default_rng(0)
    values = random.integers(-7, 8, (outputs, inputs)).astype(np.int8)
    scales = random.random((outputs, inputs // group)).astype(np.float32)
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    expected = x.astype(np.float64) @ (values * np.repeat(scales, group, 1).astype(np.float64)).T
    actual = grouped_matmul(jnp.asarray(x), jnp.asarray(values), jnp.asarray(scales), interpret=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-4)


def test_blocks_cover_many_rows_and_outputs(monkeypatch):
    from specjax.pallas_kernels.grouped_matmul import tpu

    monkeypatch.setattr(tpu, "BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr(tpu, "BLOCK_ROWS", 16)
    random = np.random.default_rng(0)
    values = random.integers(-7, 8, (384, 256)).astype(np.int8)
    scales, x = random.random((384, 4)).astype(np.float32), random.standard_normal((37, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ (values * np.repeat(scales, 64, 1).astype(np.float64)).T
    actual = grouped_matmul(jnp.asarray(x), jnp.asarray(values), jnp.asarray(scales), interpret=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-4)


def test_inputs_are_multiples_of_a_chunk():
    assert unsupported_reason(256, 8) is None and unsupported_reason(768, 2) is None
    assert unsupported_reason(576, 9) == "takes multiples of 128 inputs, not 576"


@pytest.mark.tpu_compile
@pytest.mark.parametrize("values, group", [("int4", 128), ("int8", 32)])
def test_the_tpu_compiler_accepts_the_kernel_and_copies_no_weights(values, group):
    from tpu import devices

    sharding = jax.sharding.SingleDeviceSharding(devices("v5e:2x2")[0])
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    x, scales = shape((8, 1024), jnp.bfloat16), shape((2048, 1024 // group), jnp.float32)
    compiled = jax.jit(grouped_matmul).lower(x, shape((2048, 1024), jnp.dtype(values)), scales).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 17
