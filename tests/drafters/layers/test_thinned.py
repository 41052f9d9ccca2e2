"""Drafts of a target that skips layers, verified by the whole target."""

import depths
import jax
import numpy as np
import pytest
from tiers import those
from toy import chi_square, pairs_after

from specjax import UsageError, adaptive, decode, trees
from specjax.drafters import thinned, two_model

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


DRAFTERS = {
    "calm": lambda target: thinned(target, adaptive.calm(0.1, every=1), num_tokens=2),
    "matformer": lambda target: thinned(target, adaptive.matformer((0.25, 0.5, 1.0)), num_tokens=2),
    "s2d": lambda target: two_model(target, 2, depth=adaptive.s2d(0.4)),
}


@pytest.mark.parametrize("name", those({"calm"}, DRAFTERS))
def test_sampled_text_has_the_joint_law_of_the_target(name):
    """Compare two sampled tokens of a vocabulary of 3 with their exact distribution."""
    counts, law, result = pairs_after(DRAFTERS[name])
    assert chi_square(counts, law) > 1e-3
    assert result.stats.accepted.sum() > 15


def test_what_cannot_draft():
    with pytest.raises(UsageError, match="first learns from the prompt and cannot draft"):
        thinned(depths.target(), depths.depth("first"))
    with pytest.raises(UsageError, match="llama by calm has no layers that can be skipped"):
        thinned(adaptive.skip_layers(depths.target(), depths.depth("calm")), depths.depth("skip_decode"))
    with pytest.raises(UsageError, match="every must be below"):
        thinned(depths.target(), adaptive.calm(every=9))
