"""Linear functions with loops that JAX cannot transpose, against matrix products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays.linear_maps import apply_linear
from specjax.arrays.modes import jit

MATRIX = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
POINT = jnp.array([0.5, -1.0, 2.0, 0.25])


def by_rows(matrix, rows, x):
    """Return the product with the first rows of a matrix, in a loop whose number of turns is data."""
    return jax.lax.fori_loop(0, rows, lambda i, y: y.at[i].set(jnp.dot(matrix[i], x)), jnp.zeros(len(matrix)))


def product(matrix, x, rows, transpose=None):
    """Return {"y": the product}. The inputs are a dict too."""
    back = transpose or (lambda known, y: {"x": by_rows(known[0].T, 4, jnp.where(jnp.arange(3) < known[1], y["y"], 0))})
    forward = lambda known, inputs: {"y": by_rows(*known, inputs["x"])}
    return apply_linear(forward, back, (matrix, rows), {"x": x})["y"]


@jax.custom_jvp
def cubes(matrix, x):
    return by_rows(matrix, 2, x**3)


@cubes.defjvp
def _cubes_jvp(primals, tangents):
    (matrix, x), (_, of_x) = primals, tangents
    return cubes(matrix, x), product(matrix, 3 * x**2 * of_x, 2)


def dense(matrix, x):
    return jnp.where(jnp.arange(3) < 2, matrix @ x**3, 0)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_both_modes():
    of = lambda f: lambda x: f(jnp.asarray(MATRIX), x)
    direction, wanted = jnp.array([1.0, 2.0, -1.0, 0.5]), jnp.array([1.0, -2.0, 3.0])
    close(jax.jvp(of(cubes), (POINT,), (direction,))[1], jax.jvp(of(dense), (POINT,), (direction,))[1])
    close(jax.jit(jax.linearize(of(cubes), POINT)[1])(direction), jax.jvp(of(dense), (POINT,), (direction,))[1])
    close(jax.vjp(of(cubes), POINT)[1](wanted)[0], jax.vjp(of(dense), POINT)[1](wanted)[0])
    close(jax.jacrev(of(cubes))(POINT), jax.jacfwd(of(dense))(POINT))
    close(jax.jacfwd(of(cubes))(POINT), jax.jacrev(of(dense))(POINT))
    close(jax.hessian(lambda x: jnp.sum(of(cubes)(x)))(POINT), jax.hessian(lambda x: jnp.sum(of(dense)(x)))(POINT))


def test_a_linear_function_itself_is_linear_in_its_inputs():
    f = lambda x: product(jnp.asarray(MATRIX), x, 3)
    close(f(POINT), MATRIX @ POINT)
    close(jax.jacrev(f)(POINT), MATRIX)
    close(jax.linear_transpose(f, POINT)(jnp.array([1.0, 2, 3]))[0], MATRIX.T @ jnp.array([1.0, 2, 3]))
    of_matrix = lambda matrix: jnp.sum(product(matrix, POINT, 3))
    close(jax.jvp(of_matrix, (jnp.asarray(MATRIX),), (jnp.ones((3, 4)),))[1], 3 * POINT.sum())


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0), (1, 1)])
def test_batches(axes):
    """Matrices, inputs or both have a batch axis, also in gradients."""
    stack = lambda x, axis: x if axis is None else jnp.stack([x, 2 * x], axis)
    args = stack(jnp.asarray(MATRIX), axes[0]), stack(POINT, axes[1])
    for gradient in (lambda f: f, lambda f: jax.grad(lambda *args: jnp.sum(f(*args)), 1)):
        actual, expected = (jax.jit(jax.vmap(gradient(f), axes))(*args) for f in (cubes, dense))
        close(actual, expected)
    total = lambda f: lambda x: jnp.sum(jax.vmap(f, axes)(args[0], x))
    close(jax.grad(total(cubes))(args[1]), jax.grad(total(dense))(args[1]))


def test_in_a_scan():
    def run(f):
        step = lambda x, scale: (x + jnp.sum(f(scale * MATRIX, x)) / 100, None)
        return lambda x: jnp.sum(jax.lax.scan(step, x, jnp.array([0.5, 1.5]))[0])

    close(jax.jit(jax.grad(run(cubes)))(POINT), jax.grad(run(dense))(POINT))


def test_another_transpose_gives_another_gradient():
    wrong = lambda known, y: {"x": 2 * (known[0].T @ y["y"])}
    gradient = jax.grad(lambda x: jnp.sum(product(jnp.asarray(MATRIX), x, 3, wrong)))(POINT)
    assert np.abs(gradient - MATRIX.sum(0)).max() > 0.1


def test_products_of_derivatives_keep_the_modes_of_the_caller():
    """JAX traces both functions again when it compiles, where the caller's precision is no longer set."""
    program = jit(jax.grad(lambda x: jnp.sum(cubes(MATRIX, x)))).lower(POINT).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert products and all("HIGHEST" in line for line in products)
