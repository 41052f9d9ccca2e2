"""A target of another kind plugs in its layers: one with recurrent states (the card's tests of DYNAMAX, B7)."""

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrence
from recurrence import LAYERS, WIDTH

from specjax import UsageError, adaptive, drafters
from specjax.engine.prefill import prefill


@functools.cache
def probes():
    weight = jax.random.normal(jax.random.key(3), (LAYERS, WIDTH))
    return adaptive.Probes(weight, jnp.full((LAYERS,), -0.3))


def exits(threshold: float, identity_from: int = LAYERS, repair: str = "propagate"):
    depth = adaptive.dynamax(probes(), threshold, every=2).replace(repair=repair)
    return adaptive.skip_layers(recurrence.target(identity_from), depth)


def test_without_exits_it_is_the_whole_model():
    assert depths.texts(exits(1.01)) == depths.texts(recurrence.target())


@pytest.mark.parametrize("repair", ["propagate", "absent"])
def test_exits_of_recurrent_layers(repair):
    """A single reading, chains and trees give the text of single steps, whatever a skipped layer does to its state."""
    model = exits(0.6, repair=repair)
    ours = depths.texts(model)
    assert ours != depths.texts(recurrence.target())
    reading, counts = depths.read_again(model, ours)
    likeliest, ran = np.asarray(reading.likeliest), np.asarray(reading.ran.mlp)[counts]
    assert [row[count].tolist() for row, count in zip(likeliest, counts, strict=True)] == ours
    assert ran.any() and not ran.all()
    assert depths.texts(model, drafters.prompt_lookup(4, min_ngram=1)) == ours
    assert depths.texts(model, drafters.token_recycling(recurrence.VOCAB, num_nodes=7)) == ours


@pytest.mark.parametrize(("repair", "is_exact"), [("propagate", True), ("absent", False)])
def test_states_of_skipped_layers(repair, is_exact):
    """Upper layers that change no stream have the states of the whole model, if the exit's stream advances them."""
    tokens, length = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6] + [0] * 128]), jnp.array([8])

    def states(target):
        cache = target.model.start_cache(target.params, None, jnp.array([3]), 160)
        return prefill(target.model, target.params, cache, tokens, length)

    ours, full = states(exits(0.0, 2, repair)).base, states(recurrence.target(2))
    assert np.allclose(ours, full, atol=1e-5) == is_exact


def test_what_needs_slots_is_refused():
    corrections = adaptive.Corrections(jnp.zeros((LAYERS, 2, WIDTH)), jnp.zeros((LAYERS, WIDTH, 2)))
    with pytest.raises(UsageError, match="lora_drop needs a cache of keys and values alone, which recurrence lacks"):
        adaptive.skip_layers(recurrence.target(), adaptive.lora_drop(corrections))
    with pytest.raises(UsageError, match="recurrence has no MLPs to cut; use a model of specjax"):
        adaptive.skip_layers(recurrence.target(), adaptive.matformer())
    with pytest.raises(UsageError, match="recurrence has no numbered layers; use a model of specjax"):
        adaptive.skip_layers(recurrence.target(), adaptive.unified())
    with pytest.raises(UsageError, match="recurrence by dynamax has no layers that can be skipped"):
        adaptive.skip_layers(exits(0.6), adaptive.calm())
