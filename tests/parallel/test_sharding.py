"""A sharded target gives the tokens of an unsharded one, and no device stores or gathers more than its part."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import exhaustive, those
from toy import tiny_llama

import specjax
from specjax import parallel, trees
from specjax.drafters import prompt_lookup, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run
from specjax.errors import UsageError
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.parallel.layer_parallel import check_layer_parallel
from specjax.types import Target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]
VOCAB = 1024  # large beside everything else, so that a gathered row of logits is seen
HEADS = {"num_heads": 8, "head_dim": 64, "vocab": VOCAB}


# As many kv heads as devices, and fewer, which repeats them.
@pytest.mark.parametrize(
    ("data", "model", "kv_heads", "stacked"), [exhaustive(1, 8, 8, True), (2, 4, 2, True), exhaustive(4, 2, 1, False)]
)
@pytest.mark.parametrize("name", those({"two_model"}, ["prompt_lookup", "two_model"]))
def test_mesh_equals_one_device(data, model, kv_heads, stacked, name):
    target = tiny_llama(num_kv_heads=kv_heads, stacked=stacked, **HEADS)
    draft = tiny_llama(seed=1, layers=1, num_kv_heads=8, vocab=VOCAB, num_heads=8)
    mesh = parallel.mesh(data, model)
    drafter = prompt_lookup(3) if name == "prompt_lookup" else two_model(draft, tree=trees.parse("2x1"))
    options = {"key": jax.random.key(3), "max_new_tokens": 8, "temperature": 0.0 if name == "prompt_lookup" else 0.9}
    full = specjax.decode(target, drafter, PROMPTS, **options)
    spread = specjax.decode(parallel.shard(target, mesh), drafter, PROMPTS, **options)
    assert spread.to_lists() == full.to_lists()


@pytest.mark.parametrize(
    "norms",
    [{"qk_norm": True, "qk_norm_scope": "projection", "norms": "after"}, {"qk_layer_norm": True}],
    ids=["OLMo", "Chameleon"],
)
def test_a_norm_over_all_heads_is_that_of_one_device(norms):
    """Each head has its weights. Heads are on several devices, and key/value heads are repeated."""
    target = tiny_llama(num_kv_heads=2, stacked=True, **norms, **HEADS)
    noise = np.random.default_rng(0)
    louder = lambda x: x + 0.2 * noise.normal(size=x.shape).astype(np.float32)
    target = Target(target.model, jax.tree.map(louder, target.params))
    options = {"key": jax.random.key(3), "max_new_tokens": 8}
    full = specjax.decode(target, prompt_lookup(3), PROMPTS, **options)
    sharded = parallel.shard(target, parallel.mesh(2, 4))
    assert specjax.decode(sharded, prompt_lookup(3), PROMPTS, **options).to_lists() == full.to_lists()
    with pytest.raises(UsageError, match="has weights of q/k norms for each head"):
        check_layer_parallel(dataclasses.replace(target.model.config, num_layers=4), parallel.mesh(1, 2, layer=2))


@pytest.mark.parametrize(("data", "model", "kv_heads"), [(2, 4, 2), exhaustive(1, 8, 8)])
def test_int8_cache_is_spread_like_any_other(data, model, kv_heads):
    target = tiny_llama(num_kv_heads=kv_heads, stacked=True, cache_dtype="int8", **HEADS)
    options = {"key": jax.random.key(3), "max_new_tokens": 8}
    sharded = parallel.shard(target, parallel.mesh(data, model))
    cache = jax.jit(lambda: sharded.model.init_cache(sharded.params, None, 4, 128))()
    parts = {leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves((cache.k, cache.v))}
    assert parts == {8} and cache.k.scale.dtype == jnp.float32
    full = specjax.decode(target, prompt_lookup(3), PROMPTS, **options)
    assert specjax.decode(sharded, prompt_lookup(3), PROMPTS, **options).to_lists() == full.to_lists()


def test_a_vocabulary_that_the_mesh_does_not_divide_stays_whole():
    target = tiny_llama(num_heads=8, num_kv_heads=8, head_dim=64, vocab=VOCAB + 3)
    options = {"key": jax.random.key(3), "max_new_tokens": 8}
    sharded = specjax.shard(target, specjax.mesh(1, 8))
    assert sharded.params["head"]["weight"].sharding.is_fully_replicated
    assert not sharded.params["layers"][0]["mlp"]["up"]["weight"].sharding.is_fully_replicated
    full = specjax.decode(target, prompt_lookup(3), PROMPTS, **options)
    assert specjax.decode(sharded, prompt_lookup(3), PROMPTS, **options).to_lists() == full.to_lists()


@pytest.mark.parametrize("over", those([("model",)], [(), ("model",), ("layer",)]))
def test_a_draft_model_on_fewer_devices_than_its_target(over):
    target, draft = tiny_llama(num_kv_heads=8, **HEADS), tiny_llama(seed=1, layers=1, num_kv_heads=2, vocab=VOCAB)
    mesh = specjax.mesh(1, 4, layer=2)
    options = {"key": jax.random.key(3), "max_new_tokens": 8}
    full = specjax.decode(target, two_model(draft, 2), PROMPTS, **options)
    small = specjax.shard(draft, mesh, over=over)
    parts = {leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(small.params)}
    assert max(parts) == {(): 1, ("model",): 4, ("layer",): 2}[over]
    assert specjax.decode(specjax.shard(target, mesh), two_model(small, 2), PROMPTS, **options).to_lists() == (
        full.to_lists()
    )


def test_equal_logits_on_different_devices():
    """The smaller id wins, on whichever device the rows of the head are."""
    target = tiny_llama(num_kv_heads=8, **HEADS)
    head = target.params["head"]["weight"]
    twins = target.params | {"head": {"weight": jnp.concatenate([head[: VOCAB // 2]] * 2)}}
    target = specjax.Target(target.model, twins)
    options = {"key": jax.random.key(3), "max_new_tokens": 8}
    sharded = specjax.decode(parallel.shard(target, parallel.mesh(1, 8)), prompt_lookup(3), PROMPTS, **options)
    assert sharded.to_lists() == specjax.decode(target, prompt_lookup(3), PROMPTS, **options).to_lists()
    assert max(map(max, sharded.to_lists())) < VOCAB // 2


@pytest.mark.parametrize("noisy", [True, False])
def test_draws_over_parts_of_the_vocabulary(noisy):
    """Draws equal those of one device bit for bit, equal scores included; only ids and scores are transferred."""
    logits = jnp.round(jax.random.normal(jax.random.key(0), (4, 3, VOCAB)) * 4) / 2
    keys = jax.random.split(jax.random.key(1), (4, 3)) if noisy else None
    mesh = parallel.mesh(2, 4)
    spread = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", None, "model")))

    @jax.jit
    def run(keys, logits):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gumbel_topk(keys, logits, 5, temperature=jnp.full((4, 3), 0.7))

    ids, scores = gumbel_topk(keys, logits, 5, temperature=0.7)
    actual = run(keys, spread)
    np.testing.assert_array_equal(actual[0], ids)
    np.testing.assert_array_equal(actual[1], scores)
    text = run.lower(keys, spread).compile().as_text()
    assert "all-gather" in text and f",{VOCAB}]" not in text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_collectives_are_those_intended(temperature):
    """There are two sums per layer and pass, and a few small ones; the cache and the logits are never gathered."""
    target = parallel.shard(tiny_llama(num_kv_heads=8, stacked=True, **HEADS), parallel.mesh(1, 8))
    settings = Settings(temperature)
    job = prepare(target, prompt_lookup(3), PROMPTS, settings, key=jax.random.key(0), max_new_tokens=8)
    text = run.lower(job).compile().as_text()
    cache = jax.eval_shape(lambda: target.model.init_cache(target.params, None, *job.tokens.shape)).k
    gathered = re.findall(r"= (?:\()?(\w+)\[([\d,]*)\]\S* all-gather\(", text)
    sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for _, dims in gathered]
    assert max(sizes, default=0) < min(VOCAB, cache.size // 8), gathered
    assert "all-reduce" in text


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_and_top_p_over_parts_of_the_vocabulary(ties):
    """The tokens are those of one device, even with ties at the threshold; no array of vocabulary size travels."""
    target = tiny_llama(num_kv_heads=8, **HEADS)
    if ties:  # four equal logits, each on a device of its own
        head = target.params["head"]["weight"]
        twins = target.params | {"head": {"weight": jnp.concatenate([head[: VOCAB // 4]] * 4)}}
        target = specjax.Target(target.model, twins)
    options = {"key": jax.random.key(3), "max_new_tokens": 8, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    sharded = parallel.shard(target, parallel.mesh(2, 4))
    full = specjax.decode(target, prompt_lookup(3), PROMPTS, **options)
    assert specjax.decode(sharded, prompt_lookup(3), PROMPTS, **options).to_lists() == full.to_lists()

    settings = Settings(temperature=0.7, top_k=5, top_p=0.9)
    job = prepare(sharded, prompt_lookup(3), PROMPTS, settings, key=options["key"], max_new_tokens=8)
    text = run.lower(job).compile().as_text()
    sent = re.findall(r"= (.*) (?:all-\w+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", text)
    shapes = {tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w\[([\d,]*)\]", " ".join(sent))}
    width = target.params["embed"]["weight"].shape[1]
    assert any(width in shape for shape in shapes), "the sums of the layers, [B, T, width]"
    assert all(VOCAB not in shape and (width in shape or np.prod(shape) < VOCAB) for shape in shapes), shapes


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"needs 16 devices, but there are 8; use fewer parts, or set .*count=16"):
        specjax.mesh(2, 8)
    with pytest.raises(UsageError, match=r"must be at least 1, not \(2, 0, 1, 1\)"):
        specjax.mesh(2, 1, layer=0)
    with pytest.raises(UsageError, match='axes x; it needs "data"'):
        specjax.shard(tiny_llama(), jax.sharding.Mesh(np.array(jax.devices()[:2]), "x"))
    with pytest.raises(UsageError, match=r"8 parts .* 6 query and 3 key/value heads of .*; choose 1 or 2 or 3 or 6"):
        specjax.shard(tiny_llama(num_heads=6, num_kv_heads=3), specjax.mesh(1, 8))
    with pytest.raises(UsageError, match="llama is already sharded"):
        specjax.shard(specjax.shard(tiny_llama(), specjax.mesh(1, 2)), specjax.mesh(1, 2))
    with pytest.raises(UsageError, match="over has the axes pipeline"):
        specjax.shard(tiny_llama(), specjax.mesh(1, 2), over=("pipeline",))
