"""Drafts of the first layers, compared with a model that has only these layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive, those
from toy import tiny_llama

from specjax import Target, UsageError, decode, trees
from specjax.drafters import early_exit, two_model
from specjax.drafters.layers.early_exit import first_layers, self_draft
from specjax.engine.prefill import prefill
from specjax.models import layers as L
from specjax.models import make_model
from specjax.types import Capabilities, Context

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5]]


@functools.cache
def truncated(layers):
    """Return the first layers of the tiny model as a separate model."""
    target = tiny_llama(layers=3)
    config = dataclasses.replace(target.model.config, num_layers=layers)
    params = dict(target.params, layers={i: target.params["layers"][i] for i in range(layers)})
    return Target(make_model(config), params)


@pytest.mark.parametrize(("tree", "temperature"), [exhaustive(None, 0.0), ("2x2", 1.0)])
def test_the_first_layers_draft_like_a_model_of_their_own(tree, temperature):
    """Compare text and passes: up to the exit the target's cache equals that of the separate model."""
    target, tree = tiny_llama(layers=3), tree and trees.parse(tree)
    run = functools.partial(decode, target, key=jax.random.key(0), max_new_tokens=20, temperature=temperature)
    ours = run(early_exit(target, 2, num_tokens=3, tree=tree), PROMPTS)
    theirs = run(two_model(truncated(2), 3, tree=tree), PROMPTS)
    assert ours.to_lists() == theirs.to_lists()
    assert int(ours.stats.accepted.sum()) > 0
    for a, b in zip(jax.tree.leaves(ours.stats), jax.tree.leaves(theirs.stats), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("temperature", those([1.0], [0.0, 1.0]))
def test_it_stops_where_it_is_not_sure_as_a_model_of_its_own_would(temperature):
    target, stop = tiny_llama(layers=3), trees.stops.confidence(0.3)
    run = functools.partial(decode, target, key=jax.random.key(0), max_new_tokens=20, temperature=temperature)
    ours = run(early_exit(target, 2, num_tokens=5, stop=stop), PROMPTS)
    theirs = run(two_model(truncated(2), 5, stop=stop), PROMPTS)
    longest = run(early_exit(target, 2, num_tokens=5), PROMPTS)
    assert ours.to_lists() == theirs.to_lists()
    np.testing.assert_array_equal(ours.stats.drafted, theirs.stats.drafted)
    assert 0 < int(ours.stats.drafted.sum()) < int(longest.stats.drafted.sum())


@pytest.mark.parametrize("temperature", those([1.0], [0.0, 1.0]))
def test_all_layers_are_always_accepted(temperature):
    target = tiny_llama()
    drafter = early_exit(target, 2, num_tokens=3)
    result = decode(target, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=16, temperature=temperature)
    assert result.block_efficiency.tolist() == [4.0, 4.0]


def test_passes_and_layers_that_no_row_needs_do_not_run(monkeypatch):
    ran = []

    def counted(self, x, call=L.GatedMLP.__call__):
        jax.debug.callback(lambda: ran.append(x.shape))
        return call(self, x)

    target = tiny_llama(layers=3)
    tokens = jnp.zeros((2, 260), jnp.int32).at[:, :3].set(jnp.array([[1, 2, 3], [4, 5, 6]]))
    length = jnp.array([3, 2])
    cache = prefill(
        target.model, target.params, target.model.init_cache(target.params, None, 2, 260), tokens, length - 1
    )
    context = Context(tokens, length, cache=cache, target=target)
    monkeypatch.setattr(L.GatedMLP, "__call__", counted)

    @functools.partial(jax.jit, static_argnames="stopping")
    def draft(limit, exits, last, stopping=False):
        stop = trees.Stop(lambda value, fed: (value, fed.depth + 1 < last[:, None])) if stopping else None
        layers = first_layers(target.model, exits)
        builder = dataclasses.replace(trees.chain(4), stop=stop)
        return self_draft(builder, None, context, jnp.asarray(limit), layers)

    for limit, exits, last, depths, passes in (
        ((4, 4), (1, 1), None, (4, 4), 4),  # one layer in each of four passes
        ((2, 4), (2, 1), None, (2, 4), 2 + 2 + 1 + 1),  # the row that exits later leaves earlier
        ((0, 0), (3, 3), None, (0, 0), 0),
        ((4, 4), (3, 1), (1, 3), (1, 3), 3 + 1 + 1),  # rows that stop
        ((4, 0), (1, 3), (2, 4), (2, 0), 2),
    ):
        ran.clear()
        last = jnp.array([9, 9] if last is None else last)
        tree = draft(jnp.array(limit), jnp.array(exits), last, stopping=True)
        jax.effects_barrier()
        assert (jnp.sum(tree.valid, 1) - 1).tolist() == list(depths)
        assert len(ran) == passes


def test_bad_settings():
    with pytest.raises(UsageError, match="exit_layer must be from 1 to 2, the number of layers of the model, not 3"):
        early_exit(tiny_llama(), 3)
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        early_exit(tiny_llama(), num_tokens=0)
    nameless = Target(tiny_llama().model._replace(capabilities=Capabilities()), ())
    with pytest.raises(UsageError, match="cannot run a part of its layers, which early_exit needs; choose"):
        early_exit(nameless)
