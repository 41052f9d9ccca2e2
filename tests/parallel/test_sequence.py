"""A cache with slots on several devices: attention and commits equal those on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiers import exhaustive
from toy import tiny_llama

import specjax
from specjax import trees
from specjax.drafters import prompt_lookup, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.models import cache as kv
from specjax.pallas_kernels.tree_attention import shard_over_slots, tree_attention
from specjax.pallas_kernels.tree_attention.reference import tree_attention as reference
from specjax.serving import batch

NEW = 12
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 64, n).tolist() for n in (3, 121, 130, 250)]  # within, across and behind a device's part


CHAIN, TREE = (prompt_lookup(4), 0.0), (two_model(tiny_llama(1, 1), tree=trees.parse("2x1")), 0.9)


@pytest.mark.parametrize(
    ("mesh", "changes", "case"),
    [
        ({"data": 1, "model": 2, "sequence": 4}, {"stacked": True, "cache_lanes": 16}, TREE),
        exhaustive({"data": 2, "model": 1, "sequence": 4}, {"window": 100}, CHAIN),
        exhaustive({"data": 1, "model": 2, "sequence": 2}, {"stacked": True, "cache_dtype": "int8"}, CHAIN),
        exhaustive({"data": 1, "model": 2, "sequence": 4}, {"sinks": True}, CHAIN),
    ],
    ids=["tree", "window", "int8", "sinks"],
)
def test_sequence_sharded_cache_equals_one_device(mesh, changes, case):
    target, (drafter, temperature) = tiny_llama(vocab=64, **changes), case
    spread = specjax.shard(target, specjax.mesh(**mesh))
    options = {"key": jax.random.key(3), "max_new_tokens": NEW, "temperature": temperature}
    full = specjax.decode(target, drafter, PROMPTS, **options)
    assert specjax.decode(spread, drafter, PROMPTS, **options).to_lists() == full.to_lists()


def test_served_prompts_are_read_anew(monkeypatch):
    """A chunk that crosses the end of a part is no range of slots, so nothing is stored. The mutant stores it."""
    target, draft = tiny_llama(vocab=64), two_model(tiny_llama(1, 1), tree=trees.parse("2x1"))
    spread = specjax.shard(target, specjax.mesh(1, 2, sequence=4))
    long = RANDOM.integers(0, 64, 420).tolist()
    requests = [specjax.Request(prompt, n) for n, prompt in enumerate((long, long, [*long[:400], 5, 6]))]

    def run(target):
        texts, num_stored = {}, []
        options = {"slots": 1, "longest_prompt": 420, "max_new_tokens": NEW, "prefix_gib": 0.1}
        for served in specjax.serve(target, draft, requests, **options):
            texts.setdefault(served.request, []).extend(served.tokens)
            num_stored.append(served.cached)
        return texts, max(num_stored)

    expected, num_stored = run(target)
    assert num_stored > 256  # more than the slots of a part
    assert run(spread) == (expected, 0)
    monkeypatch.setattr(batch, "splits_slots", lambda model: False)
    assert run(spread)[0] != expected


def test_no_device_holds_or_gathers_the_whole_cache():
    target = specjax.shard(tiny_llama(stacked=True, num_kv_heads=4), specjax.mesh(1, 2, sequence=4))
    job = prepare(target, prompt_lookup(3), PROMPTS, Settings(), key=jax.random.key(0), max_new_tokens=NEW)
    state = start(job)
    cache = jax.jit(lambda: target.model.init_cache(target.params, None, *job.tokens.shape))()
    assert cache.k.size // cache.k.addressable_shards[0].data.size == 8
    assert cache.k.shape[-2] % (4 * kv.SLOTS) == 0 and cache.k.shape == state.cache.k.shape
    assert 4 * kv.slots_per_device(cache.k.addressable_shards[0].data) >= job.tokens.shape[1]
    text = step.lower(job.parts, state).compile().as_text()
    gathered = re.findall(r"= (?:\()?\w+\[([\d,]*)\]\S* all-gather\(", text)
    assert max((np.prod([int(n) for n in dims.split(",") if n]) for dims in gathered), default=0) < cache.k.size // 8


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("length", [0, 64, 65, 255])
def test_attention_over_parts_of_the_prefix(length, window):
    """The tree has a prefix on four devices. Slots beyond the length may contain anything."""
    batch, t, heads, kv_heads, slots, dim = 2, 5, 4, 2, 256, 16
    keys = jax.random.split(jax.random.key(length), 5)
    q = jax.random.normal(keys[0], (batch, t, heads, dim))
    k, v = (jax.random.normal(key, (batch, kv_heads, t, dim)) for key in keys[1:3])
    lengths = jnp.array([length, max(length - 40, 0)])
    stored = jnp.arange(slots)[:, None] < lengths[:, None, None, None]
    prefix = [jnp.where(stored, jax.random.normal(key, (batch, kv_heads, slots, dim)), 50.0) for key in keys[3:]]
    parents = jnp.array([[-1, 0, 0, 1, 1]] * batch)
    mask = specjax.trees.operations.ancestor_mask(parents, jnp.ones_like(parents, bool))
    positions = lengths[:, None] + specjax.trees.operations.depths(parents)
    arrays = q, k, v, *prefix, lengths, positions, mask
    options = {"scale": dim**-0.5, "softcap": 30.0}
    expected = reference(*arrays, window=window, **options)

    def attend(*args, **where):
        return tree_attention(*args, **where, **options, implementation="xla")

    def local(*args):
        return shard_over_slots(attend, ("sequence",))(*args, key_positions=positions, layer=None, window=window)

    mesh = specjax.mesh(1, 1, sequence=4)
    cut = PartitionSpec(None, None, "sequence")
    specs = (*[PartitionSpec()] * 3, cut, cut, *[PartitionSpec()] * 3)
    actual = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))(
        *arrays
    )
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_derivatives_over_parts_of_the_prefix():
    target = tiny_llama(num_heads=4, num_kv_heads=4, stacked=True)
    spread = specjax.shard(target, specjax.mesh(1, 2, sequence=2))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 6)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def loss(model, params):
        positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
        output, _ = model.forward(params, tokens, model.init_cache(params, None, 2, 16), positions=positions, mask=mask)
        return jnp.mean(jax.nn.logsumexp(output.logits, -1))

    expected, actual = (jax.grad(loss, 1)(one.model, one.params) for one in (target, spread))
    for a, b in zip(*map(jax.tree.leaves, (expected, actual)), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [0, 5, 7, 8, 13, 20])
@pytest.mark.parametrize("slots", [128, 3], ids=["in one window", "in pieces"])
def test_commit_to_the_part_that_a_device_holds(start, slots, monkeypatch):
    """Windows lie in one part, across two, or outside. A chunk of a prompt may be wider than what a part takes."""
    monkeypatch.setattr(kv, "SLOTS", slots)
    random = np.random.default_rng(start)
    make = lambda n: (jnp.asarray(random.normal(size=(1, 2, n, 3)), jnp.float32),)
    cache = kv.KVCache(make(24), make(24), jnp.array([start]))
    pending = kv.Pending(make(4), make(4), jnp.zeros((1, 4), jnp.int32), jnp.zeros((1,), jnp.int32))
    path, count = jnp.array([[0, 2, 3, -1]]), jnp.array([3])
    full = kv.commit(cache, pending, path, count)
    behind = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, kv.SLOTS), (0, 0)))
    for first in (0, 8, 16):
        cut = lambda x, first=first: jax.tree.map(lambda leaf: behind(leaf[:, :, first : first + 8]), x)
        part = kv.commit(cache._replace(k=cut(cache.k), v=cut(cache.v)), pending, path, count, jnp.int32(first))
        text = np.clip(start + 3 - first, 0, 8)  # slots past the text are never read
        for ours, theirs in zip((part.k, part.v), (full.k, full.v), strict=True):
            np.testing.assert_array_equal(ours[0][:, :, :text], cut(theirs)[0][:, :, :text])
        np.testing.assert_array_equal(part.length, full.length)
