"""Kangaroo without its adapter, after all layers, and its drafts against its outputs for the same text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, draft, random_params
from heads import layer_of
from toy import tiny_llama

from specjax import UsageError, decode, drafters, trees
from specjax.models.heads.contract import DraftHead, FeaturePairs
from specjax.models.heads.kangaroo import KangarooConfig, kangaroo_head
from specjax.types import Context

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [7, 7, 7]]


def idle(exit_layer: int) -> DraftHead:
    """Return an adapter that adds zero, with the target's own norm."""
    config = KangarooConfig(layer_of(tiny_llama()), exit_layer)
    params = random_params("kangaroo", config)
    params["attention"]["o"]["weight"][:] = 0
    params["norm"]["weight"] = tiny_llama().params["norm"]["weight"]
    return DraftHead(kangaroo_head(config), params)


def run(drafter, **options):
    result = decode(tiny_llama(), drafter, PROMPTS, key=0, max_new_tokens=20, **options)
    return result.to_lists(), result.stats.target_passes.tolist()


def test_without_an_adapter_it_is_an_early_exit():
    never = trees.stops.confidence(0.0)
    ours = run(drafters.head_drafter(idle(1), 3, stop=never), temperature=1.0)
    assert ours == run(drafters.early_exit(tiny_llama(), 1, num_tokens=3, stop=never), temperature=1.0)


def test_behind_all_layers_it_is_the_target():
    text, passes = run(drafters.head_drafter(idle(2), 3, stop=trees.stops.confidence(0.0)))
    assert passes == [5, 5, 5]
    assert text == run("autoregressive")[0]


def test_a_token_that_is_not_sure_ends_the_draft():
    """An impossible threshold stops each draft after one token: two tokens per pass after all layers."""
    assert run(drafters.head_drafter(idle(2), 3, stop=trees.stops.confidence(1.1)))[1] == [10, 10, 10]


def test_what_it_drafts_is_what_it_says_of_that_text():
    """Drafted tokens run through the layers with pending entries; the reference reads them as text."""
    config = KangarooConfig(layer_of(tiny_llama()), 1)
    head, params, target = kangaroo_head(config), random_params("kangaroo", config), tiny_llama()
    text = np.zeros((2, 12), np.int32)
    for b, n in enumerate(LENGTH):
        text[b, : n + 3] = [*TEXT[b, :n], *PATH[b]]

    @functools.partial(jax.jit, static_argnums=1)
    def said(length, depth: int):
        positions = jnp.broadcast_to(jnp.arange(12), text.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))
        cache = target.model.init_cache(target.params, None, 2, 32)
        output, pending = target.model.forward(
            target.params, jnp.asarray(text), cache, positions=positions, mask=mask, taps=head.taps
        )
        context = Context(
            jnp.asarray(text), length, cache=target.model.commit(cache, pending, positions, length - 1), target=target
        )
        pairs = FeaturePairs(head.features_of(output), jnp.roll(jnp.asarray(text), -1, 1), length - 1)
        memory = head.read(params, head.init_memory(params, context, 2, 32), pairs, context)
        return draft(head, params, memory, context, jnp.asarray(PATH[:, :depth]))

    drafted = said(jnp.asarray(LENGTH), 3)
    for depth in range(1, 4):
        np.testing.assert_allclose(drafted[:, depth], said(jnp.asarray(LENGTH) + depth, 0)[:, 0], atol=1e-3)


def test_a_target_with_fewer_layers_is_refused():
    with pytest.raises(UsageError, match=r"the first 3 layers of its target, but the model .* has 2;"):
        run(drafters.head_drafter(idle(3), 3))
