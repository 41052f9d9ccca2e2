"""Gradients of mixtures of experts are those of a sum over all experts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive

from specjax import models
from specjax.models.experts import feed
from specjax.models.experts.routing import ExpertChoice, Routing, choose
from specjax.models.experts.running import run_experts
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.products import matmul
from specjax.numerics.quantized_array import WeightFormat, expand_rows, quantize_rows

EXPERTS, WIDTH = 6, 8


def expert(weights, x):
    """A product, an activation and a bias."""
    matrix, bias = weights
    return jax.nn.silu(x @ matrix.T) + bias


def inputs(rows, layers=1):
    keys = jax.random.split(jax.random.key(rows), 4)
    x, router = jax.random.normal(keys[0], (rows, WIDTH)), jax.random.normal(keys[1], (EXPERTS, WIDTH))
    matrices = jax.random.normal(keys[2], (layers * EXPERTS, WIDTH, WIDTH)) * WIDTH**-0.5
    return x, router, (matrices, jax.random.normal(keys[3], (layers * EXPERTS, WIDTH)))


def choice_of(x, router):
    return choose(x @ router.T, Routing(2, normalized=True))


def of_all(x, choice, weights):
    """Return the sum over all experts, most of them with weight 0."""
    shares = jnp.zeros((len(x), EXPERTS)).at[jnp.arange(len(x))[:, None], choice.experts].set(choice.weights)
    return jnp.einsum("re,erd->rd", shares, jax.vmap(expert, (0, None))(weights, x))


@pytest.mark.parametrize(
    ("form", "rows"), [("loop", 5), ("blocks", 5), ("blocks", 150), ("gather", 5), exhaustive("loop", 150)]
)
def test_gradients_of_rows_router_and_experts(form, rows):
    x, router, weights = inputs(rows)
    wanted = jax.random.normal(jax.random.key(9), (rows, WIDTH))

    def loss(run):
        return lambda x, router, weights: jnp.sum(run(x, choice_of(x, router), weights) * wanted)

    ours = loss(lambda x, choice, weights: run_experts(x, choice, weights, EXPERTS, expert, form=form))
    actual, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(x, router, weights) for f in (ours, loss(of_all)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), actual, expected)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(actual))


def test_experts_of_other_layers_have_no_gradient():
    x, router, weights = inputs(5, layers=3)
    choice = choice_of(x, router)
    run = lambda weights, first: jnp.sum(run_experts(x, choice, weights, EXPERTS, expert, first=first) ** 2)
    actual = jax.jit(jax.grad(run))(weights, 2 * EXPERTS)
    of_layer = jax.tree.map(lambda leaf: leaf[2 * EXPERTS :], weights)
    expected = jax.grad(lambda weights: jnp.sum(of_all(x, choice, weights) ** 2))(of_layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[2 * EXPERTS :], b, rtol=1e-5, atol=2e-5), actual, expected)
    assert all(not np.any(leaf[: 2 * EXPERTS]) for leaf in jax.tree.leaves(actual))


def test_pairs_without_an_expert_have_no_gradient():
    x, router, weights = inputs(5)
    choice = choice_of(x, router)
    cut = choice._replace(experts=choice.experts.at[:, 1].set(EXPERTS), weights=choice.weights.at[:, 1].set(0))
    run = lambda shares, x: jnp.sum(run_experts(x, cut._replace(weights=shares), weights, EXPERTS, expert))
    of_shares, of_x = jax.grad(run, (0, 1))(cut.weights, x)
    alone = lambda shares: jnp.sum(of_all(x, choice._replace(weights=shares), weights))
    np.testing.assert_allclose(of_shares[:, 0], jax.grad(alone)(choice.weights)[:, 0], rtol=1e-5)
    assert not np.any(of_shares[:, 1]) and np.isfinite(of_x).all()


@pytest.mark.parametrize("form", ["loop", "blocks"])
def test_a_row_that_overflows_in_another_expert_changes_no_gradient(form):
    """A block that its expert does not fill reads no row of another expert. The last row overflows in expert 0."""
    x, weights = jnp.array([[1.0, 0.0], [2.0, 0.0], [200.0, 0.0]]), jnp.stack([jnp.eye(2), -jnp.eye(2)])
    choice = ExpertChoice(jnp.array([[0], [0], [1]]), jnp.ones((3, 1)))
    run = lambda weights: jnp.sum(run_experts(x, choice, weights, 2, lambda part, x: jnp.exp(x @ part.T), form))
    expected = [[[np.exp(1) + 2 * np.exp(2), 0], [3, 0]], [[0, 0], [200, 0]]]
    np.testing.assert_allclose(jax.grad(run)(weights), expected, rtol=1e-5)


LAYERS = 5


def model_loss(stacked):
    """Return a function from parameters to the loss of a small model, and parameters."""
    sizes = MixtureSizes(EXPERTS, 8, Routing(2, normalized=True), shared_width=8, shared_gate=True)
    config = models.LlamaConfig(
        vocab_size=16, width=16, num_layers=LAYERS, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=8,
        experts=sizes, stacked=stacked,
    )  # fmt: skip
    model, params = models.make_model(config), models.init_params(config, jax.random.key(0))
    tokens, mask = jnp.arange(6)[None], jnp.tril(jnp.ones((6, 6), bool))[None]

    def loss(params):
        cache = model.init_cache(params, None, 1, 8)
        logits = model.forward(params, tokens, cache, positions=tokens, mask=mask)[0].logits
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens + 3)[..., None] % 16, -1))

    return loss, params


@pytest.mark.parametrize("stacked", [False, True])
def test_the_gradients_of_a_model_are_those_of_a_sum_over_all_experts(stacked, monkeypatch):
    loss, params = model_loss(stacked)
    actual = jax.jit(jax.grad(loss))(params)

    def of_every_expert(x, choice, weights, num_experts, expert, first, of_layer):
        part = of_layer if stacked else weights
        shares = jnp.zeros((len(x), num_experts)).at[jnp.arange(len(x))[:, None], choice.experts].set(choice.weights)
        return jnp.einsum("re,erd->rd", shares, jax.vmap(expert, (0, None))(part, x))

    monkeypatch.setattr(feed, "run_experts", of_every_expert)
    expected = jax.jit(jax.grad(lambda params: loss(params)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), actual, expected)


def sums_of_all_layers(loss, params):
    """Return the operations of a gradient that add to arrays, or fill ones, with the experts of all layers at once."""
    program = jax.jit(jax.grad(loss)).lower(params).as_text()
    shapes = rf"tensor<({LAYERS}x{EXPERTS}|{LAYERS * EXPERTS})x(8x16|16x8)xf32>"
    return re.findall(rf"stablehlo.add .*{shapes}|scatter.*-> {shapes}", program)


def test_the_gradient_of_a_layer_fills_no_array_of_all_layers(monkeypatch):
    """The scan over the layers stores the gradient of each layer. A gradient of the whole arrays would add to them."""
    loss, params = model_loss(stacked=True)
    assert not sums_of_all_layers(loss, params)
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    run = lambda *inputs, of_layer, **options: run_experts(*inputs, **options)
    monkeypatch.setattr(feed, "run_experts", run)
    assert sums_of_all_layers(lambda params: loss(params), params)


def directions(tree, seed):
    """Return random tangents of a tree of floats."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    parts = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, parts)


