"""A head that begins with its target is of the shapes that its kind says, whatever of the target fits."""

import jax
import jax.numpy as jnp
import pytest
import toy

from specjax.models.heads.kinds import KINDS
from specjax.training.starts import new_head


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_begins_with_a_target_of_few_layers(kind):
    target = toy.tiny_llama(layers=3)
    config = KINDS[kind].of_target(target.model.config)
    begun, drawn = (new_head(kind, config, target, jax.random.key(0), random=random).params for random in (False, True))
    assert jax.tree.map(jnp.shape, begun) == jax.tree.map(jnp.shape, drawn)
