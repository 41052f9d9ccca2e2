"""The kernel for weights with scales per group, against NumPy in float64 and by the TPU compiler."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import module_at

from specjax.pallas_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_of,
    too_wide_reason,
    tpu,
    unsupported_reason,
)


@pytest.mark.parametrize(
    "outputs, inputs, group, rows",
    [(256, 512, 128, 5), (128, 256, 32, 3), (128, 768, 384, 8), (200, 256, 16, 1), (96, 288, 32, 5), (64, 192, 64, 3)],
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
    assert unsupported_reason(576, 9) is None and unsupported_reason(2880, 90) is None  # the last chunk is smaller
    assert unsupported_reason(480, 5) == "takes multiples of 384 inputs in groups of 96, not 480"


def members(group):
    """Return x, three matrices in int8, their scales by group, and the products with each in float64."""
    random = np.random.default_rng(0)
    values = random.integers(-7, 8, (3, 200, 288)).astype(np.int8)
    scales = random.random((3, 288 // group, 200)).astype(np.float32)
    x = random.standard_normal((5, 288)).astype(np.float32)
    weights = values * np.repeat(scales, group, 1).swapaxes(1, 2).astype(np.float64)
    return x, values, scales, np.einsum("ri,eoi->ero", x.astype(np.float64), weights)


def largest_error(module):
    """Return the largest error of the products with each of three matrices."""
    x, values, scales, expected = members(32)
    run = jax.jit(lambda number: module.grouped_matmul_of(x, values, scales, number, interpret=True))
    return max(np.abs(run(jnp.int32(number)) - expected[number]).max() for number in range(3))


def test_one_of_several_matrices():
    assert largest_error(tpu) < 2e-4


@pytest.mark.parametrize(
    ("line", "mutant"),
    [
        ("lambda i, j, n: (n[0], j, 0)", "lambda i, j, n: (0, j, 0)"),
        ("lambda i, j, n: (n[0], 0, j)", "lambda i, j, n: (0, 0, j)"),
        ("if tail:", "if False:"),
    ],
)
def test_mutants_are_caught(line, mutant, tmp_path):
    source = pathlib.Path(tpu.__file__).read_text()
    assert line in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(line, mutant))
    assert largest_error(module_at(path)) > 0.1


def test_whole_numbers_are_summed_exactly():
    random = np.random.default_rng(0)
    x, values = random.integers(-127, 128, (5, 320)), random.integers(-127, 128, (3, 200, 320))
    as_int8 = lambda array: jnp.asarray(array, jnp.int8)
    actual = grouped_matmul_of(as_int8(x), as_int8(values), None, jnp.int32(1), interpret=True)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, x @ values[1].T)


@pytest.mark.parametrize(("chunk", "is_exact"), [(tpu.MAX_CHUNK, True), (4096, False)])
def test_whole_numbers_are_exact_on_chips_without_products_of_int8(chunk, is_exact, monkeypatch):
    """v4 and tpu7x multiply bfloat16 numbers, and a sum of 3,000 products is too large for float32."""
    monkeypatch.setattr(tpu, "core_of_program", lambda: tpu.Core(multiplies_int8=False))
    monkeypatch.setattr(tpu, "MAX_CHUNK", chunk)
    x, values = np.full((2, 3000), 127), np.full((1, 40 if is_exact else 48, 3000), 127)  # two programs
    x[1, 0] = 126  # the sum is odd, which float32 does not have
    as_int8 = lambda array: jnp.asarray(array, jnp.int8)
    actual = grouped_matmul_of(as_int8(x), as_int8(values), None, jnp.int32(0), interpret=True)
    assert actual.dtype == jnp.int32 and np.array_equal(actual, x @ values[0].T) == is_exact


@pytest.mark.parametrize("item, groups, rows", [(1, 1, 256), (2, 1, 256), (2, 448, 64), (4, 112, 16)])
def test_blocks_fit_into_on_chip_memory(item, groups, rows):
    """14,336 inputs: with the sizes of v5e, a v4 has too little memory. Chips with more keep these sizes."""
    small_room, large_room = (tpu.Core(vmem << 20).room for vmem in (16, 64))
    largest = tpu.BlockSizes(rows, 128, 14336, groups, item, 8)
    small, large = (tpu.fit_blocks(largest, room) for room in (small_room, large_room))
    assert small.bytes <= small_room and large.bytes <= large_room
    assert large.rows == rows
    wide = tpu.fit_blocks(largest._replace(outputs=1024), large_room)
    assert wide.outputs % 128 == 0 and wide.bytes <= large_room
    assert tpu.fit_blocks(tpu.BlockSizes(16, 128, 1 << 20, 1, 2, 8), small_room).rows == 16, "the smallest ones"


def test_rows_that_do_not_fit_are_refused():
    """On another device than a TPU it is the smallest on-chip memory that counts."""
    assert too_wide_reason(14336, 1) is None and unsupported_reason(14336, 448) is None
    assert "not rows of 65536 inputs" in too_wide_reason(65536, 1)
    assert "not rows of 65536 inputs" in unsupported_reason(65536, 512)


def test_small_blocks_compute_the_same(monkeypatch):
    monkeypatch.setattr(tpu, "core_of_program", lambda: tpu.Core(1 << 18))
    random = np.random.default_rng(0)
    values = random.integers(-7, 8, (384, 256)).astype(np.int8)
    scales, x = random.random((384, 8)).astype(np.float32), random.standard_normal((37, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ (values * np.repeat(scales, 32, 1).astype(np.float64)).T
    actual = grouped_matmul(jnp.asarray(x), jnp.asarray(values), jnp.asarray(scales), interpret=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("form, rows", [("int8", 256), ("int8-weights", 64), ("mxfp4", 64)])
def test_the_kernel_compiles_for_wide_matrices(topology, form, rows):
    """Matrices of Mixtral 8x7B, 4,096 x 14,336, exceeded the on-chip memory of v4."""
    import tpu as absent
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from specjax.planning.programs import compile_for, device_kind

    mesh = Mesh(np.array(absent.devices(topology)[:1]), ("model",))
    place = NamedSharding(mesh, PartitionSpec())
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=place)
    x = shape((rows, 14336), jnp.int8 if form == "int8" else jnp.bfloat16)
    scales = shape((8, 448, 4096), jnp.float32) if form == "mxfp4" else None
    with device_kind(mesh), jax.default_matmul_precision("highest"):
        lowered = jax.jit(grouped_matmul_of).lower(x, shape((8, 4096, 14336), jnp.int8), scales, shape((), jnp.int32))
    assert compile_for(mesh, lowered).as_text().count("tpu_custom_call") >= 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize("values, group", [("int4", 128), ("int8", 32)])
def test_the_tpu_compiler_accepts_the_kernel_and_copies_no_weights(values, group):
    from tpu import devices

    sharding = jax.sharding.SingleDeviceSharding(devices("v5e:2x2")[0])
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    x, scales = shape((8, 1024), jnp.bfloat16), shape((2048, 1024 // group), jnp.float32)
    compiled = jax.jit(grouped_matmul).lower(x, shape((2048, 1024), jnp.dtype(values)), scales).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 17
