"""Models that run some of their sublayers, against models whose other sublayers add zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those

from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.models import layers as L
from specjax.types import Stream, Sublayers

SHAPE = {
    "vocab_size": 32,
    "width": 16,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_width": 32,
}
LLAMA = LlamaConfig(**SHAPE, tied=False)
GEMMA = Gemma3Config(**SHAPE, is_global=(False, True, False), window=3, logit_softcap=5.0)
CONFIGS = [LLAMA, dataclasses.replace(LLAMA, stacked=True), dataclasses.replace(GEMMA, stacked=True)]
TOKENS = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
ATTENTION = jnp.array([[True, False, True], [False, True, True]])
MLP = jnp.array([[False, True, True], [True, True, False]])


def forward(model, params, layers=None, taps=(), tokens=TOKENS):
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (2, 4, 4))
    cache = model.init_cache(params, None, 2, 8)
    return model.forward(params, tokens, cache, positions=positions, mask=mask, layers=layers, taps=taps)


def without(params, name, layer, stacked):
    """Return `params` with a projection of zeros, so that the sublayer that ends in it adds zero."""

    def zero(path, leaf):
        keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        if keys[0] != "layers" or name not in keys:
            return leaf
        if stacked:
            return leaf.at[layer].set(0.0)
        return leaf * 0.0 if keys[1] == layer else leaf

    return jax.tree_util.tree_map_with_path(zero, params)


@pytest.mark.parametrize("config", those(CONFIGS[::2], CONFIGS), ids=["llama", "llama stacked", "gemma stacked"])
def test_a_skipped_sublayer_adds_nothing_per_row(config):
    model, params = make_model(config), init_params(config, jax.random.key(0))
    run = jax.jit(lambda params, layers: forward(model, params, layers, taps=(1, 3)))
    full, whole_pending = jax.jit(lambda params: forward(model, params, taps=(1, 3)))(params)
    every = jnp.ones((2, 3), bool)
    ours, pending = run(params, Sublayers(every, every))
    for a, b in zip(jax.tree.leaves((ours, pending)), jax.tree.leaves((full, whole_pending)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    ours, pending = run(params, Sublayers(ATTENTION, MLP))
    for b in range(2):
        changed = params
        for layer in range(3):
            changed = changed if ATTENTION[b, layer] else without(changed, "o", layer, config.stacked)
            changed = changed if MLP[b, layer] else without(changed, "down", layer, config.stacked)
        expected, _ = jax.jit(lambda params: forward(model, params, taps=(1, 3)))(changed)
        assert float(jnp.max(jnp.abs(expected.logits[b] - full.logits[b]))) > 1e-3
        for a, c in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a[b], c[b], atol=1e-5)
    nobody = jnp.zeros((2, 3), bool)
    _, pending = run(params, Sublayers(nobody, every))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((pending.k, pending.v)))
    assert run._cache_size() == 1


@pytest.mark.parametrize("config", those(CONFIGS[2:], CONFIGS), ids=["llama", "llama stacked", "gemma stacked"])
def test_a_stream_goes_on_where_it_was_taken(config):
    model, params = make_model(config), init_params(config, jax.random.key(0))

    @jax.jit
    def run(params):
        full, _ = forward(model, params, taps=(0, 1))
        above = lambda first: Sublayers(*[jnp.broadcast_to(jnp.arange(3) >= first, (2, 3))] * 2)
        parts = [forward(model, params, above(i), tokens=Stream(tap)) for i, tap in enumerate(full.taps)]
        return full.logits, [output.logits for output, _ in parts]

    full, parts = run(params)
    for logits in parts:
        np.testing.assert_allclose(logits, full, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["unrolled", "stacked"])
def test_only_what_a_row_needs_is_run(config, monkeypatch):
    ran = []
    for module in (L.Attention, L.GatedMLP):

        def counted(self, x, *arguments, call=module.__call__, name=module.__name__):
            jax.debug.callback(lambda: ran.append(name))
            return call(self, x, *arguments)

        monkeypatch.setattr(module, "__call__", counted)
    model, params = make_model(config), init_params(config, jax.random.key(0))
    run = jax.jit(lambda layers: forward(model, params, layers)[0].logits)
    for attention, mlp in ((ATTENTION, MLP), (ATTENTION & False, MLP), (ATTENTION[:1] & ATTENTION[1:], MLP & False)):
        layers = Sublayers(*(jnp.broadcast_to(x, (2, 3)) for x in (attention, mlp)))
        ran.clear()
        jax.block_until_ready(run(layers))
        jax.effects_barrier()
        expected = [int(jnp.sum(jnp.any(x, 0))) for x in layers]
        assert [ran.count("Attention"), ran.count("GatedMLP")] == expected


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_the_head_reads_a_stream(config):
    model, params = make_model(config), init_params(config, jax.random.key(0))
    output, _ = forward(model, params, taps=(3,))
    np.testing.assert_allclose(model.head(params, output.taps[0]), output.logits, atol=1e-6)
    assert model.capabilities.num_layers == 3
