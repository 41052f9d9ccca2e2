"""Drafts of the target over a part of its own cache, verified over all of it."""

import dataclasses

import depths
import jax
import numpy as np
import pytest
from tiers import those
from toy import chi_square, pairs_after

from specjax import UsageError, decode
from specjax.drafters import sparse_cache
from specjax.drafters.layers.sparse_cache import SELECTIONS
from specjax.models import make_model
from specjax.types import Target

SMALL = {"sinks": 2, "window": 4, "chunk": 3, "budget": 7, "refresh": 5, "pays_from": 0}


@pytest.mark.parametrize("selection", those({"snapkv"}, SELECTIONS))
def test_the_text_is_that_of_plain_decoding(selection):
    drafter = sparse_cache(depths.target(), selection=selection, **SMALL)
    assert depths.texts(depths.target(), drafter) == depths.texts(depths.target())


@pytest.mark.parametrize("selection", those({"retrieval"}, SELECTIONS))
def test_a_budget_for_the_whole_text_drafts_what_the_target_says(selection):
    """Selected and newer entries are those of the target's cache, so all drafts are accepted."""
    drafter = sparse_cache(depths.target(), selection=selection, **SMALL | {"budget": 64})
    result = decode(depths.target(), drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    assert (np.asarray(result.stats.target_passes) == 5).all()


@pytest.mark.parametrize("selection", those({"sinks"}, SELECTIONS))
def test_sampled_text_has_the_joint_law_of_the_target(selection):
    """Compare two sampled tokens of a vocabulary of 3 with their exact distribution."""
    counts, law, result = pairs_after(lambda target: sparse_cache(target, num_tokens=2, selection=selection, **SMALL))
    assert chi_square(counts, law) > 1e-3
    assert result.stats.accepted.sum() > 15


def test_short_texts_are_decoded_plainly():
    """The weights of this model have more bytes than the cache of such a text will ever have."""
    drafter = sparse_cache(depths.target())
    result = decode(depths.target(), drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=6)
    assert not np.asarray(result.stats.drafted).any()


def test_what_is_refused():
    with pytest.raises(UsageError, match='selection must be one of sinks, snapkv, retrieval, not "h2o"'):
        sparse_cache(depths.target(), selection="h2o")
    with pytest.raises(UsageError, match="budget must be a whole number of at least 33"):
        sparse_cache(depths.target(), budget=32)
    windowed = dataclasses.replace(depths.target().model.config, window=8)
    with pytest.raises(UsageError, match="attends within windows"):
        sparse_cache(Target(make_model(windowed), depths.target().params))
