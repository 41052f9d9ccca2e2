"""The card's tests of MatFormer (drafters, B6)."""

import dataclasses

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Target, UsageError, adaptive, decode, drafters
from specjax.adaptive.matformer import units_of_layers
from specjax.models import narrow_mlps, prune_layers
from specjax.models.bridge import abstract_params

SHARES = (0.25, 0.5, 1.0)


def small():
    return tiny_llama(seed=1, layers=2, stacked=True)


def loss(target, share):
    return float(adaptive.nested_loss(target, *depths.lesson(), (share,)))


def with_mlp(target, change):
    layers = target.params["layers"]
    return Target(target.model, target.params | {"layers": layers | {"mlp": change(layers["mlp"])}})


def test_the_whole_width_is_the_model():
    target = depths.target()
    drafter = drafters.thinned(target, adaptive.matformer(1.0), num_tokens=3)
    result = decode(target, drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    assert result.to_lists() == depths.texts(target)
    assert np.asarray(result.stats.target_passes).tolist() == [5] * 3


@pytest.mark.parametrize("stacked", [True, False])
def test_a_part_drafts_what_the_whole_verifies(stacked):
    target = tiny_llama(layers=3, stacked=stacked)
    drafter = drafters.thinned(target, adaptive.matformer(0.5), num_tokens=3)
    assert depths.texts(target, drafter) == depths.texts(target)
    part = adaptive.skip_layers(target, adaptive.matformer(0.5))
    assert part.model.name == "llama by matformer" and part.model.config.mlp_width == 32
    assert depths.texts(part) == depths.texts(narrow_mlps(target, 32)) != depths.texts(target)


def without_units(target, widths):
    """Return the whole model with zeros for the other hidden units, which is the part by definition."""
    layers = target.params["layers"]
    if target.model.config.stacked:
        zero = lambda mlp: {"weight": mlp["weight"] * (jnp.arange(64) < jnp.asarray(widths)[:, None, None])}
        return with_mlp(target, lambda mlp: mlp | {"down": zero(mlp["down"])})
    cut = {
        key: layer | {"mlp": layer["mlp"] | {"down": {"weight": layer["mlp"]["down"]["weight"].at[:, m:].set(0)}}}
        for (key, layer), m in zip(layers.items(), widths, strict=True)
    }
    return Target(target.model, target.params | {"layers": cut})


@pytest.mark.parametrize("stacked", [True, False])
def test_a_width_per_layer(stacked):
    """Mix'n'Match is a target, and a drafter that shares the target's cache."""
    full = tiny_llama(layers=3, stacked=stacked)
    mixed = adaptive.matformer((0.25, 0.5, 1.0))
    part = adaptive.skip_layers(full, mixed)
    assert part.model.config.mlp_widths == (16, 32, 64)
    ours = depths.texts(part)
    assert ours == depths.texts(without_units(full, (16, 32, 64)))
    assert ours != depths.texts(narrow_mlps(full, 32)) and ours != depths.texts(full)
    assert depths.texts(full, drafters.thinned(full, mixed, num_tokens=3)) == depths.texts(full)


def test_a_draft_model_with_a_width_per_layer():
    """The draft model has a cache of its own, with separate layers."""
    full = tiny_llama(layers=3, stacked=True)
    drafter = drafters.two_model(full, 3, depth="matformer:.5/1")
    result = decode(full, drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    assert result.to_lists() == depths.texts(full)
    passes = np.asarray(result.stats.target_passes)
    assert (passes > 5).any() and passes.sum() < 3 * 20  # some drafts are right, and some are not


def test_shares_are_for_equal_parts_of_the_depth():
    assert units_of_layers((0.25,), (64,) * 3) == (16, 16, 16)
    assert units_of_layers((0.25, 1.0), (64,) * 5) == (16, 16, 16, 64, 64)
    assert units_of_layers((0.25, 0.5, 1.0), (64, 32, 64)) == (16, 16, 64)
    full = tiny_llama(layers=3)
    same = adaptive.skip_layers(full, adaptive.matformer((0.5, 0.5, 0.5)))
    assert same.model.config == narrow_mlps(full, 32).model.config


def test_a_part_of_a_part():
    """Widths of separate layers can be cut once more, and layers can be removed."""
    part = narrow_mlps(tiny_llama(layers=3, stacked=True), (16, 32, 64))
    again = narrow_mlps(part, (16, 16, 8))
    assert again.model.config.mlp_widths == (16, 16, 8)
    assert prune_layers(part, (0, 2)).model.config.mlp_widths == (16, 64)
    assert narrow_mlps(part, 16).model.config.mlp_widths is None
    with pytest.raises(UsageError, match="width must be from 1 to 16, the hidden units of the MLPs, not 17"):
        narrow_mlps(part, (17, 32, 64))
    shapes = jax.tree.map(lambda x: x.shape, part.params)
    assert shapes == jax.tree.map(lambda x: x.shape, abstract_params(part.model.config))


def test_units_beyond_the_part_do_not_matter():
    """NaN in them changes nothing, and no gradient reaches them."""
    target = small()
    broken = with_mlp(target, lambda mlp: {
        name: {"weight": part["weight"].at[..., 16:].set(jnp.nan) if name == "down"
               else part["weight"].at[..., 16:, :].set(jnp.nan)}
        for name, part in mlp.items()
    })  # fmt: skip
    assert loss(broken, 0.25) == loss(target, 0.25) and np.isnan(loss(broken, 0.5))
    part = lambda params: adaptive.nested_loss(Target(target.model, params), *depths.lesson(), (0.25,))
    gradient = jax.grad(part)(target.params)["layers"]["mlp"]
    assert jnp.any(gradient["down"]["weight"][..., :16]) and not jnp.any(gradient["down"]["weight"][..., 16:])
    assert jnp.any(gradient["up"]["weight"][..., :16, :]) and not jnp.any(gradient["up"]["weight"][..., 16:, :])


def test_units_may_change_places_within_a_band():
    target = small()
    order = jnp.concatenate([jnp.arange(16), 16 + jax.random.permutation(jax.random.key(0), 16), jnp.arange(32, 64)])
    other = with_mlp(target, lambda mlp: {
        name: {"weight": part["weight"][..., order] if name == "down" else part["weight"][..., order, :]}
        for name, part in mlp.items()
    })  # fmt: skip
    for share in SHARES:
        np.testing.assert_allclose(loss(other, share), loss(target, share), rtol=1e-5)


def test_the_parts_of_layers_of_different_widths():
    """A share is one of each layer's own width."""
    target = depths.target()
    width = target.model.config.mlp_width
    uneven = narrow_mlps(target, [width if layer % 2 else width // 2 for layer in range(depths.LAYERS)])
    half = narrow_mlps(target, [width // 2 if layer % 2 else width // 4 for layer in range(depths.LAYERS)])
    np.testing.assert_allclose(loss(uneven, 0.5), loss(half, 1.0), rtol=1e-6)


def test_granularities_learn_together():
    trained, losses = adaptive.train_nested(small(), *depths.lesson(), shares=SHARES, steps=50, learning_rate=3e-3)
    assert losses[-1] < 0.5 * losses[0]
    quarter, half, full = (loss(trained, share) for share in SHARES)
    assert quarter > half > full
    assert quarter < 0.6 * loss(small(), 0.25)


def test_settings_out_of_range():
    with pytest.raises(UsageError, match="share must be above 0 and at most 1, not 0"):
        adaptive.matformer(0)
    for shares in ((0.5, 1.5), (0.5, float("nan"))):
        with pytest.raises(UsageError, match=r"share must be above 0 and at most 1, not (1\.5|nan)"):
            adaptive.matformer(shares)
    with pytest.raises(UsageError, match="share must be a number or several, not an empty list"):
        adaptive.matformer(())
    for make in (adaptive.skip_layers, drafters.thinned):
        with pytest.raises(UsageError, match="share has 3 numbers, more than the 2 layers of the model"):
            make(small(), adaptive.matformer((0.25, 0.5, 1.0)))
    with pytest.raises(UsageError, match="width must be one number or one per layer, 2, not 3 numbers"):
        narrow_mlps(small(), (1, 2, 3))
    with pytest.raises(UsageError, match="mlp_widths are 3 numbers for separate layers, but llama has 2 stacked ones"):
        dataclasses.replace(small().model.config, mlp_widths=(1, 2, 3))
    with pytest.raises(UsageError, match="width must be from 1 to 64, the hidden units of the MLPs, not 65"):
        narrow_mlps(small(), 65)
