"""The card's tests of MatFormer (drafters, B6)."""

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Target, UsageError, adaptive, decode, drafters
from specjax.models import narrow_mlps

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


def test_granularities_learn_together():
    trained, losses = adaptive.train_nested(small(), *depths.lesson(), shares=SHARES, steps=50, learning_rate=3e-3)
    assert losses[-1] < 0.5 * losses[0]
    quarter, half, full = (loss(trained, share) for share in SHARES)
    assert quarter > half > full
    assert quarter < 0.6 * loss(small(), 0.25)


def test_settings_out_of_range():
    with pytest.raises(UsageError, match="share must be above 0 and at most 1, not 0"):
        adaptive.matformer(0)
    with pytest.raises(UsageError, match="width must be from 1 to 64, the hidden units of the MLPs, not 65"):
        narrow_mlps(small(), 65)