@pytest.mark.parametrize(("form", "rows"), [("loop", 5), ("blocks", 150), ("gather", 5), ("dense", 5)])
def test_derivatives_of_both_modes_are_those_of_a_sum_in_float64(form, rows):
    values = inputs(rows)
    ours = lambda x, router, weights: run_experts(x, choice_of(x, router), weights, EXPERTS, expert, form=form)
    dense = lambda x, router, weights: of_all(x, choice_of(x, router), weights)
    moved = directions(values, 1)
    y, tangent = jax.jit(lambda *pair: jax.jvp(ours, *pair))(values, moved)
    linear = jax.linearize(ours, *values)[1](*moved)
    wanted = jax.random.normal(jax.random.key(9), y.shape)
    pulled = jax.vjp(ours, *values)[1](wanted)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)
        expected_y, expected = jax.jvp(dense, wide(values), wide(moved))
        expected_pulled = jax.vjp(dense, *wide(values))[1](wide(wanted))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5)
    close(y, expected_y)
    close(tangent, expected)
    close(linear, expected)
    jax.tree.map(close, pulled, expected_pulled)
    without_router = jax.jvp(ours, values, (moved[0], jnp.zeros_like(moved[1]), moved[2]))[1]
    assert np.abs(without_router - tangent).max() > 0.1, "the weights of a row's experts change too"


