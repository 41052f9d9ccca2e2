"""A thinned target drafts for the whole one."""

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those
from toy import chi_square, tiny_llama

from specjax import UsageError, adaptive, decode, trees
from specjax.drafters import thinned

NAMES = ["calm", "skip_decode", "ffn_skip", "dynamax", "unified"]


@pytest.mark.parametrize("name", those({"calm"}, NAMES))
def test_the_text_is_that_of_the_whole_model(name):
    drafter = thinned(depths.target(), depths.depth(name), num_tokens=3)
    assert depths.texts(depths.target(), drafter) == depths.texts(depths.target())


def test_all_layers_draft_what_the_target_says():
    result = decode(
        depths.target(), thinned(depths.target(), depths.never("calm"), num_tokens=3), depths.PROMPTS,
        key=jax.random.key(0), max_new_tokens=20,
    )  # fmt: skip
    assert (np.asarray(result.stats.target_passes) == 5).all()


def test_trees_take_part():
    drafter = thinned(depths.target(), depths.depth("calm"), tree=trees.branching("2x1"))
    assert depths.texts(depths.target(), drafter) == depths.texts(depths.target())


def test_sampled_text_has_the_joint_law_of_the_target():
    """Two tokens of a vocabulary of 3, against all that the model says of them."""
    target = tiny_llama(layers=3, vocab=3, stacked=True)
    drafter = thinned(target, adaptive.calm(0.1, every=1), num_tokens=2)
    ours = decode(
        target, drafter, [[1, 2]], samples_per_prompt=128, key=jax.random.key(3), max_new_tokens=2, temperature=2.0
    )
    first, second = np.asarray(ours.to_lists()).T
    counts = np.bincount(first * 3 + second, minlength=9).reshape(3, 3)
    chains = jnp.asarray([[1, 2, token] for token in range(3)])
    logits = target.model.forward(
        target.params, chains, target.model.begin(target.params, None, 3, 128),
        positions=jnp.broadcast_to(jnp.arange(3), (3, 3)), mask=jnp.tril(jnp.ones((3, 3, 3), bool)),
    )[0].logits  # fmt: skip
    p = np.asarray(jax.nn.softmax(logits / 2.0))
    assert chi_square(counts, p[0, 1][:, None] * p[:, 2]) > 1e-3
    assert ours.stats.accepted.sum() > 15


def test_what_cannot_draft():
    with pytest.raises(UsageError, match="first learns from the prompt and cannot draft"):
        thinned(depths.target(), depths.depth("first"))
    with pytest.raises(UsageError, match="llama by calm has no layers to choose from"):
        thinned(adaptive.thinned(depths.target(), depths.depth("calm")), depths.depth("skip_decode"))
    with pytest.raises(UsageError, match="every must be below"):
        thinned(depths.target(), adaptive.calm(every=9))
