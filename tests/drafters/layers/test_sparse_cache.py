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
from specjax.models.cache import KVCache
from specjax.models.variants import cache_parts
from specjax.numerics.quantization import Quantized, dequantize, quantize
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


@functools.cache
def rounded(**changes) -> Target:
    """Return a target with an int8 cache."""
    model = tiny_llama(layers=3, stacked=True, **changes)
    return Target(make_model(dataclasses.replace(model.model.config, cache_dtype="int8")), model.params)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_upper_half_of_a_cache_is_near_it(stacked):
    """The view is off by at most 8 steps of the code, and the lower half of the code restores the cache."""
    x = quantize(jax.random.normal(jax.random.key(0), (2, 2, 2, 128, 8)))
    keys = x if stacked else (x[0], x[1])
    view = cache_parts.upper_half(KVCache(keys, keys, jnp.zeros(2, jnp.int32)))
    joined = view.k if stacked else Quantized(*(jnp.stack(parts) for parts in zip(*map(astuple, view.k), strict=True)))
    step = x.scale[..., None]
    error = jnp.abs(dequantize(joined) - dequantize(x))
    assert joined.values.dtype == jnp.int8 and float(jnp.max(error / step)) <= 8.001
    without_middle = Quantized(joined.values - 8, x.scale)
    assert float(jnp.max(jnp.abs(dequantize(without_middle) - dequantize(x)) / step)) > 14
    assert len(np.unique(joined.values)) <= 16
    np.testing.assert_array_equal(joined.values - 8 + (x.values & 15), x.values)


def astuple(x: Quantized):
    return x.values, x.scale


def upper_half(target: Target, num_tokens: int = 3):
    return sparse_cache(target, num_tokens=num_tokens, selection="upper_half", pays_from=0)


def test_drafts_by_the_upper_half_are_verified_by_the_whole(monkeypatch):
    plain = depths.texts(rounded())
    assert depths.texts(rounded(), upper_half(rounded())) == plain
    assert depths.texts(rounded(), upper_half(rounded()), verifier=takes_valid) != plain
    passes = lambda: (
        decode(
            rounded(), upper_half(rounded()), depths.PROMPTS, key=jax.random.key(0), max_new_tokens=20
        ).stats.target_passes
    )
    assert passes().mean() < 10
    jax.clear_caches()
    monkeypatch.setattr(cache_parts, "upper_half", lambda cache: cache)
    assert passes().tolist() == [5] * 3, "with the lower half all drafts are right"
    jax.clear_caches()


def test_text_sampled_by_drafts_of_the_upper_half_has_the_joint_law_of_the_target():
    """A mutant fails: the target verifies with a uniform q instead of the law of the upper half."""
    small = rounded(vocab=3)
    counts, law, result = pairs_after(lambda target: upper_half(target, 2), target=small, samples_per_prompt=4096)
    assert chi_square(counts, law) > 1e-3
    assert result.stats.accepted.sum() > 15
    drafter = upper_half(small, 2)

    def propose(params, *args):
        tree, state = drafter.propose(params, *args)
        return tree._replace(logits=jnp.zeros_like(tree.logits)), state

    mutant, _, _ = pairs_after(lambda _: drafter.replace(propose=propose), target=small, samples_per_prompt=4096)
    assert chi_square(mutant, law) < 1e-6


def test_the_upper_half_needs_an_int8_cache():
    with pytest.raises(UsageError, match="selection upper_half reads an int8 cache, and that of llama is float32"):
        upper_half(depths.target())


def test_what_is_refused():
    with pytest.raises(UsageError, match='selection must be one of sinks, snapkv, retrieval, upper_half, not "h2o"'):
        sparse_cache(depths.target(), selection="h2o")
    with pytest.raises(UsageError, match="budget must be a whole number of at least 33"):
        sparse_cache(depths.target(), budget=32)
    with pytest.raises(UsageError, match="the model markov has no cache of keys and values on one device"):
        sparse_cache(markov())
