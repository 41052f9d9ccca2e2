"""The card's tests of FiRST (B6)."""

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Target, UsageError, adaptive
from specjax.adaptive.unified import kept_layers
from specjax.models.variants.low_rank import apply_lora, init_lora


def ran(routers, prompts=depths.PROMPTS):
    """Per row the layers that its generated tokens run."""
    model = adaptive.skip_layers(depths.target(), adaptive.first(routers))
    reading, counts = depths.read_again(model, depths.texts(model, prompts=prompts), prompts)
    counts[:, 0] = False
    layers = np.asarray(reading.ran.attention)
    for row, count in zip(layers, counts, strict=True):
        assert (row[count] == row[count][0]).all()  # what it generates changes nothing
    return [np.where(row[1])[0].tolist() for row in layers]


def test_equal_prompts_run_equal_layers_and_others_others():
    routers = depths.some(adaptive.Routers, 4)
    first, second, third, short = ran(routers, [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5], [9, 2, 6, 5], [7]])
    assert first == second != third
    assert short == list(range(depths.LAYERS))  # of one token, of which nobody has asked


def test_a_set_of_layers_can_be_said():
    """Routers that say the same of every token: the kept layers of another method, behind a prompt in full."""
    layer_set = kept_layers(2.0, depths.LAYERS)
    bias = jnp.where(jnp.isin(jnp.arange(depths.LAYERS), jnp.asarray(layer_set)), 9.0, -9.0)
    routers = adaptive.Routers(jnp.zeros((depths.LAYERS, depths.WIDTH)), bias)
    assert ran(routers)[:2] == [list(layer_set)] * 2


def test_routers_of_another_model():
    routers = adaptive.Routers(jnp.zeros((3, depths.WIDTH)), jnp.zeros(3))
    with pytest.raises(UsageError, match="the routers fit 3 layers, but the model has 8"):
        adaptive.skip_layers(depths.target(), adaptive.first(routers))
    with pytest.raises(UsageError, match="routers must be weight"):
        adaptive.first(routers._replace(bias=jnp.zeros(4)))


def test_routers_learn_what_can_be_left_out():
    """Layers of which one adds nothing: its gate falls, under a penalty, and the text stays as likely."""
    base = depths.target()
    layers = dict(base.params["layers"])
    for part, name in (("attention", "o"), ("mlp", "down")):
        weight = layers[part][name]["weight"].at[3].set(0.0)
        layers[part] = layers[part] | {name: layers[part][name] | {"weight": weight}}
    target = Target(base.model, base.params | {"layers": layers})
    text = depths.texts(target)
    rows = [prompt + answer for prompt, answer in zip(depths.PROMPTS, text, strict=True)]
    tokens = jnp.asarray([row + [0] * (25 - len(row)) for row in rows])
    prompt, length = (jnp.asarray(list(map(len, texts))) for texts in (depths.PROMPTS, rows))
    routers = adaptive.train_routers(target, tokens, prompt, length, weight=1.0, steps=60, learning_rate=0.05)
    model = adaptive.skip_layers(target, adaptive.first(routers))
    reading, _ = depths.read_again(model, text)
    ran = np.asarray(reading.ran.attention)[0, 1]
    assert not ran[3] and ran.sum() > 3


def taught():
    """Prompts, texts of the whole model behind them, and the routers whose layers these are to be written with."""
    tokens, length = depths.lesson()
    return tokens, jnp.asarray(list(map(len, depths.PROMPTS))), length, depths.some(adaptive.Routers, 4)


def held(target, routers):
    """float32: the mean surprise of the texts, as one reads them that decodes so."""
    model = adaptive.skip_layers(target, adaptive.first(routers))
    reading, counts = depths.read_again(model, depths.texts(depths.target()))
    return -np.asarray(reading.logprobs)[counts].mean()


def test_the_second_stage_learns_with_the_layers_that_decoding_runs():
    tokens, prompt, length, routers = taught()
    target, losses = adaptive.train_lora(
        depths.target(), routers, tokens, prompt, length, rank=4, steps=40, learning_rate=1e-2
    )
    np.testing.assert_allclose(losses[0], held(depths.target(), routers), rtol=1e-4)
    assert losses[-1] < 0.6 * losses[0]
    assert held(target, routers) < 0.6 * losses[0]
    original, trained = depths.target().params["layers"], target.params["layers"]
    for part, name in (("attention", "k"), ("attention", "o"), ("mlp", "up")):
        np.testing.assert_array_equal(original[part][name]["weight"], trained[part][name]["weight"])
    for name in ("q", "v"):
        difference = np.asarray(trained["attention"][name]["weight"] - original["attention"][name]["weight"])
        assert max(np.linalg.matrix_rank(layer, tol=1e-4) for layer in difference) == 4


def test_changes_that_change_nothing():
    changes = init_lora(depths.target(), jax.random.key(0))
    same = apply_lora(depths.target(), changes)
    jax.tree.map(np.testing.assert_array_equal, same.params, depths.target().params)
    apart = init_lora(depths.target(False), jax.random.key(0), projections=("down",))
    assert len(apart) == depths.LAYERS and len(changes) == 2
    with pytest.raises(UsageError, match="llama has no weights with the names nothing in its layers"):
        init_lora(depths.target(), jax.random.key(0), projections=("nothing",))
