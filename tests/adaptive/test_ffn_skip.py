"""The card's tests of FFN-SkipLLM (B3)."""

import depths
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Target, UsageError, adaptive


def mlps(depth, target=None):
    """Return the MLPs that each generated token of the first row ran, and all texts."""
    model = adaptive.skip_layers(target or depths.target(), depth)
    text = depths.texts(model)
    reading, counts = depths.read_again(model, text)
    assert np.asarray(reading.ran.attention)[counts].all()
    return [np.where(row)[0].tolist() for row in np.asarray(reading.ran.mlp)[0][counts[0]]], text


def test_without_a_threshold_one_mlp_runs_between_the_cold_regions():
    ran, _ = mlps(adaptive.ffn_skip(-1.0, first=2, last=2, warm_up=3))
    all_layers = list(range(depths.LAYERS))
    assert ran[:4] == [all_layers] * 4  # the last of the prompt, and three tokens
    assert ran[4:] == [[0, 1, 2, 6, 7]] * (depths.NEW - 4)


def test_mlps_that_add_nothing():
    """Cosine 1: MLPs 0, 1, 2, 6 and 7 run, the text is that of the model."""
    base = depths.target()
    layers = dict(base.params["layers"])
    down = layers["mlp"]["down"] | {"weight": jnp.zeros_like(layers["mlp"]["down"]["weight"])}
    layers["mlp"] = layers["mlp"] | {"down": down}
    target = Target(base.model, base.params | {"layers": layers})
    ran, text = mlps(adaptive.ffn_skip(0.999, first=2, last=2, warm_up=0), target)
    assert ran[1:] == [[0, 1, 2, 6, 7]] * (depths.NEW - 1)
    assert text == depths.texts(target)


def test_settings_out_of_range():
    with pytest.raises(UsageError, match="must leave some of the 8 layers, not 4 and 4"):
        adaptive.skip_layers(depths.target(), adaptive.ffn_skip(first=4, last=4))
    with pytest.raises(UsageError, match="must be at least 0, not None, -1 and 8"):
        adaptive.ffn_skip(last=-1)
