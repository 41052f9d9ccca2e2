"""The card's tests of S2D (drafters, B5)."""

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, adaptive, drafters
from specjax.adaptive.s2d import exit_layers

LAYERS = 6


def draft(threshold=None):
    """The whole draft model, or with exits."""
    model = tiny_llama(seed=1, layers=LAYERS, stacked=True)
    return model if threshold is None else adaptive.skip_layers(model, adaptive.s2d(threshold))


@functools.cache
def drafted(threshold=None):
    return depths.texts(depths.target(), drafters.two_model(draft(threshold), 3))


def test_exits_lie_at_equal_parts():
    assert exit_layers(3, 12) == (4, 8, 12) and exit_layers(3, 8) == (3, 5, 8) and exit_layers(1, 5) == (5,)
    with pytest.raises(UsageError, match="exits must be from 1 to the 2 layers of the model, not 3"):
        adaptive.skip_layers(tiny_llama(layers=2), adaptive.s2d())
    with pytest.raises(UsageError, match="exits must be at least 2, not 1"):
        adaptive.s2d(exits=1)
    with pytest.raises(UsageError, match="exits must be a whole number of at least 2, not 1"):
        adaptive.train_sorted(draft(), *depths.lesson(), exits=1)


@pytest.mark.parametrize(("threshold", "layers"), [(0.0, 2), (1.01, LAYERS)])
def test_the_first_exit_or_the_last(threshold, layers):
    model = draft(threshold)
    reading, counts = depths.read_again(model, depths.texts(model))
    counts[:, 0] = False
    assert (np.asarray(reading.ran.attention).sum(2)[counts] == layers).all()
    if layers == LAYERS:
        assert depths.texts(model) == depths.texts(draft())


def test_the_text_of_two_model_is_the_targets():
    assert drafted(0.3) == depths.texts(depths.target())


def test_a_draft_model_takes_its_depth_by_name():
    """The option of `two_model` makes the same drafter as a draft model with exits."""
    by_name = drafters.two_model(draft(), 3, depth="s2d:0.3")
    ours = drafters.two_model(draft(0.3), 3)
    assert by_name.propose is ours.propose and by_name.params["depth"] == ours.params["depth"] == np.float32(0.3)
    with pytest.raises(UsageError, match="exits must be from 1 to the 2 layers"):
        drafters.two_model(tiny_llama(layers=2), depth="s2d")
    with pytest.raises(UsageError, match='"auto" is not a method of adaptive depth'):
        drafters.two_model(draft(), depth="auto")


def test_exits_learn_together():
    trained, losses = adaptive.train_sorted(draft(), *depths.lesson(), exits=3, steps=60, learning_rate=3e-3)
    assert losses[-1] < 0.4 * losses[0]
    model = trained.model
    each = [float(adaptive.sorted_loss(model, trained.params, *depths.lesson(), (exit,))) for exit in (2, 4, 6)]
    initial = [float(adaptive.sorted_loss(model, draft().params, *depths.lesson(), (exit,))) for exit in (2, 4, 6)]
    assert all(loss < 0.5 * old for loss, old in zip(each, initial, strict=True))
    np.testing.assert_allclose(
        np.mean(each), adaptive.sorted_loss(model, trained.params, *depths.lesson(), (2, 4, 6)), rtol=1e-5
    )


def test_layers_above_an_exit_get_no_gradient_from_it():
    model, params = draft().model, draft().params
    gradient = jax.grad(adaptive.sorted_loss, argnums=1)(model, params, *depths.lesson(), (2,))
    for leaf in jax.tree.leaves(gradient["layers"]):
        assert jnp.any(leaf[:2]) and not jnp.any(leaf[2:])


def test_one_exit_is_ordinary_fine_tuning():
    model, params = draft().model, draft().params
    tokens, length = depths.lesson()
    size = tokens.shape[1]
    logits = model.forward(
        params, tokens, model.init_cache(params, None, 3, 0), positions=jnp.broadcast_to(jnp.arange(size), (3, size)),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (3, size, size)),
    )[0].logits  # fmt: skip
    log_p = np.asarray(jax.nn.log_softmax(logits))
    ours = [log_p[row, i, tokens[row, i + 1]] for row in range(3) for i in range(int(length[row]) - 1)]
    np.testing.assert_allclose(
        adaptive.sorted_loss(model, params, tokens, length, (LAYERS,)), -np.mean(ours), rtol=1e-5
    )