@pytest.mark.parametrize("stacked", [False, True])
def test_forward_mode_of_a_model_agrees_with_finite_differences(stacked):
    loss, params = model_loss(stacked)
    moved = directions(params, 2)
    tangent = jax.jit(lambda *pair: jax.jvp(loss, *pair)[1])((params,), (moved,))
    gradient = jax.jit(jax.grad(loss))(params)
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), gradient, moved)
    np.testing.assert_allclose(tangent, sum(jax.tree.leaves(products)), rtol=1e-4)
    at = lambda step: float(jax.jit(loss)(jax.tree.map(lambda p, d: p + step * d, params, moved)))
    np.testing.assert_allclose(tangent, (at(2e-4) - at(-2e-4)) / 4e-4, rtol=2e-2)


def test_derivatives_of_gradients_and_batches():
    """A Hessian times a vector is forward mode over reverse mode, and gradients of examples are a batch of them."""
    x, router, weights = inputs(5)
    choice = choice_of(x, router)
    ours = lambda x, weights: jnp.sum(run_experts(x, choice, weights, EXPERTS, expert) ** 2)
    dense = lambda x, weights: jnp.sum(of_all(x, choice, weights) ** 2)
    moved = directions((x, weights), 3)
    of = lambda f: jax.jit(lambda *pair: jax.jvp(jax.grad(f, (0, 1)), *pair)[1])((x, weights), moved)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, of(ours), of(dense))
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(ours)(x, weights))))(x)
    batch = jnp.stack([x, 2 * x, x[::-1]])
    examples = lambda f: jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None)))(batch, weights)
    jax.tree.map(close, examples(ours), examples(dense))
    total = lambda f: lambda weights: jnp.sum(jax.vmap(f, (0, None))(batch, weights))
    jax.tree.map(close, jax.grad(total(ours))(weights), jax.grad(total(dense))(weights))


def test_weights_that_are_not_trained_take_no_part():
    """The loop of the backward pass then carries no gradients of the experts."""
    x, router, weights = inputs(5)
    run = lambda x, weights: jnp.sum(run_experts(x, choice_of(x, router), weights, EXPERTS, expert))
    zeros = lambda places: re.findall(
        rf"broadcast_in_dim.*-> tensor<{EXPERTS}x{WIDTH}x{WIDTH}xf32>",
        jax.jit(jax.grad(run, places)).lower(x, weights).as_text(),
    )
    assert not zeros(0) and zeros((0, 1))


def test_rows_of_quantised_experts_have_the_gradient_of_the_expanded_ones():
    x, router, (matrices, _) = inputs(5)
    choice, stored = choice_of(x, router), quantize_rows(matrices, WeightFormat(8))
    gradient = lambda weights: jax.grad(
        lambda x: jnp.sum(run_experts(x, choice, weights, EXPERTS, lambda part, x: matmul(x, part, jnp.float32)) ** 2)
    )
    np.testing.assert_allclose(gradient(stored)(x), gradient(expand_rows(stored))(x), rtol=1e-5, atol=1e-5)
