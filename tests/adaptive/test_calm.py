"""The card's tests of CALM (B1)."""

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Target, UsageError, adaptive
from specjax.adaptive import exits
from specjax.adaptive.calm import level, margin, saturation
from specjax.models.skipping.policy import LayerStreams, TokenPositions
from specjax.types import Sublayers


def levels(threshold, form, at, decay=4.0, horizon=100):
    places = TokenPositions(jnp.array([at]) + 7, jnp.array([7]))
    return np.asarray(level(decay, form, horizon, jnp.float32(threshold), places)[0])


def test_the_threshold_falls_along_the_text():
    at = [0, 25, 50, 100]
    np.testing.assert_allclose(levels(0.9, "paper", at), [0.9100, 0.8468, 0.8235, 0.8118], atol=5e-5)
    np.testing.assert_allclose(levels(0.9, "follow_up", at), [0.9000, 0.8431, 0.8222, 0.8116], atol=5e-5)


def test_calibration_stops_where_the_bound_no_longer_holds():
    assert adaptive.calibrated([0.05, 0.10, 0.01], 100, delta=0.2, epsilon=0.05) == 0  # e^-4.5, then e^-2
    assert adaptive.calibrated([0.05, 0.07], 100, delta=0.2, epsilon=0.05) == 1
    assert adaptive.calibrated([0.3, 0.0], 100, delta=0.2, epsilon=0.05) is None
    with pytest.raises(UsageError, match="delta and epsilon must be between 0 and 1"):
        adaptive.calibrated([0.1], 100, delta=0.0, epsilon=0.05)


def test_confidences():
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1]]]))
    layer_input, layer_output = jnp.array([[[1.0, 0.0]]]), jnp.array([[[3.0, 4.0]]])
    streams = LayerStreams(0, layer_input, layer_input, layer_output, Sublayers(None, None), lambda stream: logits)
    np.testing.assert_allclose(margin(None, streams), [[0.3]], atol=1e-6)
    np.testing.assert_allclose(saturation(None, streams), [[0.6]], atol=1e-6)


def test_every_token_leaves_at_the_first_test_or_none_does():
    for threshold, layers in ((0.0, 2), (-1.0, 2), (1.01, depths.LAYERS)):
        model = adaptive.skip_layers(depths.target(), adaptive.calm(threshold, every=2))
        reading, counts = depths.read_again(model, depths.texts(model))
        counts[:, 0] = False  # the last token of the prompt runs everything
        assert (np.asarray(reading.ran.attention).sum(2)[counts] == layers).all()
        assert np.asarray(reading.ran.attention)[:, 0].all()


def test_layers_that_are_tested():
    assert exits.tested_layers(4, 12) == (3, 7)
    assert exits.tested_layers(1, 3) == (0, 1)
    with pytest.raises(UsageError, match="every must be below the number of layers of the model, 8, not 8"):
        adaptive.skip_layers(depths.target(), adaptive.calm(every=8))


def test_upper_layers_that_add_nothing_make_leaving_exact():
    """Zero output projections from layer 2 on: the text, and the keys that are propagated, are those of the whole."""
    full_depth = depths.target()
    layers = dict(full_depth.params["layers"])
    for part, name in (("attention", "o"), ("mlp", "down")):
        weight = layers[part][name]["weight"].at[2:].set(0.0)
        layers[part] = layers[part] | {name: layers[part][name] | {"weight": weight}}
    target = Target(full_depth.model, full_depth.params | {"layers": layers})
    model = adaptive.skip_layers(target, adaptive.calm(-1.0, every=2))
    text = depths.texts(target)
    assert depths.texts(model) == text
    tokens = jnp.asarray([depths.PROMPTS[0] + text[0]])
    one_pass = lambda target, cache: target.model.forward(
        target.params, tokens, cache, positions=jnp.arange(tokens.shape[1])[None],
        mask=jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool)),
    )[1]  # fmt: skip
    full = one_pass(target, target.model.init_cache(target.params, None, 1, 64))
    left = one_pass(model, model.model.start_cache(model.params, None, jnp.array([5]), 64))
    assert not left.ran.attention[0, 5:, 2:].any()
    np.testing.assert_allclose(left.base.k, full.k, atol=1e-5)
    np.testing.assert_allclose(left.base.v, full.v, atol=1e-5)


def test_keys_that_are_not_propagated_are_caught(monkeypatch):
    """A mutant: zeros in place of the keys of layers that a token left out."""
    target = depths.target()
    model = adaptive.skip_layers(target, adaptive.calm(-1.0, every=2).replace(repair="absent", name="mutant"))
    tokens, length = jnp.asarray([[1, 2, 3]]), jnp.array([1])
    one = lambda model: model.model.forward(
        model.params, tokens[:, 1:2], model.model.start_cache(model.params, None, length, 64),
        positions=jnp.array([[1]]), mask=jnp.ones((1, 1, 1), bool),
    )[1].base.k[2:]  # fmt: skip
    assert not jnp.any(one(model))
    assert jnp.all(jnp.any(one(adaptive.skip_layers(target, adaptive.calm(-1.0, every=2))), (1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"confidence": "entropy"}, "confidence must be one of softmax, saturation"),
        ({"form": "new"}, "form must be one of paper, follow_up"),
        ({"horizon": 0}, "horizon must be at least 1, not 0"),
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"threshold": float("nan")}, "threshold and decay must be numbers"),
        ({"decay": float("inf")}, "decay finite and at least 0, not 0.9 and inf"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UsageError, match=words):
        adaptive.calm(**options)
    assert jax.tree.leaves(adaptive.calm()) == [np.float32(0.9)]
