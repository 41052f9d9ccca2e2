"""Gradients of mixtures of experts are those of a sum over all experts."""

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


@pytest.mark.parametrize("stacked", [False, True])
def test_the_gradients_of_a_model_are_those_of_a_sum_over_all_experts(stacked, monkeypatch):
    sizes = MixtureSizes(EXPERTS, 8, Routing(2, normalized=True), shared_width=8, shared_gate=True)
    config = models.LlamaConfig(
        vocab_size=16, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=8, experts=sizes,
        stacked=stacked,
    )  # fmt: skip
    model, params = models.make_model(config), models.init_params(config, jax.random.key(0))
    tokens, mask = jnp.arange(6)[None], jnp.tril(jnp.ones((6, 6), bool))[None]

    def loss(params):
        cache = model.init_cache(params, None, 1, 8)
        logits = model.forward(params, tokens, cache, positions=tokens, mask=mask)[0].logits
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens + 3)[..., None] % 16, -1))

    actual = jax.jit(jax.grad(loss))(params)

    def of_every_expert(x, choice, weights, num_experts, expert, first=0):
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, num_experts), weights)
        shares = jnp.zeros((len(x), num_experts)).at[jnp.arange(len(x))[:, None], choice.experts].set(choice.weights)
        return jnp.einsum("re,erd->rd", shares, jax.vmap(expert, (0, None))(part, x))

    monkeypatch.setattr(feed, "run_experts", of_every_expert)
    expected = jax.jit(jax.grad(lambda params: loss(params)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), actual, expected)


def test_rows_of_quantised_experts_have_the_gradient_of_the_expanded_ones():
    x, router, (matrices, _) = inputs(5)
    choice, stored = choice_of(x, router), quantize_rows(matrices, WeightFormat(8))
    gradient = lambda weights: jax.grad(
        lambda x: jnp.sum(run_experts(x, choice, weights, EXPERTS, lambda part, x: matmul(x, part, jnp.float32)) ** 2)
    )
    np.testing.assert_allclose(gradient(stored)(x), gradient(expand_rows(stored))(x), rtol=1e-5, atol=1e-5)
