"""Experts in the form that a TPU reads, with an interpreted kernel, equal those of a loop with sliced weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays import platforms
from specjax.models.experts import running
from specjax.models.experts.routing import ExpertChoice
from specjax.models.products import from_stack, matmul
from specjax.models.products.transposed import TransposedMatrix, is_stored_by_columns
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat, quantize_rows
from specjax.pallas_kernels.grouped_matmul import grouped_matmul_of

EXPERTS, WIDTH, HIDDEN = 6, 192, 192
FORMATS = {
    "int8": WeightFormat(inputs="int8"),
    "int8-weights": WeightFormat(),
    "mxfp4": WeightFormat(5, "int8", 32),
    "offsets": WeightFormat(4, "int8", 32, has_offsets=True),
}
RNG = np.random.default_rng(0)


def expert(weights, x):
    return matmul(jnp.tanh(matmul(x, weights[0])), weights[1], jnp.float32)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32) * shape[-1] ** -0.5


def matrices(form, *shape):
    weight = quantize_rows(floats(*shape), form)
    offsets = RNG.uniform(size=weight.scales.shape).astype(np.float32) * 0.1 if form.has_offsets else None
    return jax.tree.map(jnp.asarray, QuantizedArray(weight.values, weight.scales, offsets, form.inputs))


def inputs(rows):
    """Return rows, and the choice of two of the first five experts for each."""
    experts = np.stack([RNG.permutation(EXPERTS - 1)[:2] for _ in range(rows)])
    return jnp.asarray(floats(rows, WIDTH)), ExpertChoice(jnp.asarray(experts), jnp.asarray(floats(rows, 2) + 1))


@pytest.fixture
def on_tpu(monkeypatch):
    """Trace the forms of a TPU. Return the shapes of the values that the interpreted kernel reads."""
    calls = []

    def spy(x, values, scales, number):
        calls.append(values.shape)
        return grouped_matmul_of(x, values, scales, number, interpret=True)

    monkeypatch.setattr(from_stack, "grouped_matmul_of", spy)
    monkeypatch.setattr(platforms, "of_program", lambda: "tpu")
    return calls


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("form", "rows"), [("loop", 3), ("blocks", 300)])
@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts(name, form, rows, layers, on_tpu, monkeypatch):
    """The kernel reads groups of one layer for few rows. Elsewhere experts are sliced."""
    count, first = EXPERTS * layers, EXPERTS * (layers - 1)
    weights = matrices(FORMATS[name], count, HIDDEN, WIDTH), matrices(FORMATS[name], count, WIDTH, HIDDEN)
    x, choice = inputs(rows)
    run = functools.partial(running.run_experts, x, choice, weights, EXPERTS, expert, form, first)
    actual = jax.jit(run)()
    reads_stack = FORMATS[name].group is None or (layers == 1 and form == "loop")
    assert on_tpu == ([(count, HIDDEN, WIDTH), (count, WIDTH, HIDDEN)] if reads_stack else [])
    monkeypatch.setattr(platforms, "of_program", lambda: "cpu")
    np.testing.assert_allclose(actual, jax.jit(run)(), atol=2e-5)


def test_gradients_do_not_pass_the_kernel(on_tpu):
    weights = matrices(FORMATS["mxfp4"], EXPERTS, HIDDEN, WIDTH), matrices(FORMATS["mxfp4"], EXPERTS, WIDTH, HIDDEN)
    x, choice = inputs(3)
    loss = lambda x, weights: jnp.sum(running.run_experts(x, choice, weights, EXPERTS, expert) ** 2)
    expanded = tuple(weight.expand() for weight in weights)
    np.testing.assert_allclose(jax.grad(loss)(x, weights), jax.grad(loss)(x, expanded), atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_narrow_experts_are_read_by_columns(rows, stacked, on_tpu, monkeypatch):
    """Results and gradients are those of rows."""
    narrow = 40
    assert is_stored_by_columns((WIDTH * 8, narrow)) and not is_stored_by_columns((narrow, WIDTH * 8))
    weights = jnp.asarray(floats(EXPERTS, narrow, 128)), jnp.asarray(floats(EXPERTS, 128, narrow))
    x, choice = inputs(rows)
    x, by_columns = x[:, :128], []

    def spy(weights, x):
        by_columns.append(isinstance(weights[1], TransposedMatrix) and not isinstance(weights[0], TransposedMatrix))
        return expert(weights, x)

    def run(x, weights):
        if not stacked:
            return running.run_experts(x, choice, weights, EXPERTS, spy)
        two_layers = jax.tree.map(lambda leaf: jnp.concatenate([leaf + 1, jax.lax.stop_gradient(leaf)]), weights)
        return running.run_experts(x, choice, two_layers, EXPERTS, spy, first=EXPERTS, of_layer=weights)

    loss = lambda x, weights: jnp.sum(run(x, weights) ** 2)
    ours = jax.jit(run)(x, weights), jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    assert by_columns and all(by_columns)
    monkeypatch.setattr(platforms, "of_program", lambda: "cpu")
    theirs = jax.jit(lambda *a: run(*a))(x, weights), jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(x, weights)
    assert not all(by_columns)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
