"""The card's tests of DYNAMAX (B7)."""

import depths
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError, adaptive, drafters
from specjax.adaptive.dynamax import judged, lessons


def test_probes_learn_where_the_prediction_stays():
    tokens, length = depths.lesson()
    target = depths.target()
    probes = adaptive.train_probes(target, tokens, length, every=2, steps=300, learning_rate=0.03)
    streams, agrees = lessons(target.model, (1, 3, 5), target.params, tokens)
    counts = np.asarray(jnp.arange(tokens.shape[1]) < length[:, None])
    agreement = [
        (np.asarray(judged(probes, layer, stream) > 0) == np.asarray(label, bool))[counts].mean()
        for layer, stream, label in zip((1, 3, 5), streams, agrees, strict=True)
    ]
    always = [max(np.asarray(label)[counts].mean(), 1 - np.asarray(label)[counts].mean()) for label in agrees]
    assert np.mean(agreement) > 0.9 and np.mean(agreement) > np.mean(always)
    assert not np.asarray(probes.weight)[[0, 2, 4, 6, 7]].any()  # of layers that are not tested


def test_a_layer_that_does_not_fit():
    with pytest.raises(UsageError, match="every must be below"):
        adaptive.train_probes(depths.target(), *depths.lesson(), every=8)
    with pytest.raises(UsageError, match="every must be at least 1, not 0"):
        adaptive.train_probes(depths.target(), *depths.lesson(), every=0)
    with pytest.raises(UsageError, match="the probes fit 3 layers, but the model has 8"):
        probes = adaptive.Probes(jnp.zeros((3, depths.WIDTH)), jnp.zeros(3))
        adaptive.skip_layers(depths.target(), adaptive.dynamax(probes, every=2))
    probes = adaptive.Probes(jnp.zeros((depths.LAYERS, 7)), jnp.zeros(depths.LAYERS))
    for make in (adaptive.skip_layers, drafters.thinned):
        with pytest.raises(UsageError, match="dynamax fit streams of width 7, but the model llama has width 32"):
            make(depths.target(), adaptive.dynamax(probes, every=2))
    with pytest.raises(UsageError, match="probes must be weight"):
        adaptive.dynamax(adaptive.Probes(jnp.zeros((3, 4)), jnp.zeros(4)))
