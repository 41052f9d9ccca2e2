"""Drafts of the target over a part of its own cache, verified over all of it."""

import dataclasses
import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules import takes_valid
from tiers import those
from toy import chi_square, markov, pairs_after, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import sparse_cache
from specjax.drafters.layers.sparse_cache import SELECTIONS, SelectionSettings, _select_slots
from specjax.engine.prefill import prefill
from specjax.models import make_model
from specjax.types import Context, Target

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


@functools.cache
def windowed(window: int = 6, every: int | None = 2):
    """Return the target with windows, except in every second layer or, with None, in all layers."""
    config, layers = depths.target().model.config, depths.LAYERS
    is_global = None if every is None else tuple(layer % every == 1 for layer in range(layers))
    changes = {"window": window, "is_global": is_global, "local_rope_base": 100.0}
    return Target(make_model(dataclasses.replace(config, **changes)), depths.target().params)


@pytest.mark.parametrize(("selection", "every"), [("snapkv", 2), ("retrieval", 2), ("retrieval", None), ("sinks", 2)])
def test_the_text_of_a_target_with_windows_is_that_of_plain_decoding(selection, every):
    target = windowed(every=every)
    drafter = sparse_cache(target, selection=selection, **SMALL)
    plain = depths.texts(target)
    assert depths.texts(target, drafter) == plain != depths.texts(depths.target())
    assert depths.texts(target, drafter, verifier=takes_valid) != plain
    counts, law, _ = pairs_after(
        lambda small: sparse_cache(small, num_tokens=2, selection=selection, **SMALL), target=_small(every)
    )
    assert chi_square(counts, law) > 1e-3


def _small(every: int | None) -> Target:
    """Return a target of 3 tokens whose window shortens a text of 3 tokens."""
    small = tiny_llama(layers=3, vocab=3, stacked=True)
    is_global = None if every is None else (False, True, False)
    return Target(make_model(dataclasses.replace(small.model.config, window=2, is_global=is_global)), small.params)


@pytest.mark.parametrize("every", [2, None])
def test_a_budget_for_the_whole_text_and_a_wide_window_draft_what_the_target_says(every):
    """Layers of both kinds have all entries, and rotate by their own frequencies, so all drafts are accepted."""
    target = windowed(64, every)
    drafter = sparse_cache(target, **SMALL | {"budget": 64})
    result = decode(target, drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    assert (np.asarray(result.stats.target_passes) == 5).all()


def test_layers_with_windows_keep_the_most_recent_tokens():
    target, tokens = windowed(), jnp.arange(40)[None] * 7 % 64
    settings = SelectionSettings("snapkv", budget=7, sinks=2, window=4, chunk=3, refresh=5, pays_from=0)
    cached = jnp.array([30])
    cache = prefill(target.model, target.params, target.model.init_cache(target.params, None, 1, 256), tokens, cached)
    context = Context(tokens, cached + 1, cache=cache, target=target)
    slots = np.asarray(_select_slots(target.model, settings, context, cached))
    assert (slots[::2] == np.arange(23, 30)).all() and (slots[1::2] != np.arange(23, 30)).any()
    assert (slots[1::2, :, :, -4:] == np.arange(26, 30)).all()


def test_what_is_refused():
    with pytest.raises(UsageError, match='selection must be one of sinks, snapkv, retrieval, not "h2o"'):
        sparse_cache(depths.target(), selection="h2o")
    with pytest.raises(UsageError, match="budget must be a whole number of at least 33"):
        sparse_cache(depths.target(), budget=32)
    with pytest.raises(UsageError, match="the model markov has no cache of keys and values on one device"):
        sparse_cache(markov())
