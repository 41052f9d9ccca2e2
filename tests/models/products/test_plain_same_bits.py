"""Products of a row do not depend on the other rows, even for rows that kernels cannot sum in one pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu import devices

from specjax.errors import UsageError
from specjax.models import LlamaConfig, make_model
from specjax.models.products import plain as matmul
from specjax.numerics import reproducible_math


def test_long_rows():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((600, 8192), (96, 8192)))
    run = jax.jit(lambda x: matmul.matmul_same_bits(x, weight, jnp.float32))
    full = np.asarray(run(x))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(full, exact, atol=0.02)
    for rows in (1, 2, 9, 16, 24):
        np.testing.assert_array_equal(run(x[:rows]), full[:rows])


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_a_product_is_one_in_every_form(dtype, error):
    """All forms of the product on CPU are right, for one row, few and many; the result has the dtype of the rows or
    another."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((4, 150, 64), (96, 64)))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for some in (np.s_[:1, :1], np.s_[:2, :3], np.s_[:]):
        for expected in (None, "float32"):
            actual = matmul.matmul(x[some], weight, expected)
            assert actual.dtype == (expected or dtype)
            np.testing.assert_allclose(np.asarray(actual, np.float64), exact[some], atol=error)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.01)])
@pytest.mark.parametrize("wanted", [None, "float32"])
def test_derivatives_of_many_rows_are_products_in_their_dtype(dtype, error, wanted):
    rng = np.random.default_rng(0)
    x, weight, out = (jnp.asarray(rng.normal(size=size), dtype) for size in ((4, 150, 64), (96, 64), (4, 150, 96)))

    @jax.jit
    def derivatives(x, weight):
        return jax.grad(lambda x, w: jnp.sum(matmul.matmul(x, w, wanted) * out), (0, 1))(x, weight)

    exact = [np.asarray(value, np.float64) for value in (x, weight, out)]
    exact = [exact[2] @ exact[1], np.einsum("bto,bti->oi", exact[2], exact[0])]
    for actual, value, of in zip(derivatives(x, weight), exact, (x, weight), strict=True):
        assert (actual.dtype, actual.shape) == (of.dtype, of.shape)
        np.testing.assert_allclose(np.asarray(actual, np.float64), value, atol=error * np.abs(value).max())
    operands = re.findall(
        r"dot_general .*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", derivatives.lower(x, weight).as_text()
    )
    assert set(operands) == {({"float32": "f32", "bfloat16": "bf16"}[dtype],) * 2}


def test_many_rows_go_with_forward_mode_and_with_a_callers_shard_map():
    """Float32 supports forward mode; over a caller's own axes the derivatives are the plain ones."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((600, 16), (8, 16)))
    out, tangent = jax.jvp(lambda x: matmul.matmul(x, weight), (x,), (x,))
    np.testing.assert_allclose(tangent, out, rtol=1e-5)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    rows, full = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)

    def loss(x, weight):
        outputs = lambda x, w: jax.lax.psum(jnp.sum(matmul.matmul(x, w, jnp.float32)), "data")
        return jax.shard_map(outputs, mesh=mesh, in_specs=(rows, full), out_specs=full)(x, weight)

    actual = jax.jit(jax.grad(loss, 1))(x, weight)
    np.testing.assert_allclose(np.asarray(actual[0], np.float32), np.asarray(x, np.float32).sum(0), rtol=0.02, atol=0.1)


def products_of(text: str) -> set[str]:
    """Return shape, windows, their number and emitter of each product in a program compiled for a TPU."""
    actual = re.findall(
        r"= (\S+) fusion\([^\n]*dot_general[^\n]*?\"window_config\":\{([^\n]*?),\"estimated_cycles[^\n]*?"
        r"(\"iteration_bounds\":\[[^]]*\])[^\n]*emitter\":\"(\w+)",
        text,
    )
    return {str(one) for one in actual}


@pytest.mark.tpu_compile
def test_on_a_tpu_all_passes_have_the_same_products():
    (device, *_) = devices("v5e:2x2")
    place = jax.sharding.SingleDeviceSharding(device)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=place)
    layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)

    def compiled(project, rows):
        """Compile a product with the weight of a layer, which is in a stack."""
        run = jax.jit(lambda x, weights, layer: jnp.tanh(project(jnp.square(x), weights[layer])))
        return products_of(run.lower(shape(1, rows, 2048), shape(2, 4096, 2048), layer).compile().as_text())

    (expected,) = compiled(matmul.matmul_same_bits, 1)
    for rows in (2, 33, 128, 300):  # the last in three tiles
        assert compiled(matmul.matmul_same_bits, rows) == {expected}
    # The mutant is the product of other passes, which is cut otherwise for more rows.
    assert len(set.union(*(compiled(matmul.matmul, rows) for rows in (1, 64, 128)))) > 1


@pytest.mark.tpu_compile
def test_on_a_tpu_all_passes_have_the_same_roots():
    (device, *_) = devices("v5e:2x2")
    place = jax.sharding.SingleDeviceSharding(device)
    run = jax.jit(lambda x: jnp.tanh(reproducible_math.root_mean_square(jnp.square(x), 1e-5)))
    for rows in (1, 33, 1000):
        x = jax.ShapeDtypeStruct((1, rows, 512), jnp.bfloat16, sharding=place)
        actual = re.findall(r"= (\S+?)\{\S* rsqrt\(", run.lower(x).compile().as_text())
        assert actual == ["f32[128]"]


def test_tiles_are_products_of_all_rows():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 50, 7), (5, 7)))
    for rows in (x, x[:1], x[0]):
        for in_loop in (False, True):
            got = jax.jit(
                lambda rows, w=in_loop: reproducible_math.in_tiles(lambda one: one @ weight.T, rows, in_loop=w)
            )(rows)
            np.testing.assert_allclose(got, rows @ weight.T, atol=1e-5)
    sums = reproducible_math.in_tiles(reproducible_math.sum_in_order, x)
    np.testing.assert_allclose(sums, x.sum(-1), atol=1e-5)


def test_float32_is_refused():
    config = LlamaConfig(61, 32, 1, 2, 2, 16, 40, same_bits=True)
    with pytest.raises(UsageError, match='same_bits needs dtype "bfloat16", not "float32"'):
        make_model(config)
