"""A layer-parallel model has the logits of an unsplit one, with layers on their own devices and fewer sums."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import markov, tiny_llama

import specjax
from specjax import UsageError, trees
from specjax.drafters import autoregressive, easyspec
from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.parallel import layer_parallel

SHAPE = {
    "vocab_size": 64,
    "width": 32,
    "num_layers": 7,  # five in the middle: a group and a smaller one, of 2 or of 4
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 64,
}
LLAMA = LlamaConfig(**SHAPE, tied=False, qkv_bias=True)
GEMMA = Gemma3Config(**SHAPE, is_global=(False, True, False, False, True, False, True), window=3)
INT8 = dataclasses.replace(LLAMA, cache_dtype="int8", cache_lanes=16, stacked=True)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]


@functools.cache
def whole(config):
    return specjax.Target(make_model(config), init_params(config, jax.random.key(1)))


@functools.cache
def passes(group):
    """Return (target) -> logits of a prompt, exact; outputs of two drafts, and of three that see those, by groups."""

    @jax.jit
    def run(target):
        model, rows = target.model, 4
        tokens = jax.random.randint(jax.random.key(0), (rows, 9), 0, 64)
        taps = (0, 3, 7)

        def feed(first, end, cache, **options):
            positions = jnp.broadcast_to(jnp.arange(first, end), (rows, end - first))
            recorded = positions.shape[1] + (options["earlier"].positions.shape[1] if "earlier" in options else 0)
            mask = jnp.tril(jnp.ones((end - first, recorded), bool), recorded - (end - first))
            mask = jnp.broadcast_to(mask, (rows, *mask.shape))
            return model.forward(
                target.params, tokens[:, first:end], cache, positions=positions, mask=mask, taps=taps, **options
            )

        empty = model.init_cache(target.params, None, rows, 128)
        prompt, pending = feed(0, 5, empty)
        path = jnp.broadcast_to(jnp.arange(5), (rows, 5))
        cache = model.commit(empty, pending, path, jnp.full(rows, 4))
        drafts, pending = feed(4, 6, cache, group=group)
        return prompt, drafts, feed(6, 9, cache, group=group, earlier=pending)[0]

    return run


# The one stacked, with biases; the other apart, with norms behind its sums.
@pytest.mark.parametrize(
    ("config", "data", "layer", "exactly"), [(INT8, 2, 2, False), exhaustive(GEMMA, 1, 4, True)], ids=["llama", "gemma"]
)
def test_logits_are_those_of_one_device(config, data, layer, exactly):
    placed = layer_parallel.place_layer_parallel(whole(config), specjax.mesh(data, 2, layer=layer))
    expected = passes(layer)(whole(config))
    for ours, theirs in zip(jax.tree.leaves(passes(layer)(placed)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)
    if not exactly:
        return
    exact = passes(1)(whole(config))  # which is another distribution
    assert float(jnp.max(jnp.abs(exact[1].logits - expected[1].logits))) > 0.01
    for ours, theirs in zip(jax.tree.leaves(passes(1)(placed)), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


# The target as its own draft, so that exact drafts would all be accepted. 4 devices and a chain, 8 and a tree.
@pytest.mark.parametrize(("data", "model", "layer", "tree"), [exhaustive(1, 2, 2, None), (2, 1, 4, "2x1x1")])
def test_greedy_text_on_a_mesh(data, model, layer, tree):
    target = tiny_llama(layers=7, num_heads=8, num_kv_heads=8, stacked=True)
    mesh = specjax.mesh(data, model, layer=layer)
    options = {"key": jax.random.key(3), "max_new_tokens": 12}
    plain = specjax.decode(target, autoregressive(), PROMPTS, **options).to_lists()
    settings = {"num_tokens": 3, "tree": tree and trees.parse(tree)}
    alone = specjax.decode(target, easyspec(target, group=layer, **settings), PROMPTS, **options)
    draft = layer_parallel.place_layer_parallel(target, mesh)
    spread = specjax.decode(specjax.shard(target, mesh), easyspec(draft, **settings), PROMPTS, **options)
    assert spread.to_lists() == alone.to_lists() == plain
    for ours, theirs in zip(jax.tree.leaves(spread.stats), jax.tree.leaves(alone.stats), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert 0 < int(spread.stats.accepted.sum()) < int(spread.stats.drafted.sum())


def test_devices_keep_their_own_layers():
    """Attention and cache of the five middle layers are split by layer and head, MLPs by width."""
    mesh = specjax.mesh(1, 2, layer=4)
    placed = layer_parallel.place_layer_parallel(whole(LLAMA), mesh)
    shapes = layer_parallel.abstract_draft(LLAMA, mesh)
    assert shapes.model is placed.model
    for ours, theirs in zip(jax.tree.leaves(placed.params), jax.tree.leaves(shapes.params), strict=True):
        assert (ours.shape, ours.dtype, ours.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)
    cache = jax.jit(lambda: placed.model.init_cache(placed.params, None, 2, 128))()
    parts = lambda x: x.size // x.addressable_shards[0].data.size
    layers = placed.params["layers"]
    assert [parts(device_part["attention"]["q"]["weight"]) for device_part in layers["device"]] == [8, 8]
    assert [parts(shared_part["mlp"]["up"]["weight"]) for shared_part in layers["shared"]] == [8, 8]
    assert [parts(x) for x in (layers["first"]["attention"]["q"]["weight"], cache.k["first"])] == [2, 2]
    assert [parts(x) for x in (*cache.k["groups"], *cache.v["groups"])] == [8] * 4
    second = layers["device"][0]["attention"]["o"]["weight"][0, 1]  # layer 2
    np.testing.assert_array_equal(second, whole(LLAMA).params["layers"][2]["attention"]["o"]["weight"])


@pytest.mark.parametrize("model", [1, 2])
def test_collectives_of_a_group(model):
    """There is one for all attentions and one per MLP, and two per layer in an exact pass."""
    config = dataclasses.replace(LLAMA, num_layers=10, num_kv_heads=4)
    placed = layer_parallel.abstract_draft(config, specjax.mesh(1, model, layer=4))

    def count(group):
        def forward(target):
            one = jnp.ones((1, 1), jnp.int32)
            cache = target.model.init_cache(target.params, None, 1, 128)
            return target.model.forward(target.params, one, cache, positions=one, mask=one[None] > 0, group=group)

        text = jax.jit(forward).lower(placed).compile().as_text()
        actual = [re.findall(r"= .*? (all-\w+|collective-\w+|reduce-scatter)\(", part) for part in text.split("\n\n")]
        [loop] = [part for part, text in zip(actual, text.split("\n\n"), strict=True) if part and "ENTRY" not in text]
        return sorted(loop)

    assert count(1) == ["all-reduce"] * 8
    assert count(4) == (["all-gather"] + ["all-reduce"] * 4 if model == 1 else ["all-reduce"] * 5)


def test_bad_settings():
    mesh = specjax.mesh(1, 1, layer=4)
    draft = whole(LLAMA)
    with pytest.raises(UsageError, match='group is 3, but the mesh has 4 devices along "layer"'):
        layer_parallel.place_layer_parallel(draft, mesh, group=3)
    with pytest.raises(UsageError, match="group must be at least 1, not 0"):
        layer_parallel.place_layer_parallel(draft, mesh, group=0)
    with pytest.raises(UsageError, match='2 or more devices along "layer"'):
        layer_parallel.place_layer_parallel(draft, specjax.mesh(1, 2))
    with pytest.raises(UsageError, match="has 5 layers, too few for a group of 4"):
        layer_parallel.place_layer_parallel(tiny_llama(layers=5), mesh)
    with pytest.raises(UsageError, match="does not divide the 6 query and 3 key/value heads"):
        layer_parallel.place_layer_parallel(
            tiny_llama(layers=4, num_heads=6, num_kv_heads=3), specjax.mesh(1, 4, layer=2)
        )
    with pytest.raises(UsageError, match=r"not from specjax\.models"):
        layer_parallel.place_layer_parallel(markov(), mesh)
    with pytest.raises(UsageError, match="llama is already sharded"):
        layer_parallel.place_layer_parallel(specjax.shard(draft, specjax.mesh(1, 2)), mesh)
    with pytest.raises(UsageError, match="make it with"):
        layer_parallel.place_layer_parallel(draft, jax.sharding.Mesh(np.array(jax.devices()[:4]), "layer"))
    placed = layer_parallel.place_layer_parallel(draft, mesh)
    assert easyspec(placed).propose is easyspec(placed, group=4).propose
    with pytest.raises(UsageError, match="placed for groups of 4 layers, not 2"):
        easyspec(placed, group=2)
    with pytest.raises(UsageError, match="cannot skip layers"):
        placed.model.forward(placed.params, None, None, positions=None, mask=None, layers=())
    with pytest.raises(UsageError, match="groups of 1 or 4 layers, not 2"):
        placed.model.forward(placed.params, None, None, positions=None, mask=None, group=2)
